"""Recurrent layers in the compiled step: equal to torch, to the bit the same in any batch and chunks, over slots of
states."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead.models.checkpoint.description import invalid_fields
from polyhead.models.core.errors import StepInputError, UnsupportedError
from polyhead.models.executors.contract import StateUse, StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import Precision
from polyhead.models.native.step_memory import native_block_bytes, native_state_bytes, weight_bytes
from polyhead.models.network.lora import LowRank, adaptable_shapes
from polyhead.models.network.model_config import ExpertConfig, MixerConfig, ModelConfig
from polyhead.models.network.recurrent_mixers import ShortConvolution, StateSpace
from tests.models.executors.test_bounds import unchecked
from tests.models.native.test_int8 import close, rounded_copy
from tests.models.native.test_step import LLAMA, SETS, head, network, pieces, pytestmark, rows_of, texts
from tests.support.spread import spread
from tests.support.state_slots import StateSlots

__all__ = ["pytestmark"]

HEADS = MixerConfig(kernel=4, kernel_bias=True, heads=6, head_width=40, key_heads=2, key_width=24)
DELTA = replace(HEADS, head_width=32, key_width=33, heads=4, norm_eps=1e-6)
RECURRENT: dict[str, ModelConfig] = {
    "convolution": replace(
        LLAMA,
        query_key_norm="shared",
        recurrent=MixerConfig(kernel=3, kernel_bias=True, input_bias=True, output_bias=True),
        mixers=("convolution", "attention", "convolution"),
    ),
    "state space": replace(
        LLAMA, residual_scale=0.7, recurrent=HEADS, mixers=("state_space", "attention", "state_space")
    ),
    "state space, gated after the norm": replace(
        LLAMA,
        heads=1,
        kv_heads=1,
        position="none",
        recurrent=replace(HEADS, kernel=1, gate_first=False, norm_groups=2, step_limits=(0.01, 0.5), input_bias=True),
        mixers=("state_space",) * 3,
        mlps=(False,) * 3,
    ),
    "state space, not normed": replace(
        LLAMA,
        depth=4,
        activation="relu_squared",
        gated_mlp=False,
        recurrent=replace(HEADS, gated_norm=False, kernel_bias=False, key_heads=1, head_width=64, heads=2),
        mixers=("state_space", "none", "attention", "none"),
        mlps=(False, True, False, True),
        experts=ExpertConfig(count=4, chosen=2, width=20, layers=(False, False, False, True)),
    ),
    "delta": replace(LLAMA, attention_gate=True, recurrent=DELTA, mixers=("delta", "attention", "delta")),
    "delta, attention last": replace(
        LLAMA,
        norm_order="inner",
        query_key_norm="joint",
        recurrent=replace(DELTA, update_scale=2.0, is_pre_norm=True, head_width=5, key_heads=4),
        mixers=("delta", "delta", "attention"),
    ),
    "every mixer": replace(
        LLAMA,
        depth=5,
        attention_gate=True,
        recurrent=replace(HEADS, head_width=33),
        mixers=("delta", "convolution", "none", "attention", "state_space"),
        mlps=(True, False, True, True, True),
    ),
}
ROUNDED = ("convolution", "state space", "delta", "every mixer")
LENGTHS = (1, 5, 16, 40, 130)
BLOCKS, SLOTS = 24, 16
Parts = list[tuple[list[int], int, list[int]]]


def make_executor(config: ModelConfig, **options: Any) -> NativeExecutor:
    return NativeExecutor(network(config), head(config), block_count=BLOCKS, state_count=SLOTS, **options)


def whole(config: ModelConfig) -> StepInput:
    """All texts in one step, without a cache."""
    return rows_of([(text, 0, []) for text in texts(config, LENGTHS)], last_only=False)


def alone(config: ModelConfig, executor: NativeExecutor) -> list[Tensor]:
    """The logits [T, V] of each text, computed alone and whole."""
    found = []
    for text in texts(config, LENGTHS):
        rows = rows_of([(text, 0, list(range(len(text) // 16 + 1)))], last_only=False, states=[StateUse(-1, 0)])
        found.append(executor.step(rows).clone())
    return found


@cache
def expected_logits(name: str) -> Tensor:
    """What torch computes for `whole`."""
    config = RECURRENT[name]
    return TorchExecutor(network(config), head(config)).step(whole(config)).clone()


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_equal_torch_in_float32(name: str, instructions: str) -> None:
    config, expected = RECURRENT[name], expected_logits(name)
    assert not [*invalid_fields(config)]
    rows = whole(config)
    without_cache = NativeExecutor(
        network(config), head(config), precision="float32", threads=2, instructions=instructions
    )
    assert without_cache.state_count == 0
    torch.testing.assert_close(without_cache.step(rows), expected, rtol=2e-4, atol=2e-4)
    some = without_cache.step(replace(rows, output_rows=rows.output_rows[::7]))
    torch.testing.assert_close(some, expected[::7], rtol=2e-4, atol=2e-4)
    cached = make_executor(config, precision="float32", instructions=instructions)
    assert cached.state_count == SLOTS
    torch.testing.assert_close(torch.cat(alone(config, cached)), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", RECURRENT)
def test_the_output_of_each_layer_equals_torch(name: str) -> None:
    config = RECURRENT[name]
    net, last, rows = network(config), head(config), whole(config)
    expected = TorchExecutor(net, last).step_with_states(rows)[1]
    found = NativeExecutor(net, last, precision="float32", threads=2).step_with_states(rows)[1]
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def chunked(config: ModelConfig, executor: NativeExecutor, choice: random.Random) -> list[Tensor]:
    """The logits [T, V] of each text, computed in random chunks, batches, blocks and slots. Some texts go on from the
    state after a part of their chunk."""
    sequences, slots, free = texts(config, LENGTHS), StateSlots(SLOTS, choice), choice.sample(range(BLOCKS), BLOCKS)
    tables = [[free.pop() for _ in range(-(-length // 16))] for length in LENGTHS]
    found: list[list[Tensor]] = [[] for _ in LENGTHS]
    done = [0] * len(LENGTHS)
    while unfinished := [n for n, length in enumerate(LENGTHS) if done[n] < length]:
        members = [n for n in unfinished if choice.random() < 0.8] or unfinished
        parts: Parts = []
        for n in members:
            size = next(pieces(choice, LENGTHS[n] - done[n]))
            parts.append((sequences[n][done[n] : done[n] + size], done[n], tables[n]))
        uses = slots.uses(parts)
        rows = rows_of(parts, last_only=False, states=uses)
        logits = executor.step(rows).clone()
        for n, start, end, use in zip(members, rows.starts, rows.starts[1:], uses, strict=False):
            kept = end - start
            if use.border_rows and choice.random() < 0.5:
                kept = use.border_rows
                slots.go_back(tables[n][0], use)
            found[n].append(logits[start : start + kept])
            done[n] += kept
    return [torch.cat(each) for each in found]


@pytest.mark.parametrize(("instructions", "name", "precision"), spread(SETS, RECURRENT, ["float32", "int8"]))
def test_batch_chunks_slots_and_threads_change_nothing(name: str, instructions: str, precision: Precision) -> None:
    """To the bit: texts alone in one chunk equal texts in random chunks, batches and slots, and texts that go on from
    the state at a border."""
    config = RECURRENT[name]
    expected = alone(config, make_executor(config, precision=precision, instructions=instructions))
    executor = make_executor(config, precision=precision, threads=3, instructions=instructions)
    for n, logits in enumerate(chunked(config, executor, random.Random(7))):
        assert torch.equal(logits, expected[n]), f"text {n} of {LENGTHS[n]} tokens"


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("name", ROUNDED[:3])
def test_the_products_of_recurrent_layers_round_as_plain_torch(name: str, instructions: str) -> None:
    """In integers; convolution and scan are in float32."""
    config = replace(RECURRENT[name], depth=1, mixers=RECURRENT[name].mixers[:1], mlps=(False,))
    net, last = network(config), head(config)
    rounded = rounded_copy(net, 32, 16)
    rounded.tokens.weight.data = net.tokens.weight.data.bfloat16().float()  # type: ignore[union-attr, operator]
    expected = TorchExecutor(rounded, rounded_copy(last, 32, 16)).step(whole(config))  # type: ignore[arg-type]
    found = NativeExecutor(net, last, threads=2, instructions=instructions).step(whole(config))
    close(found, expected)


@pytest.mark.parametrize("instructions", SETS)
def test_extreme_steps_equal_torch(instructions: str) -> None:
    """Steps and decays at both ends of their functions."""
    config = replace(RECURRENT["state space"], depth=1, mixers=("state_space",), mlps=(False,))
    net, last = network(config), head(config)
    mixer = net.blocks[0].attention
    assert isinstance(mixer, StateSpace)
    with torch.no_grad():
        mixer.step_bias.copy_(torch.tensor([-200.0, -30.0, -1.0, 0.0, 19.0, 60.0]))
        mixer.log_decay.copy_(torch.tensor([3.0, -40.0, 4.0, -3.0, 2.0, -9.0]))
    expected = TorchExecutor(net, last).step(whole(config))
    found = NativeExecutor(net, last, precision="float32", instructions=instructions).step(whole(config))
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("instructions", "name", "precision", "bad_value"),
    spread(SETS, ROUNDED, ["float32", "int8"], [float("nan"), float("inf")]),
)
def test_states_that_are_not_finite_stay_with_their_sequence(
    name: str, instructions: str, bad_value: float, precision: Precision
) -> None:
    """They are reported with the blocks of the rows, and the next sequence in a slot is not affected."""
    net, last = network(RECURRENT[name]), head(RECURRENT[name])
    with torch.no_grad():
        net.tokens.weight[7, 3] = bad_value
    executor = NativeExecutor(
        net, last, precision=precision, block_count=8, state_count=6, threads=2, instructions=instructions
    )
    clean = [1, 2, 3, 4]
    expected = executor.step(rows_of([(clean, 0, [3])], states=[StateUse(-1, 0)])).clone()
    uses = [StateUse(-1, 1, 2, 2), StateUse(-1, 3)]
    logits = executor.step(rows_of([([5, 7, 5], 0, [1]), (clean, 0, [2])], states=uses)).clone()
    assert not logits[0].isfinite().any()
    assert torch.equal(logits[1:], expected)
    assert executor.nonfinite_blocks == {1}
    more = executor.step(rows_of([([5], 3, [1]), ([5], 4, [2])], states=[StateUse(1, 4), StateUse(3, 5)])).clone()
    assert not more[0].isfinite().any()
    assert torch.equal(executor.step(rows_of([(clean, 0, [1])], states=[StateUse(-1, 4)])), expected)
    assert not executor.nonfinite_blocks
    for slot in (1, 2):  # they hold states that are not finite
        again = executor.step(rows_of([([5], 4, [1])], states=[StateUse(4, slot)])).clone()
        assert torch.equal(again, more[1:])
        assert executor.step(rows_of([([5], 5, [1])], states=[StateUse(slot, 0)])).isfinite().all()


@pytest.mark.parametrize("instructions", SETS)
def test_a_state_that_is_not_finite_without_keys_is_reported(instructions: str) -> None:
    """After the last attention nothing but the state may be infinite."""
    config = replace(RECURRENT["convolution"], depth=1, mixers=("convolution",), mlps=(False,))
    net, last = network(config), head(config)
    mixer = net.blocks[0].attention
    assert isinstance(mixer, ShortConvolution)
    assert mixer.input.bias is not None
    with torch.no_grad():
        mixer.input.bias[0] = float("inf")
    executor = NativeExecutor(net, last, block_count=2, state_count=2, instructions=instructions)
    executor.step(rows_of([([1], 0, [1])], states=[StateUse(-1, 0)]))
    assert executor.nonfinite_blocks == {1}


GOOD_USES = [StateUse(-1, 0), StateUse(5, 1, 2, 2)]
BAD_USES = {
    "a slot that does not exist is written": [StateUse(-1, SLOTS), GOOD_USES[1]],
    "a negative slot is written": [StateUse(-1, -1), GOOD_USES[1]],
    "a slot that does not exist is read": [GOOD_USES[0], StateUse(SLOTS, 1)],
    "a negative slot is read": [GOOD_USES[0], StateUse(-2, 1)],
    "no slot is read after tokens": [GOOD_USES[0], StateUse(-1, 1)],
    "a slot is read before any token": [StateUse(4, 0), GOOD_USES[1]],
    "a slot is written twice": [StateUse(-1, 1), GOOD_USES[1]],
    "a slot is read and written": [StateUse(-1, 5), GOOD_USES[1]],
    "a slot is written where it is read": [GOOD_USES[0], StateUse(5, 5)],
    "a border is where another state is": [GOOD_USES[0], StateUse(5, 1, 2, 0)],
    "a border is where a state is read": [GOOD_USES[0], StateUse(5, 1, 2, 5)],
    "a border does not exist": [GOOD_USES[0], StateUse(5, 1, 2, SLOTS)],
    "a border without a slot": [GOOD_USES[0], StateUse(5, 1, 2)],
    "a slot without a border": [GOOD_USES[0], StateUse(5, 1, 0, 2)],
    "a border behind the rows": [GOOD_USES[0], StateUse(5, 1, 4, 2)],
    "a negative border": [GOOD_USES[0], StateUse(5, 1, -1, 2)],
}


@pytest.mark.parametrize("instructions", SETS)
def test_the_compiled_step_checks_slots_again(instructions: str) -> None:
    executor = unchecked(make_executor(RECURRENT["every mixer"], instructions=instructions))
    rows = rows_of([([1, 2], 0, [1]), ([3, 4, 5], 7, [2])], states=GOOD_USES)
    expected = executor.step(rows).clone()
    for uses in (*BAD_USES.values(), None):
        with pytest.raises(StepInputError, match=r"the compiled step refuses states$"):
            executor.step(replace(rows, states=uses))
    assert torch.equal(executor.step(rows), expected), "a refused step changed a state"


def test_slots_are_refused_in_python_too() -> None:
    executor = make_executor(RECURRENT["every mixer"])
    rows = rows_of([([1, 2], 0, [1]), ([3, 4, 5], 7, [2])], states=GOOD_USES)
    executor.step(rows)
    for uses in (*BAD_USES.values(), None):
        with pytest.raises(StepInputError, match=r"^states"):
            executor.step(replace(rows, states=uses))
    without_slots = NativeExecutor(network(RECURRENT["delta"]), head(LLAMA), block_count=4)
    with pytest.raises(StepInputError, match=r"^states"):
        without_slots.step(rows_of([([1], 0, [1])], states=[StateUse(-1, 0)]))


def test_a_network_without_recurrent_layers_has_no_slots() -> None:
    assert NativeExecutor(network(LLAMA), head(LLAMA), block_count=4, state_count=7).state_count == 0


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("name", RECURRENT)
def test_the_memory_is_known_from_the_configuration(name: str, precision: Precision) -> None:
    config = RECURRENT[name]
    executor = make_executor(config, precision=precision)
    predicted = weight_bytes(config, precision, generates=True, tied=False, bits={})
    assert executor.weight_bytes <= predicted <= 1.25 * executor.weight_bytes
    sizes = [executor._library.polyhead_cache_bytes(executor._model, which) for which in range(3)]
    runs = -(-BLOCKS // 16) * 16
    assert sizes[0] + sizes[1] == runs * native_block_bytes(config, precision)
    assert sizes[2] == SLOTS * native_state_bytes(config)


@pytest.mark.parametrize("instructions", SETS)
def test_adapters_beside_recurrent_layers_equal_torch(instructions: str) -> None:
    config = RECURRENT["every mixer"]
    net, last, shapes = network(config), head(config), adaptable_shapes(config)
    torch.manual_seed(3)
    lora = {name: LowRank(torch.randn(5, ins), torch.randn(outs, 5) / 20) for name, (ins, outs) in shapes.items()}
    assert {name.split(".", 2)[1] for name in lora if "attention" in name} == {"3"}
    reference = TorchExecutor(net, last)
    executor = NativeExecutor(net, last, precision="float32", threads=2, instructions=instructions)
    numbers = [0, reference.attach(lora)]
    assert numbers[1] == executor.attach(lora)
    rows = replace(whole(config), adapters=[numbers[n % 2] for n in range(len(LENGTHS))])
    torch.testing.assert_close(executor.step(rows), reference.step(rows), rtol=2e-4, atol=2e-4)


def test_an_adapter_of_a_recurrent_layer_is_refused_by_name() -> None:
    executor = make_executor(RECURRENT["convolution"])
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.attention\.input: the compiled step adds no update"):
        executor.attach({"blocks.0.attention.input": LowRank(torch.zeros(2, 48), torch.zeros(144, 2))})


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """Torch's sums of short rows are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
