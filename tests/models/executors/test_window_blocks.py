"""Blocks of windowed layers: with tables that end before the first token, every executor computes the same bits as with
one table for all layers; numbers out of range are refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead.models.core.errors import StepInputError
from polyhead.models.executors.contract import Executor, StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native import library
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.step_memory import native_block_bytes
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.parallel.step_messages import encode_step
from tests.models.executors.test_bounds import HUGE, Bad, unchecked
from tests.models.native.test_step import GENERATORS, LLAMA, head, network, rows_of

BLOCK, BLOCKS, OWN, WINDOW = 16, 24, 9, 20
MIXED = replace(LLAMA, depth=3, window=WINDOW, windowed=(True, False, True))
ALL = replace(LLAMA, window=WINDOW)
SIZES = GENERATORS["layers of several sizes"]  # two windowed layers with keys of one of them, and a wide one
assert SIZES.window == WINDOW
EXECUTORS = [*runnable_targets(), "torch"]


def make_executor(name: str, config: ModelConfig, own: int, precision: Any = "int8") -> Any:
    if name == "torch":
        sizes = {"block_count": BLOCKS, "block_size": BLOCK, "window_blocks": own}
        return TorchExecutor(network(config), head(config), **sizes)
    options = {"block_count": BLOCKS, "window_blocks": own, "instructions": name, "precision": precision}
    return NativeExecutor(network(config), head(config), threads=2, **options)


def seen_table(table: list[int], first: int) -> list[int]:
    """The blocks that a row at position `first` sees, and those behind them."""
    return table[max(first - WINDOW + 1, 0) // BLOCK :]


def generate(executor: Executor, sizes: list[int]) -> list[Tensor]:
    """The logits of two sequences, computed in chunks of these sizes. One of windowed layers' blocks is used again as
    soon as no row sees it, and holds NaN until it is written."""
    free = list(range(BLOCKS, BLOCKS + OWN))
    tables: list[list[int]] = [[], []]
    windows: list[list[int]] = [[], []]
    made, done = [], 0
    for size in sizes:
        parts, own = [], []
        for n in range(2):
            tokens = [(7 * n + 3 * position) % 77 for position in range(done, done + size)]
            while len(tables[n]) * BLOCK < done + size:
                tables[n].append(sum(map(len, tables)))
                windows[n].append(free.pop(0) if free else -1)
            for index in range(max(done - WINDOW + 1, 0) // BLOCK):
                if windows[n][index] != -1:
                    free.append(windows[n][index])
                    windows[n][index] = -1
            parts.append((tokens, done, tables[n]))
            own.append(seen_table(windows[n], done))
        rows = rows_of(parts, last_only=False)
        if executor.window_blocks:
            rows = replace(rows, window_tables=own)
        made.append(executor.step(rows).clone())
        done += size
    return made


@pytest.mark.parametrize("name", EXECUTORS)
@pytest.mark.parametrize("config", [MIXED, ALL, SIZES], ids=["mixed", "all", "several sizes"])
def test_a_table_of_the_window_gives_the_same_bits(name: str, config: ModelConfig) -> None:
    sizes = [5, 30, 1, 1, 17, *[1] * 20, 33, 2]
    for precision in ("int8", "float32")[: 1 if name == "torch" else 2]:
        expected = generate(make_executor(name, config, 0, precision), sizes)
        found = generate(make_executor(name, config, OWN, precision), sizes)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", EXECUTORS)
def test_blocks_of_both_kinds_are_copied(name: str) -> None:
    executor = make_executor(name, MIXED, OWN)
    begin = rows_of([([1, 2, 3, 4, 5], 0, [3])])
    executor.step(replace(begin, window_tables=[[BLOCKS + 2]]))
    more = rows_of([([6], 5, [3])])
    expected = executor.step(replace(more, window_tables=[[BLOCKS + 2]])).clone()
    executor.copy([(3, 7), (BLOCKS + 2, BLOCKS + 8)])
    executor.step(replace(rows_of([([9] * 16, 0, [3])]), window_tables=[[BLOCKS + 2]]))
    copied = rows_of([([6], 5, [7])])
    assert torch.equal(executor.step(replace(copied, window_tables=[[BLOCKS + 8]])), expected)
    for pair in ((0, BLOCKS), (BLOCKS, 0), (BLOCKS, BLOCKS + OWN)):
        with pytest.raises(StepInputError, match="copies"):
            executor.copy([pair])


def test_the_cache_of_torch_is_as_large_as_it_says() -> None:
    executor = make_executor("torch", MIXED, OWN)
    assert [len(kept) for kept in executor.cache.keys] == [OWN, BLOCKS, OWN]


@pytest.mark.parametrize("name", runnable_targets())
def test_the_compiled_cache_is_as_large_as_it_says(name: str) -> None:
    executor = make_executor(name, MIXED, OWN)
    held = sum(executor._library.polyhead_cache_bytes(executor._model, which) for which in range(2))
    all_layers, own = (native_block_bytes(MIXED, "int8", windowed=windowed) for windowed in (False, True))
    assert held == 32 * (all_layers - own) + 16 * own, "blocks are laid out in runs of 16"


def test_a_block_of_windowed_layers_that_held_nan_is_clean_for_the_next_sequence() -> None:
    """In plain torch, where masked values are multiplied; other blocks of the sequence never held any."""
    executor = make_executor("torch", MIXED, OWN)
    rows = replace(rows_of([([5, 6], 0, [2])]), window_tables=[[BLOCKS + 4]])
    expected = executor.step(rows).clone()
    with torch.no_grad():
        kept = executor.network.tokens.weight[7].clone()
        executor.network.tokens.weight[7] = float("nan")
        executor.step(replace(rows_of([([7] * 16, 0, [3])]), window_tables=[[BLOCKS + 4]]))
        executor.network.tokens.weight[7] = kept
    assert executor.nonfinite_blocks == {3, BLOCKS + 4}
    assert torch.equal(executor.step(rows), expected)
    assert executor.nonfinite_blocks == {3}


GOOD = replace(rows_of([([1, 2], 40, [0, 1, 2]), ([3], 3, [4])]), window_tables=[[BLOCKS, BLOCKS + 1], [BLOCKS + 2]])
BAD = {
    "none": Bad("window_tables: they should be there", {"window_tables": None}),
    "too few tables": Bad("window_tables: there are 1, which should be 2", {"window_tables": [[BLOCKS, BLOCKS + 1]]}),
    "too few blocks": Bad(
        "window_tables[0] has 1 blocks, which should be at least 2 and at most 3",
        {"window_tables": [[BLOCKS], [BLOCKS + 2]]},
    ),
    "no block": Bad("window_tables[1] has 0 blocks", {"window_tables": [[BLOCKS, BLOCKS + 1], []]}),
    "too many blocks": Bad(
        "window_tables[1] has 2 blocks, which should be at least 1 and at most 1",
        {"window_tables": [[BLOCKS, BLOCKS + 1], [BLOCKS + 2, BLOCKS + 3]]},
    ),
    "a block of other layers": Bad(
        f"window_tables[1] is {BLOCKS - 1}, which should be at least {BLOCKS} and less than {BLOCKS + OWN}",
        {"window_tables": [[BLOCKS, BLOCKS - 1], [BLOCKS]]},
    ),
    "a block beyond the cache": Bad(
        f"window_tables[0] is {BLOCKS + OWN}", {"window_tables": [[BLOCKS + OWN, BLOCKS], [BLOCKS]]}
    ),
    "a negative block": Bad("window_tables[2] is -1", {"window_tables": [[BLOCKS, BLOCKS], [-1]]}),
    "a huge block": Bad(f"window_tables[2] is {HUGE}", {"window_tables": [[BLOCKS, BLOCKS], [HUGE]]}),
    "more than 32 bits": Bad("window_tables: ", {"window_tables": [[BLOCKS, BLOCKS], [2**40]]}),
}


@pytest.mark.parametrize("name", EXECUTORS)
def test_each_block_of_windowed_layers_that_is_out_of_range_is_refused(name: str) -> None:
    executor = make_executor(name, MIXED, OWN)
    expected = executor.step(GOOD).clone()
    for case, bad in BAD.items():
        with pytest.raises(StepInputError) as raised:
            executor.step(replace(GOOD, **bad.changes))
        assert bad.message in str(raised.value), case
    assert torch.equal(executor.step(GOOD), expected), "a refused step changed the cache"
    with pytest.raises(StepInputError, match="window_tables: they should be None for this cache"):
        make_executor(name, MIXED, 0).step(GOOD)


@pytest.mark.parametrize("name", runnable_targets())
def test_the_compiled_step_itself_refuses_them(name: str) -> None:
    executor = unchecked(make_executor(name, MIXED, OWN))
    expected = executor.step(GOOD).clone()
    cases = {case: bad for case, bad in BAD.items() if case not in ("more than 32 bits", "too few tables")}
    for case, bad in cases.items():
        with pytest.raises(StepInputError) as raised:
            executor.step(replace(GOOD, **bad.changes))
        assert str(raised.value) == f"the compiled step refuses {library.STEP_ERRORS[6]}", case
    assert torch.equal(executor.step(GOOD), expected)


def test_tables_of_windows_are_not_sent_to_other_processes() -> None:
    with pytest.raises(AssertionError):
        encode_step(GOOD)
    assert encode_step(StepInput([1], [0], [0, 1], [[0]], [0]))


def broken_executor(name: str) -> Any:
    """An executor of a network in which the vector of token 9 is NaN."""
    with torch.inference_mode(False):
        net = network(MIXED)
        net.tokens.weight.data[9] = float("nan")
    sizes = {"block_count": BLOCKS, "window_blocks": OWN}
    if name == "torch":
        return TorchExecutor(net, head(MIXED), block_size=BLOCK, **sizes)
    return NativeExecutor(net, head(MIXED), instructions=name, precision="float32", **sizes)


@pytest.mark.parametrize("name", EXECUTORS)
def test_blocks_of_both_kinds_that_hold_nan_are_listed(name: str) -> None:
    broken = broken_executor(name)
    rows = rows_of([([1, 2, 3], 30, [3, 4, 5]), ([1, 9, 3], 15, [6, 7])])
    rows = replace(rows, window_tables=[[BLOCKS, BLOCKS + 1, BLOCKS + 2], [BLOCKS + 3, BLOCKS + 4]])
    broken.step(rows)
    own, listed = {7, BLOCKS + 4}, broken.nonfinite_blocks
    assert own <= listed <= {6, BLOCKS + 3, *own}, "a NaN may reach rows before it, which fail with it, but no others"


@pytest.mark.parametrize("name", EXECUTORS)
def test_a_copy_overwrites_what_is_not_finite_and_takes_it_along(name: str) -> None:
    """Blocks of a request that has failed are given to others as the targets of copies, too."""
    executor = broken_executor(name)
    bad, good = rows_of([([9] * 3, 0, [7])]), rows_of([([1, 2, 3], 0, [3])])
    executor.step(replace(bad, window_tables=[[BLOCKS + 4]]))
    executor.step(replace(good, window_tables=[[BLOCKS + 2]]))
    assert executor.nonfinite_blocks == {7, BLOCKS + 4}
    executor.copy([(7, 6), (BLOCKS + 4, BLOCKS + 3), (3, 7), (BLOCKS + 2, BLOCKS + 4)])
    assert executor.nonfinite_blocks == {6, BLOCKS + 3}
    more = replace(rows_of([([4], 3, [7])]), window_tables=[[BLOCKS + 4]])
    assert executor.step(more).isfinite().all()
    assert executor.nonfinite_blocks == {6, BLOCKS + 3}
