"""Packs an adapter for the compiled step: the low-rank update of each packed product, in that product's layout.

The A matrices of linear layers that are packed together are stacked, and an A that several of them share is stored
once. For B, each half of a block of outputs stores its own columns and the range of rows of A that they use (LowRank in
src/gemm.hpp).
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..network.lora import Lora, LowRank
from ..network.model_config import ModelConfig
from . import library as native
from .packed_network import COLUMNS, HALF, PADDING, interleave

Array = NDArray[Any]
HALF_DTYPE = np.dtype([("b", np.uint64), ("first", np.int32), ("rank", np.int32)])
PACKED_LINEARS = (
    ("attention.query", "attention.key", "attention.value", "attention.gate"),
    ("attention.output",),
    ("mlp.up",),
    ("mlp.down",),
)
GATED_LINEARS = ("mlp.gate", "mlp.up")


class PackedLora:
    """`address` is that of len(PACKED_LINEARS) * depth structures, `rank` the largest rank of them; `arrays` are what
    they point to."""

    def __init__(self, config: ModelConfig, lora: Lora) -> None:
        self.arrays: list[Array] = []
        self._config = config
        table = (native.LowRankStruct * (len(PACKED_LINEARS) * config.depth))()
        for layer in range(1 if config.shared else config.depth):
            for which, names in enumerate(PACKED_LINEARS):
                gated = config.gated_mlp and names == ("mlp.up",)
                found = [lora.get(f"blocks.{layer}.{name}") for name in (GATED_LINEARS if gated else names)]
                if any(found):
                    table[layer * len(PACKED_LINEARS) + which] = self._pack(layer, which, found)
        if config.shared:  # all layers have the updates of the first
            for entry in range(len(PACKED_LINEARS), len(table)):
                table[entry] = table[entry % len(PACKED_LINEARS)]
        self._table = table
        self.address = ctypes.addressof(table)
        self.rank = max((low.rank for low in table), default=0)

    @property
    def byte_count(self) -> int:
        """Bytes in memory."""
        return sum(array.nbytes for array in self.arrays) + ctypes.sizeof(self._table)

    def _pack(self, layer: int, which: int, parts: Sequence[LowRank | None]) -> native.LowRankStruct:
        inputs, columns, outputs = product_layout(self._config, layer)[which]
        firsts, stacked = stack_a_matrices(parts)
        a = np.zeros((len(stacked), -(-inputs // PADDING) * PADDING), np.float32)
        a[:, :inputs] = stacked
        b = np.zeros((len(stacked), outputs), np.float32)
        low, high = np.full(outputs // HALF, len(stacked), np.int32), np.zeros(outputs // HALF, np.int32)
        for first, part, mine in zip(firsts, parts, columns, strict=True):
            if part is not None:
                rank = part.a.size(0)
                b[first : first + rank, mine] = float_array(part.b).T
                halves = np.unique(mine // HALF)
                low[halves], high[halves] = np.minimum(low[halves], first), np.maximum(high[halves], first + rank)
        own, halves = split_halves(b, low, high)
        self.arrays += [a, own, halves]
        addresses = (each.ctypes.data for each in (a, own, halves))
        return native.LowRankStruct(*addresses, len(stacked), a.nbytes, own.nbytes, 0)


def split_halves(b: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """For each half of a block of outputs, its columns of the rows [low, high) of B [R, N], and which halves have
    any."""
    table, done = np.zeros(len(low), HALF_DTYPE), 0
    own = np.empty(int(np.maximum(high - low, 0).sum()) * HALF, np.float32)
    for first, end in sorted(
        {(first, end) for first, end in zip(low.tolist(), high.tolist(), strict=True) if end > first}
    ):
        some = np.flatnonzero((low == first) & (high == end))
        size = (end - first) * HALF
        mine = b.reshape(len(b), -1, HALF)[first:end, some].transpose(1, 0, 2)  # [halves, rank, HALF]
        own[done : done + mine.size] = mine.ravel()
        table["b"][some] = own.ctypes.data + 4 * (done + size * np.arange(len(some), dtype=np.uint64))
        table["first"][some], table["rank"][some] = first, end - first
        done += mine.size
    return own, table


def stack_a_matrices(parts: Sequence[LowRank | None]) -> tuple[list[int], Array]:
    """The first row of each part's A, and all A matrices stacked."""
    places: dict[int, int] = {}
    matrices: list[Array] = []
    rows = 0
    for part in parts:
        if part is not None and id(part.a) not in places:
            places[id(part.a)] = rows
            matrices.append(float_array(part.a))
            rows += len(matrices[-1])
    return [0 if part is None else places[id(part.a)] for part in parts], np.concatenate(matrices)


@cache
def product_layout(config: ModelConfig, layer: int) -> list[tuple[int, list[Array], int]]:
    """For each packed product of the layer: its inputs, the packed columns of each part's outputs, and the number of
    columns."""
    has_keys, has_values = config.key_layer(layer) == layer, not config.has_tied_values(layer)
    config = config.of_layer(layer)
    inner, kept = config.heads * config.head_width, config.kv_heads * config.head_width
    up = [config.mlp_width] * (2 if config.gated_mlp else 1)
    attention = [inner, kept * has_keys, kept * (has_keys and has_values), inner if config.attention_gate else 0]
    shapes = [
        (config.width, attention),
        (inner, [config.width]),
        (config.width, up),
        (config.mlp_width, [config.width]),
    ]
    return [(inputs, *output_columns(outputs, gated=len(outputs) == 2)) for inputs, outputs in shapes]


def output_columns(outputs: list[int], gated: bool) -> tuple[list[Array], int]:
    """The packed columns of the outputs of linear layers that are packed together."""
    ends = np.cumsum(outputs)
    numbered = [np.arange(end - count, end) + 1 for count, end in zip(outputs, ends, strict=True)]
    ordered = interleave(numbered) if gated else np.concatenate(numbered)
    ordered = np.pad(ordered, (0, -len(ordered) % COLUMNS))
    at = np.empty(ends[-1] + 1, np.int64)
    at[ordered] = np.arange(len(ordered))
    return [at[numbers] for numbers in numbered], len(ordered)


def float_array(tensor: Tensor) -> Array:
    return tensor.detach().float().numpy(force=True)
