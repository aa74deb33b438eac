"""From a network in torch to what the compiled step reads: packed weights, and a Plan that points at them.

Knows the modules of models.transformer by their attributes, no family.  The one idea: whatever is multiplied with the
same rows (three projections; a gate and what it lets through) lies packed as one, four products a layer.
"""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.config import ModelConfig
from models.heads import LanguageHead
from models.native.library import Layer, Linear, Norm, Plan
from models.native.memory import Memory
from models.positions import Learned
from models.transformer import PreBlock, SandwichBlock, Transformer

Precision = Literal["float32", "int8", "int4"]
FORMATS: dict[Precision, int] = {"float32": 0, "int8": 1, "int4": 2}
SHIFTED = 3  # four bits above the least weight of their group, not above -8 scales
BITS = (32, 8, 4.5, 5)  # of a weight in each format, its share of fine scales included
ORDERS = {"pre": 0, "post": 1, "sandwich": 2}
NORMS = {"layer": 0, "rms": 1}
ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "silu": 2, "relu": 3}
COLUMNS, HALF, GROUP = 32, 16, 64  # as in src/gemm.hpp
BLOCK = 16  # tokens, as in src/attention.hpp

Held = Callable[[nn.Module], AbstractContextManager[object]]  # inside it a part of the network has its numbers


