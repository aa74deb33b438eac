"""The integers of a step: every one that is out of range is refused before anything is computed, on every executor."""

import ctypes
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from polyhead.models.core.errors import StepInputError
from polyhead.models.executors.bounds import Bounds
from polyhead.models.executors.contract import Executor, StateUse, StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native import library as native
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.network.lora import LowRank, adaptable_shapes
from polyhead.models.network.model_config import MixerConfig, ModelConfig
from tests.models.native.test_step import BERT, GENERATORS, LLAMA, head, network, rows_of
from tests.support.places import ROOT

BLOCKS = 8
LEARNED = replace(GENERATORS["gpt2"], max_positions=40)
EXECUTORS = [*runnable_targets(), "torch"]
HUGE = 2_000_000_000
LISTS = ("tokens", "positions", "starts", "block_tables", "segments")


def make_executor(name: str, config: ModelConfig) -> Executor:
    """A generator with a cache where the network is causal, an encoder where it is not; an adapter is attached."""
    blocks, last = (BLOCKS, head(config)) if config.causal else (0, None)
    executor: Executor
    if name == "torch":
        executor = TorchExecutor(network(config), last, block_count=blocks, block_size=16 if blocks else 0)
    else:
        executor = NativeExecutor(network(config), last, block_count=blocks, threads=2, instructions=name)
    shape = adaptable_shapes(config)["blocks.0.attention.output"]
    executor.attach({"blocks.0.attention.output": LowRank(torch.zeros(2, shape[0]), torch.zeros(shape[1], 2))})
    return executor


def good() -> StepInput:
    """Three sequences: one from its beginning, one after a block in the cache, one of a single token."""
    return rows_of([([1, 2, 3], 0, [5]), ([4, 5], 16, [0, 3]), ([6], 0, [7])])


def texts() -> StepInput:
    rows = rows_of([([1, 2, 3], 0, []), ([4, 5], 0, [])], last_only=False)
    return replace(rows, segments=[0, 0, 1, 0, 1])


class Bad(NamedTuple):
    """Changed fields of a valid step, and the expected error message."""

    message: str
    changes: dict[str, Any]


BAD = {
    "a token beyond the table": Bad(
        "tokens[2] is 77, which should be at least 0 and less than 77", {"tokens": [1, 2, 77, 4, 5, 6]}
    ),
    "a huge token": Bad(f"tokens[0] is {HUGE}", {"tokens": [HUGE, 2, 3, 4, 5, 6]}),
    "a token of more than 32 bits": Bad(f"tokens: {2**40} is out of the range", {"tokens": [1, 2, 3, 4, 5, 2**40]}),
    "a negative token": Bad("tokens[5] is -1", {"tokens": [1, 2, 3, 4, 5, -1]}),
    "a negative position": Bad("positions[5] is -1", {"positions": [0, 1, 2, 16, 17, -1]}),
    "a position beyond the table": Bad(
        "positions[5] is 40, which should be at least 0 and less than 40",
        {"positions": [0, 1, 2, 16, 17, 40], "block_tables": [[5], [0, 3], [7, 1, 2]]},
    ),
    "a position beyond its blocks": Bad(
        "sequence 2 has position 16, its blocks hold 16", {"positions": [0, 1, 2, 16, 17, 16]}
    ),
    "a gap between positions": Bad("positions[4] is 18, which should be 17", {"positions": [0, 1, 2, 16, 18, 0]}),
    "positions that descend": Bad("positions[1] is 0, which should be 3", {"positions": [2, 0, 1, 16, 17, 0]}),
    "too few positions": Bad("positions: there are 5, which should be 6", {"positions": [0, 1, 2, 16, 17]}),
    "a block beyond the cache": Bad("block_tables[1] is 8", {"block_tables": [[5], [8, 3], [7]]}),
    "a negative block": Bad("block_tables[3] is -1", {"block_tables": [[5], [0, 3], [-1]]}),
    "too few blocks": Bad("sequence 1 has position 17, its blocks hold 16", {"block_tables": [[5], [0], [7]]}),
    "no blocks": Bad("sequence 0 has position 2, its blocks hold 0", {"block_tables": [[], [0, 3], [7]]}),
    "too few tables": Bad("block_tables: there are 2, which should be 3", {"block_tables": [[5], [0, 3]]}),
    "an empty sequence": Bad("starts[2] is 3, which should be more than 3", {"starts": [0, 3, 3, 6]}),
    "starts that descend": Bad("starts[2] is 2", {"starts": [0, 5, 2, 6]}),
    "starts that begin later": Bad("starts: they are from 1 to 6", {"starts": [1, 3, 5, 6]}),
    "starts that end later": Bad("starts: they are from 0 to 7", {"starts": [0, 3, 5, 7]}),
    "no sequence": Bad("there is no sequence", {"starts": [0], "block_tables": []}),
    "an output row that does not exist": Bad("output_rows[1] is 6", {"output_rows": [2, 6]}),
    "a negative output row": Bad("output_rows[0] is -1", {"output_rows": [-1, 4]}),
    "output rows that descend": Bad("output_rows[1] is 2, which should be more than 4", {"output_rows": [4, 2]}),
    "a repeated output row": Bad("output_rows[1] is 4", {"output_rows": [4, 4]}),
    "an adapter that is not attached": Bad("adapters: 2 is not attached", {"adapters": [0, 1, 2]}),
    "a negative adapter": Bad("adapters: -1 is not attached", {"adapters": [0, -1, 0]}),
    "too few adapters": Bad("adapters: there are 2, which should be 3", {"adapters": [0, 1]}),
}
BAD_TEXTS = {
    "a segment beyond the table": Bad(
        "segments[4] is 2, which should be at least 0 and less than 2", {"segments": [0, 0, 1, 0, 2]}
    ),
    "a huge segment": Bad(f"segments[0] is {HUGE}", {"segments": [HUGE, 0, 1, 0, 0]}),
    "a negative segment": Bad("segments[1] is -3", {"segments": [0, -3, 1, 0, 0]}),
    "too few segments": Bad("segments: there are 2, which should be 5", {"segments": [0, 0]}),
    "a text that begins later": Bad("sequence 1 begins at 3, which should be 0", {"positions": [0, 1, 2, 3, 4]}),
}


