"""The hidden states after each layer: both executors agree in float32, and returning them does not change a step."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polyhead.models.core.errors import StepInputError
from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
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