class Packed:
    """A Plan, and everything it points at."""

    def __init__(self, library: ctypes.CDLL, config: ModelConfig, precision: Precision) -> None:
        self.library, self.config, self.precision = library, config, precision
        self.plan = Plan()
        self.memory = Memory()
        self.kept: list[Any] = []
        self.weight_bytes = 0

    def floats(self, values: Tensor | None, padding: int = GROUP) -> int:
        """Address of [.., n] float32 numbers, zeros behind; 0 for None."""
        if values is None:
            return 0
        count = values.numel()
        out = self.memory.zeros(-(-count // padding) * padding, np.float32)
        out[:count] = values.detach().float().numpy(force=True).ravel()
        return self._keep(out)

    def norm(self, module: nn.Module | None) -> Norm:
        if not isinstance(module, nn.LayerNorm | nn.RMSNorm):
            return Norm()
        return Norm(self.floats(module.weight), self.floats(getattr(module, "bias", None)))

    def table(self, weight: Tensor) -> int:
        """Address of the token embeddings: bfloat16 beside narrow weights."""
        narrow = self.precision != "float32"
        out = self.memory.zeros(weight.numel(), np.int16 if narrow else np.float32)
        kept = torch.from_numpy(out)
        (kept.view(torch.bfloat16) if narrow else kept).view(weight.shape).copy_(weight.detach())
        self.table_kept = out
        return self._keep(out)

    def linear(self, modules: list[nn.Linear], gated: bool = False) -> Linear:
        """Several side by side as one; `gated`: two, whose outputs take turns by HALF."""
        weights = [module.weight.detach().float().cpu().contiguous() for module in modules]
        inputs = weights[0].size(1)
        rows = [[weight[i].data_ptr() for i in range(weight.size(0))] for weight in weights]
        order = interleaved(rows, 0) if gated else list(chain(*rows))
        order += [0] * (-len(order) % COLUMNS)
        k = -(-inputs // GROUP) * GROUP
        addresses = np.array(order, np.uint64)
        format = self._fitting(addresses, inputs, k)
        out = self.memory.zeros(int(len(order) * k * BITS[format] / 8), np.uint8)
        scales = self.memory.zeros(len(order), np.float32)
        self.library.polyhead_pack(
            addresses.ctypes.data, len(order), inputs, k, format, out.ctypes.data, scales.ctypes.data
        )
        return Linear(
            weights=self._keep(out),
            scales=self._keep(scales) if format == FORMATS["int8"] else 0,
            bias=self._bias(modules, gated, len(order)),
            inputs=k,
            outputs=len(order),
            format=format,
        )

    def _fitting(self, addresses: NDArray[np.uint64], inputs: int, k: int) -> int:
        """The format.  Four bits only for weights that are such already: rounding others without a calibration costs
        too much."""
        if self.precision != "int4":
            return FORMATS[self.precision]
        for format in (FORMATS["int4"], SHIFTED):
            if self.library.polyhead_pack(addresses.ctypes.data, len(addresses), inputs, k, format, None, None):
                return format
        return FORMATS["int8"]

    def _bias(self, modules: list[nn.Linear], gated: bool, outputs: int) -> int:
        if modules[0].bias is None:
            return 0
        values = [module.bias.detach().float().tolist() for module in modules]
        ordered = interleaved(values, 0.0) if gated else list(chain(*values))
        return self.floats(torch.tensor(ordered + [0.0] * (outputs - len(ordered))), COLUMNS)

    def _keep(self, array: NDArray[np.generic]) -> int:
        self.kept.append(array)
        self.weight_bytes += array.nbytes
        return array.ctypes.data


def interleaved(two: list[list[Any]], nothing: Any) -> list[Any]:
    """HALF of the first, HALF of the second, and so on; `nothing` fills up the last."""
    count = -(-len(two[0]) // HALF) * HALF
    first, second = (values + [nothing] * (count - len(values)) for values in two)
    return list(chain(*(first[i : i + HALF] + second[i : i + HALF] for i in range(0, count, HALF))))


def fill(pack: Packed, network: Transformer, head: LanguageHead | None, block_count: int, held: Held) -> Packed:
    """The whole network, one part after the other; each is `held` while it is packed."""
    plan = pack.plan
    describe(plan, network.config, head is not None, block_count)
    plan.narrow_tokens = pack.precision != "float32"
    plan.narrow_cache = plan.narrow_tokens and block_count > 0  # what lives for a layer of a step is kept as it is
    tied = head is not None and head.output.weight is network.tokens.weight
    with held(network.tokens):
        plan.tokens = pack.table(network.tokens.weight)
        if head is not None and tied:
            plan.head = pack.linear([head.output])
    if head is not None and not tied:
        with held(head):
            plan.head = pack.linear([head.output])
    layers = []
    frequencies = [pack.floats(cast(Tensor, rotary.frequency)) for rotary in network.rotaries]
    for block in network.blocks:
        with held(block):
            layers.append(packed_layer(pack, cast(PreBlock, block), frequencies))
    array = (Layer * len(layers))(*layers)
    pack.kept.append(array)
    plan.layers = array
    with held(network):  # what is left of it
        if isinstance(network.position, Learned):
            plan.positions = pack.floats(network.position.table.weight)
        if network.segments is not None:
            plan.segments = pack.floats(network.segments.weight)
        plan.embedding_norm, plan.final_norm = pack.norm(network.embedding_norm), pack.norm(network.final_norm)
    return pack


def describe(plan: Plan, config: ModelConfig, generates: bool, block_count: int) -> None:
    """All that is no address."""
    for name in ("width", "depth", "heads", "kv_heads", "head_width", "mlp_width", "causal", "position_offset"):
        setattr(plan, name, int(getattr(config, name)))
    plan.order, plan.norm = ORDERS[config.norm_order], NORMS[config.norm]
    plan.activation, plan.gated = ACTIVATIONS[config.activation], config.gated_mlp
    plan.generates, plan.block_count = generates, block_count
    plan.eps, plan.embedding_scale = config.norm_eps, config.embedding_scale
    plan.score_scale = config.score_scale or config.head_width**-0.5


def hollow(module: nn.Module) -> None:
    """Let go of numbers that nobody reads any more."""
    for parameter in module.parameters():
        parameter.data = torch.empty(0)


def packed_layer(pack: Packed, block: PreBlock, frequencies: list[int]) -> Layer:
    attention, mlp, config = block.attention, block.mlp, pack.config
    windowed = config.is_windowed(block.layer)
    layer = Layer(attention_norm=pack.norm(block.attention_norm), mlp_norm=pack.norm(block.mlp_norm))
    if isinstance(block, SandwichBlock):
        layer.attention_post_norm = pack.norm(block.attention_post_norm)
        layer.mlp_post_norm = pack.norm(block.mlp_post_norm)
    layer.query_norm = pack.floats(getattr(attention.query_norm, "weight", None))
    layer.key_norm = pack.floats(getattr(attention.key_norm, "weight", None))
    if frequencies:
        layer.frequencies = frequencies[-1] if windowed else frequencies[0]
    layer.window = config.window if windowed else 0
    layer.qkv = pack.linear([attention.query, attention.key, attention.value])
    layer.output = pack.linear([attention.output])
    layer.up = pack.linear([mlp.gate, mlp.up], gated=True) if mlp.gate is not None else pack.linear([mlp.up])
    layer.down = pack.linear([mlp.down])
    return layer
