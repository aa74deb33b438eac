"""Packs an adapter for the compiled step: the low-rank update of each packed product, in that product's layout.

The A matrices of linear layers that are packed together are stacked, and an A that several of them share is stored
once. For B, each half of a block of outputs stores its own columns and the range of rows of A that they use (LowRank in
src/gemm.hpp).
"""

import ctypes
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..core.turns import YieldTurn, keep_turn, rows_of_part
from ..network.lora import Lora
from ..network.model_config import ModelConfig
from . import library as native
from .packed_network import COLUMNS, HALF, PACKED_ATTENTION, PADDING, interleave

Array = NDArray[Any]
HALF_DTYPE = np.dtype([("b", np.uint64), ("first", np.int32), ("rank", np.int32)])
PACKED_LINEARS = (
    PACKED_ATTENTION,
    ("attention.output",),
    ("mlp.up",),
    ("mlp.down",),
)
GATED_LINEARS = ("mlp.gate", "mlp.up")


@dataclass(frozen=True)
class LowRankSize:
    """The rank of an update; those with the same `shared` have the same A."""

    rank: int
    shared: Hashable


@dataclass(frozen=True)
class PackedProduct:
    """The layout of the update of one packed product, which follows from sizes alone.

    `firsts` are the first rows of each linear layer's A among the `rank` stacked ones. `columns` are the packed columns
    of its outputs. Each half of a block of outputs has the rows from `low` to `high`; `starts` is the place of its
    numbers among the `count` numbers of all halves.
    """

    inputs: int
    rank: int
    firsts: list[int]
    columns: list[Array]
    low: Array  # [halves]
    high: Array  # [halves]
    starts: Array  # [halves]
    count: int

    @classmethod
    def of(cls, config: ModelConfig, layer: int, which: int, sizes: Sequence[LowRankSize | None]) -> "PackedProduct":
        inputs, columns, outputs = product_layout(config, layer, which)
        places, firsts, rank = dict[Hashable, int](), list[int](), 0
        for size in sizes:
            if size is not None and size.shared not in places:
                places[size.shared] = rank
                rank += size.rank
            firsts.append(0 if size is None else places[size.shared])
        low, high = np.full(outputs // HALF, rank, np.int64), np.zeros(outputs // HALF, np.int64)
        for first, size, mine in zip(firsts, sizes, columns, strict=True):
            if size is not None:
                halves = np.unique(mine // HALF)
                low[halves] = np.minimum(low[halves], first)
                high[halves] = np.maximum(high[halves], first + size.rank)
        low = np.minimum(low, high)  # halves without any
        ends = np.cumsum((high - low) * HALF)
        return cls(inputs, rank, firsts, columns, low, high, ends - (high - low) * HALF, int(ends[-1]))

    @property
    def padded_inputs(self) -> int:
        return -(-self.inputs // PADDING) * PADDING

    @property
    def byte_count(self) -> int:
        numbers = self.rank * self.padded_inputs + self.count
        return numbers * np.dtype(np.float32).itemsize + len(self.low) * HALF_DTYPE.itemsize


class PackedLora:
    """`address` is that of len(PACKED_LINEARS) * depth structures, `rank` the largest rank of them; `arrays` are what
    they point to.

    The matrices of one product are asked for, packed and dropped before the next one's; `yield_turn`: see
    models.executors.contract.Executor.attach.
    """

    def __init__(self, config: ModelConfig, lora: Lora, yield_turn: YieldTurn = keep_turn) -> None:
        self.arrays: list[Array] = []
        self._yield_turn = yield_turn
        table = (native.LowRankStruct * (len(PACKED_LINEARS) * config.depth))()
        for layer, which, names in packed_products(config):
            if any(name in lora for name in names):
                table[layer * len(PACKED_LINEARS) + which] = self._pack(config, layer, which, names, lora)
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

    def _pack(
        self, config: ModelConfig, layer: int, which: int, names: Sequence[str], lora: Lora
    ) -> native.LowRankStruct:
        parts = [lora.get(name) for name in names]
        sizes = [None if part is None else LowRankSize(part.a.size(0), id(part.a)) for part in parts]
        product = PackedProduct.of(config, layer, which, sizes)
        a = np.zeros((product.rank, product.padded_inputs), np.float32)
        b, halves = np.zeros(product.count, np.float32), np.zeros(len(product.low), HALF_DTYPE)
        for first, columns, part in zip(product.firsts, product.columns, parts, strict=True):
            if part is not None:
                for rows, some in self._parts_of(part.a):
                    a[first:][rows, : product.inputs] = some
                for rows, some in self._parts_of(part.b):
                    own = columns[rows]
                    half, lane = own // HALF, own % HALF
                    places = product.starts[half] + (first - product.low[half]) * HALF + lane
                    b[places[:, None] + HALF * np.arange(some.shape[1])] = some
        used = product.high > product.low
        halves["b"][used] = b.ctypes.data + b.itemsize * product.starts[used].astype(np.uint64)
        halves["first"][used], halves["rank"][used] = product.low[used], (product.high - product.low)[used]
        self.arrays += [a, b, halves]
        addresses = (each.ctypes.data for each in (a, b, halves))
        return native.LowRankStruct(*addresses, product.rank, a.nbytes, b.nbytes, 0)

    def _parts_of(self, matrix: Tensor) -> Iterator[tuple[slice, Array]]:
        """The matrix in parts, each with its rows; others may compute after each."""
        step = rows_of_part(matrix)
        for first in range(0, len(matrix), step):
            some = matrix[first : first + step]
            yield slice(first, first + len(some)), some.detach().float().numpy(force=True)
            self._yield_turn()


def packed_products(config: ModelConfig) -> Iterator[tuple[int, int, list[str]]]:
    """Each product that has its own weights: its layer, its place among PACKED_LINEARS, and its linear layers."""
    for layer in range(1 if config.shared else config.depth):
        for which, names in enumerate(PACKED_LINEARS):
            gated = config.gated_mlp and names == ("mlp.up",)
            yield layer, which, [f"blocks.{layer}.{name}" for name in (GATED_LINEARS if gated else names)]


def packed_bytes(config: ModelConfig, sizes: Mapping[str, LowRankSize]) -> int:
    """Bytes of a packed adapter with updates of such sizes, by the names of its linear layers."""
    total = ctypes.sizeof(native.LowRankStruct) * len(PACKED_LINEARS) * config.depth
    for layer, which, names in packed_products(config):
        found = [sizes.get(name) for name in names]
        if any(found):
            total += PackedProduct.of(config, layer, which, found).byte_count
    return total


def product_layout(config: ModelConfig, layer: int, which: int) -> tuple[int, list[Array], int]:
    """The inputs of a packed product, the packed columns of each part's outputs, and the number of columns."""
    has_keys, has_values = config.key_layer(layer) == layer, not config.has_tied_values(layer)
    config = config.of_layer(layer)
    inner, kept = config.heads * config.head_width, config.kv_heads * config.head_width
    up = [config.mlp_width] * (2 if config.gated_mlp else 1)
    keys, values, again = kept * has_keys, kept * (has_keys and has_values), bool(config.global_tokens)
    attention = [inner, inner * again, keys, keys * again, values, values * again, inner * config.attention_gate]
    shapes = [
        (config.width, attention),
        (inner, [config.width]),
        (config.width, up),
        (config.mlp_width, [config.width]),
    ]
    inputs, outputs = shapes[which]
    return inputs, *output_columns(outputs, gated=len(outputs) == 2)


def output_columns(outputs: list[int], gated: bool) -> tuple[list[Array], int]:
    """The packed columns of the outputs of linear layers that are packed together."""
    ends = np.cumsum(outputs)
    numbered = [np.arange(end - count, end) + 1 for count, end in zip(outputs, ends, strict=True)]
    ordered = interleave(numbered) if gated else np.concatenate(numbered)
    ordered = np.pad(ordered, (0, -len(ordered) % COLUMNS))
    at = np.empty(ends[-1] + 1, np.int64)
    at[ordered] = np.arange(len(ordered))
    return [at[numbers] for numbers in numbered], len(ordered)
