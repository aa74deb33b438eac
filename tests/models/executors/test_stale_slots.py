"""What an earlier sequence left in a cache block changes nothing for its next owner, in any layer and whatever it is.

An adapter may make keys of the first layer infinite that have no weight for its own rows, so that no later layer shows
them. The decoders of tests/families begin with a cache like this, too."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import Precision
from polyhead.models.network.lora import Lora, LowRank, adaptable_shapes
from polyhead.models.network.model_config import ModelConfig
from tests.models.executors.test_window_blocks import ALL, MIXED, SIZES, generate, make_executor
from tests.models.native.test_step import GENERATORS, LLAMA, head, network, rows_of

BLOCK = 16
BAD = [float("inf"), float("-inf"), float("nan")]


def fill(executor: TorchExecutor, number: float) -> None:
    """Puts the number into all slots of all layers, as if sequences had left it there."""
    assert executor.cache is not None
    for kept in (*executor.cache.keys, *executor.cache.values):
        kept.fill_(number)


def steps(vocab_size: int) -> list[StepInput]:
    """Three sequences of different lengths, in chunks and tokens, over block borders. The tables have blocks that are
    not begun, too."""
    tables = [[9, 4, 11], [2, 7, 1], [12, 0, 5]]
    made, done = list[StepInput](), [0, 0, 0]
    for sizes in ((3, 20, 16), (13, 1, 1), (1, 1, 14), (2, 9, 1), *[(1, 1, 1)] * 3):
        parts = []
        for n, size in enumerate(sizes):
            parts.append(([(7 * n + 3 * at) % vocab_size for at in range(done[n], done[n] + size)], done[n], tables[n]))
            done[n] += size
        made.append(rows_of(parts, last_only=False))
    return made


def run(executor: Any, rows: Sequence[StepInput]) -> list[Tensor]:
    return [executor.step(each).clone() for each in rows]


@pytest.mark.parametrize("name", GENERATORS)
def test_numbers_of_earlier_sequences_change_no_bit_in_torch(name: str) -> None:
    config = GENERATORS[name]
    executor = TorchExecutor(network(config), head(config), block_count=13, block_size=BLOCK)
    rows = steps(config.vocab_size)
    expected = run(executor, rows)
    for number in BAD:
        fill(executor, number)
        assert all(map(torch.equal, run(executor, rows), expected)), number
        assert not executor.nonfinite_blocks


@pytest.mark.parametrize("config", [MIXED, ALL, SIZES], ids=["mixed", "all", "several sizes"])
def test_numbers_of_earlier_sequences_change_no_bit_in_blocks_of_windows(config: ModelConfig) -> None:
    sizes = [5, 30, 1, 1, 17, *[1] * 20, 33, 2]
    expected = generate(make_executor("torch", config, 9), sizes)
    for number in BAD:
        executor = make_executor("torch", config, 9)
        fill(executor, number)
        assert all(map(torch.equal, generate(executor, sizes), expected)), number


def infinite_keys(config: ModelConfig, layer: int) -> Lora:
    """An adapter that makes keys and values of one layer infinite."""
    sizes = adaptable_shapes(config)
    return {
        name: LowRank(torch.full((2, sizes[name][0]), 1e38), torch.full((sizes[name][1], 2), 1e38))
        for name in (f"blocks.{layer}.attention.key", f"blocks.{layer}.attention.value")
    }


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("name", ["llama", "gemma", "sinks", "capped", "alibi"])
@pytest.mark.parametrize("instructions", runnable_targets())
def test_keys_that_an_adapter_made_infinite_change_no_bit_in_the_compiled_step(
    name: str, precision: Precision, instructions: str
) -> None:
    """Nothing is zeroed there: slots behind a sequence's last one are not read."""
    config = GENERATORS[name]
    sizes: Any = {"block_count": 13, "threads": 2, "instructions": instructions, "precision": precision}
    executor = NativeExecutor(network(config), head(config), **sizes)
    rows = steps(config.vocab_size)
    expected = run(executor, rows)
    for layer in range(config.depth):
        number = executor.attach(infinite_keys(config, layer))
        hostile = rows_of([([5] * BLOCK * 13, 0, list(range(13)))])
        assert not executor.step(replace(hostile, adapters=[number])).isfinite().all()
        assert all(map(torch.equal, run(executor, rows), expected)), layer
    assert not executor.nonfinite_blocks & {9, 4, 2, 7, 12, 0}, "sequences have begun these again"


def test_a_block_that_is_filled_in_the_step_is_not_zeroed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt zeroes its last block only, and a token in the middle of a block none."""
    executor = TorchExecutor(network(LLAMA), head(LLAMA), block_count=13, block_size=BLOCK)
    assert executor.cache is not None
    cleared = list[list[int]]()
    monkeypatch.setattr(executor.cache, "clear", lambda blocks, **_: cleared.append(list(blocks)))
    for tokens, first in ((40, 0), (1, 40), (7, 41), (1, 48), (1, 49), (14, 50)):
        executor.step(rows_of([([5] * tokens, first, [3, 8, 2, 6])]))
    assert cleared == [[2], [], [], [6], [], []]


def test_a_row_that_is_not_finite_in_its_first_layer_only_reaches_no_other_request() -> None:
    """As an adapter does it: the key is infinite and each query's product with it is -inf, so its weight is 0 and every
    later number is finite. No executor lists its block, and the next sequence in it gets its own answer."""
    net = network(LLAMA)
    executor = TorchExecutor(net, head(LLAMA), block_count=4, block_size=BLOCK)
    assert executor.cache is not None
    rows = rows_of([([1, 2, 3, 4], 0, [2])])
    expected = executor.step(rows).clone()
    executor.cache.keys[0][2, :, 1:] = float("inf")  # its last layer is finite
    assert not executor.nonfinite_blocks
    assert torch.equal(executor.step(rows), expected)
