"""The compiled step in integers equals plain torch that rounds the same numbers at the same places.

Torch multiplies floats, so equal codes give results that differ in the last bits.  A number on the edge between two
codes may be rounded to either, which moves dependent results by a hundredth.  The bound of the median difference is
therefore tight, that of the maximum loose.
"""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import INT8_WIDE, rounded_format
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.scoring import Scoring
from polyhead.models.network.transformer import PreBlock
from tests.models.native.test_step import (
    BLOCKS,
    ENCODERS,
    GENERATORS,
    LENGTHS,
    SETS,
    all_logits,
    head,
    network,
    pytestmark,
    rows_of,
    texts,
)
from tests.support.spread import spread

__all__ = ["pytestmark"]
MOST_CODE, MOST_KEY, MOST_WEIGHT = 2**7 - 1, 2**13 - 1, 2**14 - 1


def grouped(x: Tensor, group: int) -> Tensor:
    """[.., K] as [.., K / group, group], padded with zeros."""
    return nn.functional.pad(x, (0, -x.size(-1) % group)).unflatten(-1, (-1, group))


def coded(x: Tensor, group: int, level: int = MOST_CODE) -> Tensor:
    """Each `group` of the last dimension rounded to integers up to `level`, times their scale."""
    padded = grouped(x, group)
    largest = padded.abs().amax(-1, keepdim=True)
    codes = (padded * torch.where(largest > 0, level / largest, 0)).round()
    return (codes * (largest / level)).flatten(-2)[..., : x.size(-1)]


def packed(weights: Tensor, group: int) -> Tensor:
    """[N, K] rounded to integers, times a scale for every `group` of inputs with the 11 digits of half precision."""
    padded = grouped(weights, group)
    digits, exponent = torch.frexp(padded.abs().amax(-1, keepdim=True) / MOST_CODE)
    scale = torch.ldexp((digits * 2048).ceil() / 2048, exponent)
    return ((padded / scale).round() * scale).flatten(-2)[..., : weights.size(-1)]


def attend_rounded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """models.network.attention.attend, with rounded queries, keys, values and weights."""
    n, _, heads, width = query.shape
    shared = heads // key.size(1)
    queries = coded(query.transpose(1, 2) * scoring.scale, 32, MOST_KEY)
    keys = coded(key, 32, MOST_KEY).repeat_interleave(shared, 1)
    scores = queries @ keys.transpose(-1, -2)
    if scoring.cap:
        scores = torch.tanh(scores / scoring.cap) * scoring.cap
    sinks = None if scoring.sinks is None else scoring.sinks.view(-1, 1, 1)
    weights = scoring.weigh(scores if mask is None else scores + mask, sinks)
    most = value.abs().amax(-1)  # [N, KV, K]
    codes = (value * torch.where(most > 0, 127 / most, 0)[..., None]).round().repeat_interleave(shared, 1)
    weights = weights * (most / 127).repeat_interleave(shared, 1)[:, :, None]
    unit = weights.amax(-1, keepdim=True).clamp_min(1e-30) / MOST_WEIGHT
    return ((weights / unit).round() * unit @ codes).transpose(1, 2).reshape(n, -1, heads * width)


def rounded_copy(module: nn.Module, group: int, span: int) -> nn.Module:
    """A rounded copy of a module: weights with a scale for `group` inputs, inputs with one for `span`.

    Routers are exact.
    """
    copy = deepcopy(module)
    exact = [part for name, part in copy.named_modules() if name.endswith((".router", ".shared_gate"))]
    for part in copy.modules():
        if isinstance(part, nn.Linear) and part not in exact:
            part.weight.data = packed(part.weight.data, group)
            part.register_forward_pre_hook(lambda _, inputs: (coded(inputs[0], span),))
        elif isinstance(part, PreBlock):
            part.attention.mix = attend_rounded
    return copy


def close(found: Tensor, expected: Tensor, rows: int | None = None, rerouted: float = 0.0) -> None:
    """The median is that of the first `rows`. Among hundreds of keys some weight is always on the edge between two
    codes, which a norm of the mixed values makes visible.

    `rerouted`: the share of rows that may differ by more, since an input on such an edge may choose another expert.
    """
    off = (found - expected).abs() / expected.std()
    assert float(off[:rows].median()) < 2e-5, "rounded at other places, or to other codes"
    assert float((off.amax(-1) >= 0.1).float().mean()) <= rerouted


def one_layer(config: ModelConfig) -> ModelConfig:
    """The configuration with one layer, which has experts if any layer has."""
    experts = config.experts and replace(config.experts, layers=())
    return replace(
        config,
        depth=1,
        windowed=config.windowed[1:2],
        experts=experts,
        layer_shapes=config.layer_shapes[1:2],
        key_layers=(0,) if config.key_layers else (),
        tied_values=config.tied_values[1:2],
    )


@pytest.mark.parametrize(("instructions", "name"), spread(SETS, GENERATORS))
def test_a_generator_rounds_as_plain_torch(name: str, instructions: str) -> None:
    config = one_layer(GENERATORS[name])
    net, last = network(config), head(config)
    native = NativeExecutor(net, last, block_count=BLOCKS, threads=2, instructions=instructions)
    rounded = rounded_copy(net, 32, 16)
    rounded.tokens.weight.data = net.tokens.weight.data.bfloat16().float()
    if net.layer_embedding is not None:
        rounded.layer_embedding.table.weight.data = net.layer_embedding.table.weight.data.bfloat16().float()
    close(
        all_logits(config, native),
        all_logits(config, TorchExecutor(rounded, rounded_copy(last, 32, 16), block_count=BLOCKS, block_size=16)),
        rows=sum(LENGTHS[:-1]),
        rerouted=0.01 if config.experts else 0.0,
    )


def states(config: ModelConfig, executor: NativeExecutor | TorchExecutor) -> Tensor:
    lengths = (3, 16, 33, 300, 530)
    return executor.step(rows_of([(text, 0, []) for text in texts(config, lengths)], last_only=False)).clone()


@pytest.mark.parametrize(("instructions", "name"), spread(SETS, ENCODERS))
def test_an_encoder_rounds_as_plain_torch(name: str, instructions: str) -> None:
    config = one_layer(ENCODERS[name])
    net = network(config)
    native = NativeExecutor(net, threads=2, instructions=instructions)
    rounded = rounded_copy(net, 64, 64) if rounded_format(config) == INT8_WIDE else rounded_copy(net, 32, 16)
    rounded.tokens.weight.data = net.tokens.weight.data.bfloat16().float()
    close(states(config, native), states(config, TorchExecutor(rounded)))
