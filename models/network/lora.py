"""Adds the low-rank updates of adapters to the products of a network, without merging them (Hu et al. 2021,
arXiv:2106.09685).

W x + B (A x) is (W + B A) x, so all adapters share the network's matrices. Rows are cut to tiles of one adapter each,
and all tiles of a step are multiplied together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .model_config import ModelConfig

TILE_ROWS = 32  # rows, at most
LinearFunction = Callable[[nn.Linear, Tensor], Tensor]


@dataclass(frozen=True)
class LowRank:
    """The update of one product: [R, in] `a` and [out, R] `b`, which includes the scale."""

    a: Tensor
    b: Tensor


Lora = Mapping[str, LowRank]  # by the product's name, "blocks.3.mlp.up"


def adaptable_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The inputs and outputs of the linear layers that an adapter can change, by name; experts, latent attention
    and recurrent layers cannot be changed."""
    layers = range(1 if config.shared else config.depth)
    return {
        f"blocks.{layer}.{name}": shape
        for layer in layers
        for name, shape in {
            **(_attention_shapes(config.of_layer(layer), layer) if config.mixer(layer) == "attention" else {}),
            **(_mlp_shapes(config.of_layer(layer)) if config.has_mlp(layer) and not config.has_experts(layer) else {}),
        }.items()
    }


def _attention_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """`config` has the sizes of the layer."""
    if config.latent is not None:
        return {}
    inner, kept = config.heads * config.head_width, config.kv_heads * config.head_width
    shapes = {"attention.query": (config.width, inner), "attention.output": (inner, config.width)}
    if config.key_layer(layer) == layer:
        shapes["attention.key"] = config.width, kept
        if not config.has_tied_values(layer):
            shapes["attention.value"] = config.width, kept
    return shapes


def _mlp_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """`config` has the sizes of the layer."""
    shapes = {"mlp.up": (config.width, config.mlp_width), "mlp.down": (config.mlp_width, config.width)}
    return shapes | ({"mlp.gate": (config.width, config.mlp_width)} if config.gated_mlp else {})


def name_linears(network: nn.Module, config: ModelConfig) -> dict[nn.Module, str]:
    """The names of those layers by module; layers that share weights share a name."""
    known, names = adaptable_shapes(config), dict[nn.Module, str]()
    for name, module in network.named_modules():
        _, _, inner = name.partition(".")
        layer, _, leaf = inner.partition(".")
        ours = f"blocks.{0 if config.shared else layer}.{leaf}"
        if isinstance(module, nn.Linear) and name.startswith("blocks.") and ours in known:
            names[module] = ours
    return names


def apply_linear(linear: nn.Linear, x: Tensor) -> Tensor:
    """The linear layer without an adapter."""
    out: Tensor = linear(x)
    return out


@dataclass(frozen=True)
class AdapterTiles:
    """Packed rows cut to P tiles of up to L rows, one adapter each."""

    rows: Tensor  # [P, L]; a short tile repeats its first row
    real_rows: Tensor  # [K] which of the P * L rows are no repetition
    adapters: tuple[int, ...]  # [P]
    row_adapters: tuple[int, ...]  # [T] the adapter of each row, 0 for none

    @classmethod
    def of(cls, adapters: Sequence[int], device: torch.device) -> "AdapterTiles":
        """The tiles of rows with these adapters, 0 for none."""
        runs, start = list[tuple[int, int, int]](), 0
        for adapter, run in groupby(adapters):
            end = start + sum(1 for _ in run)
            if adapter:
                runs += [(adapter, first, min(first + TILE_ROWS, end)) for first in range(start, end, TILE_ROWS)]
            start = end
        longest = max((end - first for _, first, end in runs), default=0)
        rows = [[*range(first, end), *[first] * (longest - end + first)] for _, first, end in runs]
        own = [tile * longest + row for tile, (_, first, end) in enumerate(runs) for row in range(end - first)]
        tile_adapters = tuple(adapter for adapter, _, _ in runs)
        return cls(
            torch.tensor(rows, dtype=torch.int64, device=device),
            torch.tensor(own, dtype=torch.int64, device=device),
            tile_adapters,
            tuple(adapters),
        )

    def within(self, start: int, end: int) -> "AdapterTiles":
        """The tiles of the rows from `start` to before `end` alone, which are counted from 0 there."""
        if end - start == len(self.row_adapters):
            return self
        return AdapterTiles.of(self.row_adapters[start:end], self.rows.device)


@dataclass(frozen=True)
class AdapterUpdates:
    """The adapter updates of a step: for all rows, and for the output rows after the last attention."""

    names: Mapping[nn.Module, str]
    loras: Mapping[int, Lora]
    rows: AdapterTiles
    output_rows: AdapterTiles

    def for_output_rows(self) -> "AdapterUpdates":
        """The updates for the output rows alone."""
        return replace(self, rows=self.output_rows)

    def within(self, start: int, end: int) -> "AdapterUpdates":
        """The updates for some of the rows."""
        return replace(self, rows=self.rows.within(start, end))

    def apply(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """The product of [T, in] rows plus the update of each row's adapter: [T, out]."""
        out = apply_linear(linear, x)
        name = self.names[linear]
        found = [self.loras[adapter].get(name) for adapter in self.rows.adapters]
        rank = max((low.a.size(0) for low in found if low is not None), default=0)
        if not rank:
            return out
        a = torch.stack([pad_to_rank(None if low is None else low.a, rank, x) for low in found])  # [P, R, in]
        b = torch.stack([pad_to_rank(None if low is None else low.b.t(), rank, out) for low in found])  # [P, R, out]
        more = x[self.rows.rows] @ a.mT @ b  # [P, L, out]
        own = self.rows.real_rows
        return out.index_add_(0, self.rows.rows.flatten()[own], more.flatten(0, 1)[own])


def pad_to_rank(matrix: Tensor | None, rank: int, rows: Tensor) -> Tensor:
    """A matrix padded with zero rows to [rank, features of `rows`]."""
    if matrix is None:
        return rows.new_zeros(1, 1).expand(rank, rows.size(-1))
    return F.pad(matrix, (0, 0, 0, rank - matrix.size(0))) if matrix.size(0) < rank else matrix


def expand_adapters(adapters: Sequence[int], starts: Sequence[int]) -> list[int]:
    """[T] the adapter of each row, from those of N sequences."""
    return [
        adapter for adapter, (start, end) in zip(adapters, pairwise(starts), strict=True) for _ in range(end - start)
    ]