@pytest.mark.parametrize("name", EXECUTORS)
def test_each_number_that_is_out_of_range_is_refused(name: str) -> None:
    for config, rows, cases in ((LEARNED, good(), BAD), (BERT, texts(), BAD_TEXTS)):
        executor = make_executor(name, config)
        expected = executor.step(rows).clone()
        for case, bad in cases.items():
            with pytest.raises(StepInputError) as raised:
                executor.step(replace(rows, **bad.changes))
            assert bad.message in str(raised.value), case
        assert torch.equal(executor.step(rows), expected), "a refused step changed the cache"
        assert executor.step(replace(rows, adapters=[1] * len(rows.block_tables))).isfinite().all()


RECURRENT = replace(LLAMA, mixers=("convolution", *["attention"] * (LLAMA.depth - 1)), recurrent=MixerConfig(kernel=3))
GOOD_STATES = [StateUse(-1, 1, 2, 5), StateUse(0, 2), StateUse(-1, 3)]
BAD_STATES: dict[str, tuple[list[StateUse] | None, str]] = {
    "none": (None, "states: they should be there for recurrent layers with a cache"),
    "too few": (GOOD_STATES[:2], "states: there are 2, which should be 3"),
    "a slot beyond the pool": ([*GOOD_STATES[:2], StateUse(-1, 6)], "states.write[2] is 6"),
    "a negative slot": ([*GOOD_STATES[:2], StateUse(-1, -1)], "states.write[2] is -1"),
    "a huge slot": ([StateUse(-1, HUGE), *GOOD_STATES[1:]], f"states.write[0] is {HUGE}"),
    "more than 32 bits": ([StateUse(-1, 2**40), *GOOD_STATES[1:]], f"states: {2**40} is out of the range"),
    "a read slot beyond the pool": ([GOOD_STATES[0], StateUse(6, 2), GOOD_STATES[2]], "states.read[0] is 6"),
    "a read before the first token": (
        [StateUse(4, 1), *GOOD_STATES[1:]],
        "states[0].read is 4, which should be -1 for a sequence that begins",
    ),
    "no read after other tokens": ([GOOD_STATES[0], StateUse(-1, 2), GOOD_STATES[2]], "states[1].read is -1"),
    "a slot that is written twice": ([*GOOD_STATES[:2], StateUse(-1, 1)], "states: slot 1 is written twice"),
    "a border that is written too": ([*GOOD_STATES[:2], StateUse(-1, 5)], "states: slot 5 is written twice"),
    "a slot that is read and written": ([GOOD_STATES[0], StateUse(2, 2), GOOD_STATES[2]], "slot 2 is read and written"),
    "a border behind the last row": (
        [StateUse(-1, 1, 4, 5), *GOOD_STATES[1:]],
        "states[0].border_rows is 4, which should be at most the rows of the sequence",
    ),
    "negative rows": ([StateUse(-1, 1, -1, 5), *GOOD_STATES[1:]], "states[0].border_rows is -1"),
    "rows without a border": ([StateUse(-1, 1, 2), *GOOD_STATES[1:]], "states[0].border is -1, which should be -1"),
    "a border without rows": ([StateUse(-1, 1, 0, 5), *GOOD_STATES[1:]], "states[0].border is 5"),
}


