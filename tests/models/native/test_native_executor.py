"""The hidden states after each layer: both executors agree in float32, and returning them does not change a step."""

import gc
import random
from dataclasses import replace
from time import perf_counter
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from polyhead.models.core.errors import StepInputError
from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import Precision
from polyhead.models.network.lora import LowRank, adaptable_shapes
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.transformer import Transformer
from tests.models.native.test_step import ENCODERS, GENERATORS, head, network, rows_of, tables, texts
from tests.support.spread import spread

pytestmark = pytest.mark.skipif(not runnable_targets(), reason="polyhead was installed without a compiler")

LENGTHS = (1, 17, 150)  # the last one spans two panels
BLOCKS = 160


def rows(config: ModelConfig, *, cached: bool) -> StepInput:
    sequences = texts(config, LENGTHS)
    blocks = tables(LENGTHS, random.Random(1)) if cached else [[] for _ in sequences]
    return rows_of(list(zip(sequences, [0] * len(sequences), blocks, strict=True)), last_only=False)


@torch.inference_mode()
def reference(net: Transformer, config: ModelConfig) -> Tensor:
    """The states [depth, T, W], computed block by block without an executor."""
    x, frame = net.embed(RaggedBatch.of(texts(config, LENGTHS)))
    states = []
    for block in net.blocks:
        x = block(x, frame)
        states.append(x)
    return torch.stack(states)


