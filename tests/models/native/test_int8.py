"""The compiled step in integers against plain torch that rounds the same numbers in the same places.

Torch multiplies floats.  Where both round alike they differ by the last bits of one; a number on the edge between two
codes may fall to either side, and moves what depends on it by a hundredth.  So most must be all but equal, none far.
"""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.transformer import PreBlock
from tests.models.native.test_step import (
    BLOCKS,
    ENCODERS,
    GENERATORS,
    SETS,
    head,
    network,
    pytestmark,
    rows_of,
    texts,
    whole,
)

__all__ = ["pytestmark"]
MOST_CODE, MOST_KEY, MOST_WEIGHT = 2**7 - 1, 2**13 - 1, 2**14 - 1


def grouped(x: Tensor, group: int) -> Tensor:
    """[.., K] as [.., K / group, group], zeros behind."""
    return nn.functional.pad(x, (0, -x.size(-1) % group)).unflatten(-1, (-1, group))


def coded(x: Tensor, group: int, level: int = MOST_CODE) -> Tensor:
    """Each `group` of the last dimension as whole numbers, the largest `level`, times their scale."""
    padded = grouped(x, group)
    most = padded.abs().amax(-1, keepdim=True)
    codes = (padded * torch.where(most > 0, level / most, 0)).round()
    return (codes * (most / level)).flatten(-2)[..., : x.size(-1)]


def packed(weights: Tensor) -> Tensor:
    """[N, K] as whole numbers, times a scale for 32 inputs that has the 11 digits of half precision."""
    padded = grouped(weights, 32)
    digits, exponent = torch.frexp(padded.abs().amax(-1, keepdim=True) / MOST_CODE)
    scale = torch.ldexp((digits * 2048).ceil() / 2048, exponent)
    return ((padded / scale).round() * scale).flatten(-2)[..., : weights.size(-1)]


def mixed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """As models.network.attention.attend, in codes."""
    n, _, heads, width = query.shape
    shared = heads // key.size(1)
    queries = coded(query.transpose(1, 2) * (scale or width**-0.5), 32, MOST_KEY)
    keys = coded(key, 32, MOST_KEY).repeat_interleave(shared, 1)
    scores = queries @ keys.transpose(-1, -2)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    most = value.abs().amax(-1)  # [N, KV, K]
    codes = (value * torch.where(most > 0, 127 / most, 0)[..., None]).round().repeat_interleave(shared, 1)
    weights = weights * (most / 127).repeat_interleave(shared, 1)[:, :, None]
    unit = weights.amax(-1, keepdim=True).clamp_min(1e-30) / MOST_WEIGHT
    return ((weights / unit).round() * unit @ codes).transpose(1, 2).reshape(n, -1, heads * width)


def twin(module: nn.Module) -> nn.Module:
    """The same in codes: weights with a scale for 32 inputs, inputs with one for 16."""
    made = deepcopy(module)
    for part in made.modules():
        if isinstance(part, nn.Linear):
            part.weight.data = packed(part.weight.data)
            part.register_forward_pre_hook(lambda _, inputs: (coded(inputs[0], 16),))
        elif isinstance(part, PreBlock):
            part.attention.mix = mixed
    return made


def close(found: Tensor, expected: Tensor) -> None:
    off = (found - expected).abs() / expected.std()
    assert float(off.median()) < 2e-5, "rounded elsewhere, or to other codes"
    assert float(off.max()) < 0.1


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_rounds_as_plain_torch(name: str, instructions: str) -> None:
    config = replace(GENERATORS[name], depth=1)
    net, last = network(config), head(config)
    native = NativeExecutor(net, last, block_count=BLOCKS, threads=2, instructions=instructions)
    other = twin(net)
    other.tokens.weight.data = net.tokens.weight.data.bfloat16().float()
    close(whole(config, native), whole(config, TorchExecutor(other, twin(last), block_count=BLOCKS, block_size=16)))


def states(config: ModelConfig, executor: NativeExecutor | TorchExecutor) -> Tensor:
    lengths = (3, 16, 33, 300, 530)
    return executor.step(rows_of([(text, 0, []) for text in texts(config, lengths)], last_only=False)).clone()


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_rounds_as_plain_torch(name: str, instructions: str) -> None:
    config = replace(ENCODERS[name], depth=1, windowed=ENCODERS[name].windowed[1:])
    net = network(config)
    native = NativeExecutor(net, threads=2, instructions=instructions)
    other = twin(net)
    other.tokens.weight.data = net.tokens.weight.data.bfloat16().float()
    close(states(config, native), states(config, TorchExecutor(other)))