def test_each_state_slot_that_is_out_of_range_is_refused() -> None:
    executor = TorchExecutor(network(RECURRENT), head(RECURRENT), block_count=BLOCKS, block_size=16, state_count=6)
    rows = replace(good(), states=GOOD_STATES)
    expected = executor.step(rows).clone()
    for case, (states, message) in BAD_STATES.items():
        with pytest.raises(StepInputError) as raised:
            executor.step(replace(rows, states=states))
        assert message in str(raised.value), case
    assert torch.equal(executor.step(rows), expected), "a refused step changed a state"
    for config in (LLAMA, RECURRENT):
        other = TorchExecutor(
            network(config), head(config), block_count=BLOCKS if config is LLAMA else 0, block_size=16
        )
        with pytest.raises(StepInputError, match="states: they should be None for this network"):
            other.step(rows if config is LLAMA else replace(rows, positions=[0, 1, 2, 0, 1, 0]))
        assert other.state_count == 0


@pytest.mark.parametrize("name", EXECUTORS)
def test_states_need_all_output_rows_in_range(name: str) -> None:
    executor: Any = make_executor(name, BERT)
    with pytest.raises(StepInputError, match="output_rows: there are 1, which should be 5"):
        executor.step_with_states(replace(texts(), output_rows=[0]))
    with pytest.raises(StepInputError, match="tokens"):
        executor.step_with_states(replace(texts(), tokens=[1, 2, 3, 4, 90]))


@pytest.mark.parametrize("name", EXECUTORS)
@pytest.mark.parametrize("pair", [(0, BLOCKS), (-1, 0), (HUGE, 1)])
def test_no_block_outside_of_the_cache_is_copied(name: str, pair: tuple[int, int]) -> None:
    executor = make_executor(name, LLAMA)
    with pytest.raises(StepInputError, match="copies"):
        executor.copy([(0, 1), pair])
    executor.copy([])
    executor.copy([(0, BLOCKS - 1)])