@pytest.mark.parametrize(("threads", "name"), spread([2, 1], [*GENERATORS, *ENCODERS]))
def test_states_equal_torch_in_float32(name: str, threads: int) -> None:
    config = (GENERATORS | ENCODERS)[name]
    net, generates = network(config), name in GENERATORS
    step, expected = rows(config, cached=generates), reference(net, config)
    last, blocks = (head(config), BLOCKS) if generates else (None, 0)
    native = NativeExecutor(net, last, precision="float32", block_count=blocks, threads=threads)
    torch.testing.assert_close(native.step_with_states(step)[1], expected, rtol=2e-4, atol=2e-4)
    size = 16 if blocks else 0
    out, states = TorchExecutor(net, last, block_count=blocks, block_size=size).step_with_states(step)
    torch.testing.assert_close(states, expected, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(native.step(step), out, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("instructions", runnable_targets())
def test_returning_states_does_not_change_the_answer(instructions: str) -> None:
    config = GENERATORS["llama"]
    executor = NativeExecutor(network(config), head(config), block_count=BLOCKS, threads=2, instructions=instructions)
    step = rows(config, cached=True)
    plain = executor.step(step).clone()
    out, states = executor.step_with_states(step)
    assert torch.equal(out, plain)
    assert states.isfinite().all()
    assert torch.equal(executor.step(step), plain)


def test_states_need_all_rows() -> None:
    config = ENCODERS["bert"]
    step = replace(rows(config, cached=False), output_rows=[0])
    for executor in (NativeExecutor(network(config)), TorchExecutor(network(config))):
        with pytest.raises(StepInputError, match="output_rows"):
            executor.step_with_states(step)


SHORTEST_TURN_S = 1e-9  # each thread computes one piece
LONG = (300, 3, 140)
OTHERS_EVERY = 11  # turns of a step between two that other steps follow; no divisor of the pieces of a panel


def long_rows(config: ModelConfig) -> StepInput:
    return rows_of([(tokens, 0, []) for tokens in texts(config, LONG)], last_only=False)


@pytest.mark.parametrize(("precision", "threads", "name"), spread(["float32", "int8"], [1, 2, 3], [*ENCODERS]))
def test_turns_change_no_result(name: str, threads: int, precision: Precision) -> None:
    """A step in as many turns as possible, with other steps between them, has the bits of a whole one."""
    config = ENCODERS[name]
    executor = NativeExecutor(network(config), precision=precision, threads=threads)
    step, other = long_rows(config), rows(config, cached=False)
    expected, expected_other = executor.step(step).clone(), executor.step(other).clone()
    for turn_s in (SHORTEST_TURN_S, 3600.0):
        results = list(executor.step_in_turns(step, turn_s))
        assert results[:-1] == [None] * (len(results) - 1)
        assert results[-1] is not None
        assert torch.equal(results[-1], expected)
    assert len(results) == 1, "a turn of an hour finishes it"
    found, turns = None, 0
    for result in executor.step_in_turns(step, SHORTEST_TURN_S):
        found, turns = result, turns + 1
        if turns % OTHERS_EVERY:
            continue
        assert torch.equal(executor.step(other), expected_other)
        [*_, whole] = executor.step_in_turns(other, SHORTEST_TURN_S)
        assert whole is not None
        assert torch.equal(whole, expected_other)
    assert found is not None
    assert torch.equal(found, expected)
    if config.experts is None:
        assert turns > 2 * config.depth, "a layer's panels and its attention are turns of their own"
    assert len(executor._models) <= 3


def test_a_step_that_nobody_waits_for_is_dropped() -> None:
    config = ENCODERS["bert"]
    executor = NativeExecutor(network(config), threads=2)
    step = long_rows(config)
    expected = executor.step(step).clone()
    for _ in range(5):
        turns = executor.step_in_turns(step, SHORTEST_TURN_S)
        assert next(turns) is None
        turns.close()  # type: ignore[attr-defined]
    assert len(executor._idle_models) == len(executor._models) == 1
    assert torch.equal(executor.step(step), expected)


def test_the_adapter_of_an_interrupted_step_may_be_detached() -> None:
    config = ENCODERS["bert"]
    executor = NativeExecutor(network(config), threads=2)
    shapes = adaptable_shapes(config).items()
    number = executor.attach({name: LowRank(torch.randn(4, ins), torch.randn(outs, 4)) for name, (ins, outs) in shapes})
    step = replace(long_rows(config), adapters=[number] * len(LONG))
    expected = executor.step(step).clone()
    assert not torch.equal(expected, executor.step(replace(step, adapters=None)))
    turns = executor.step_in_turns(step, SHORTEST_TURN_S)
    assert next(turns) is None
    executor.detach(number)
    gc.collect()
    [*_, found] = turns
    assert found is not None
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("precision", "threads"), [("int8", 1), ("float32", 2), ("int8", 3)])
def test_steps_of_several_networks_together_have_the_bits_of_each_alone(threads: int, precision: Precision) -> None:
    """They may go on in turns, or be dropped; one of them is refused, and no other."""
    configs = [*ENCODERS.values()]
    executors = [NativeExecutor(network(config), precision=precision, threads=threads) for config in configs]
    inputs = [long_rows(config) if number % 2 else rows(config, cached=False) for number, config in enumerate(configs)]
    expected = [executor.step(each).clone() for executor, each in zip(executors, inputs, strict=True)]
    inputs[3] = replace(inputs[3], tokens=[configs[3].vocab_size] * len(inputs[3].tokens))
    for turn_s in (3600.0, SHORTEST_TURN_S):
        steps = [executor.step_in_turns(each, turn_s) for executor, each in zip(executors, inputs, strict=True)]
        executors[0].begin_together(steps)
        with pytest.raises(StepInputError):
            next(steps[3])
        steps[5].close()
        for number, step in enumerate(steps):
            if number in (3, 5):
                continue
            *turns, found = step
            assert found is not None
            assert torch.equal(found, expected[number]), number
            assert turn_s == SHORTEST_TURN_S or turns == []
        assert all(len(executor._idle_models) == len(executor._models) == 1 for executor in executors)


def test_steps_that_could_not_be_begun_together_are_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ENCODERS["bert"]
    executors, step = [NativeExecutor(network(config)) for _ in range(2)], rows(config, cached=False)
    expected = executors[0].step(step).clone()
    steps = [executor.step_in_turns(step, 3600.0) for executor in executors]
    with monkeypatch.context() as patched:
        patched.setattr(executors[1], "_take_model", MagicMock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            executors[0].begin_together(steps)
    for one in steps:
        [found] = one
        assert found is not None
        assert torch.equal(found, expected)
    assert all(len(executor._idle_models) == len(executor._models) == 1 for executor in executors)


def test_the_turn_is_that_of_all_steps_together() -> None:
    """One thread has time for two of eight steps."""
    config = ENCODERS["bert"]
    executors, step = [NativeExecutor(network(config)) for _ in range(8)], long_rows(config)
    expected, seconds = executors[0].step(step).clone(), list[float]()
    for _ in range(5):
        began = perf_counter()
        executors[0].step(step)
        seconds.append(perf_counter() - began)
    steps = [executor.step_in_turns(step, 2 * min(seconds)) for executor in executors]
    executors[0].begin_together(steps)
    assert next(steps[-1]) is None
    *_, found = steps[-1]
    assert found is not None
    assert torch.equal(found, expected)


def test_a_refused_step_leaves_its_model_idle() -> None:
    config = ENCODERS["bert"]
    executor = NativeExecutor(network(config))
    wrong = replace(long_rows(config), tokens=[config.vocab_size] * sum(LONG))
    with pytest.raises(StepInputError):
        list(executor.step_in_turns(wrong, SHORTEST_TURN_S))
    assert len(executor._idle_models) == 1