def test_the_check_does_not_depend_on_assertions() -> None:
    code = (
        "from polyhead.models.executors.bounds import Bounds\n"
        "from polyhead.models.core.errors import StepInputError\n"
        "from polyhead.models.executors.contract import StepInput\n"
        "try: Bounds(9, 0, 0, 0, 0).check(StepInput([9], [0], [0, 1], [[]], [0]), {})\n"
        "except StepInputError: print('refused')"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "refused\n", done.stderr


class Unchecked(Bounds):
    """Bounds that permit any 32-bit integers."""

    def check(self, rows: StepInput, attached: Any) -> Any:
        bounded = BOUNDLESS.check(good(), attached)
        changed = {
            name: native_integers(values)
            for name, values in (
                ("tokens", rows.tokens),
                ("positions", rows.positions),
                ("segments", rows.segments),
                ("starts", rows.starts),
                ("output_rows", rows.output_rows),
                ("blocks", [block for table in rows.block_tables for block in table]),
                ("table_starts", [sum(map(len, rows.block_tables[:n])) for n in range(len(rows.block_tables) + 1)]),
            )
        }
        uses = native_integers([number for use in rows.states or () for number in use])
        changed["states"] = None if rows.states is None else uses.reshape(-1, 4)
        if rows.window_tables is not None:
            changed["window_blocks"] = native_integers([block for table in rows.window_tables for block in table])
            ends = [sum(map(len, rows.window_tables[:n])) for n in range(len(rows.window_tables) + 1)]
            changed["window_starts"] = native_integers(ends)
        return replace(bounded, **changed)


BOUNDLESS = Bounds(1 << 30, 0, 0, 1 << 20, 16)


def native_integers(values: list[int] | None) -> Any:
    return None if values is None else np.array(values, np.int32)


def unchecked(executor: Executor) -> Executor:
    """Removes the check in Python, so that only the check of the compiled step refuses a step."""
    known: Any = executor
    known._bounds = Unchecked(**vars(known._bounds))
    return executor


CODES = {
    "tokens": ("a token beyond the table", "a huge token", "a negative token"),
    "positions": (
        "a negative position",
        "a position beyond the table",
        "a gap between positions",
        "positions that descend",
    ),
    "blocks": (
        "a position beyond its blocks",
        "a block beyond the cache",
        "a negative block",
        "too few blocks",
        "no blocks",
    ),
    "starts": ("an empty sequence", "starts that descend", "starts that begin later", "starts that end later"),
    "output rows": (
        "an output row that does not exist",
        "a negative output row",
        "output rows that descend",
        "a repeated output row",
    ),
}


@pytest.mark.parametrize("instructions", runnable_targets())
def test_the_compiled_step_checks_again(instructions: str) -> None:
    executor = unchecked(make_executor(instructions, LEARNED))
    assert executor.step(good()).isfinite().all()
    for word, cases in CODES.items():
        for case in cases:
            with pytest.raises(StepInputError, match=f"the compiled step refuses {word}$"):
                executor.step(replace(good(), **BAD[case].changes))
    executor = unchecked(make_executor(instructions, BERT))
    for case, word in {"a segment beyond the table": "segments", "a text that begins later": "positions"}.items():
        with pytest.raises(StepInputError, match=f"refuses {word}$"):
            executor.step(replace(texts(), **BAD_TEXTS[case].changes))
    executor.step(texts())


@pytest.mark.parametrize("instructions", runnable_targets())
def test_invalid_counts_return_an_error_code(instructions: str) -> None:
    """Calls polyhead_step itself with invalid counts and no arrays."""
    executor: Any = make_executor(instructions, LEARNED)

    def result_of(rows: native.StepStruct, width: int) -> str:
        call = native.StepCall(executor._model, ctypes.addressof(rows), 0, 0, 0, width)
        executor._library.polyhead_step(ctypes.byref(call), 1, 0)
        return native.STEP_ERRORS[call.result]

    for counts in ((0, 1, 0, 0), (1, 0, 0, 0), (1, 1, 2, 0), (1, 1, -1, 0), (1, 1, 1, -1), (-5, 1, 0, 0)):
        assert result_of(native.StepStruct(*counts), executor._stride) == "counts"
    assert result_of(native.StepStruct(1, 1, 1, 0), LEARNED.width - 1) == "counts"


def disturbed(rows: StepInput, choice: random.Random) -> StepInput:
    """A copy in which one or two integers are changed, or a list is one longer or shorter."""
    fields = ["tokens", "positions", "starts", "output_rows", "block_tables"]
    fields += [name for name in ("segments", "adapters", "states", "window_tables") if getattr(rows, name) is not None]
    for _ in range(choice.randint(1, 2)):
        name = choice.choice(fields)
        nested = name in ("block_tables", "states", "window_tables")
        whole = [list(each) for each in getattr(rows, name)] if nested else [list(getattr(rows, name))]
        values = choice.choice(whole) if whole else []
        number = choice.choice([-HUGE, -1, 0, 1, 2, 7, 8, 15, 16, 17, 39, 40, 77, 90, HUGE, 2**31 - 1, 2**35])
        match choice.randrange(6):
            case 0 if values:
                values.pop()
            case 1:
                values.append(number)
            case _ if values:
                values[choice.randrange(len(values))] = number
        changed: Any = whole if nested else whole[0]
        if name == "states":
            changed = [StateUse(*use) if len(use) == len(StateUse._fields) else tuple(use) for use in whole]
        rows = replace(rows, **{name: changed})
    return rows


def fuzzed(executor: Executor, rows: StepInput, count: int, seed: int = 4) -> tuple[int, int]:
    """Numbers of disturbed steps that were computed and that were refused. Any other error is raised."""
    choice, answered, refused = random.Random(seed), 0, 0
    for _ in range(count):
        try:
            executor.step(disturbed(rows, choice))
            answered += 1
        except StepInputError:
            refused += 1
    return answered, refused


@pytest.mark.parametrize("name", EXECUTORS)
def test_random_steps_are_computed_or_refused(name: str) -> None:
    for config, rows in ((LEARNED, replace(good(), adapters=[0, 1, 0])), (BERT, texts())):
        answered, refused = fuzzed(make_executor(name, config), rows, 500)
        assert answered > 10
        assert refused > 200


def fits(rows: StepInput, like: StepInput) -> bool:
    """Whether its lists are as long as those of `like`, and its integers fit 32 bits."""
    lists = [rows.tokens, rows.positions, rows.output_rows, rows.starts, rows.segments or [], *rows.block_tables]
    right = all(len(getattr(rows, name) or ()) == len(getattr(like, name) or ()) for name in LISTS)
    return right and max(number for each in lists for number in each) < 2**31


def passed(executor: Executor, rows: StepInput) -> None:
    """Runs a step. Only an error of the compiled step's own check is ignored."""
    try:
        executor.step(rows)
    except StepInputError as error:
        if "the compiled step refuses" not in str(error):
            raise


@pytest.mark.parametrize("instructions", runnable_targets())
def test_the_compiled_step_computes_or_refuses_any_integers(instructions: str) -> None:
    """The same without the check in Python, for lists of the right lengths."""
    executor, choice = unchecked(make_executor(instructions, LEARNED)), random.Random(5)
    for _ in range(500):
        if fits(rows := disturbed(good(), choice), good()):
            passed(executor, rows)
