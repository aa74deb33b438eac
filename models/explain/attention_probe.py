"""What stands in the place of an attention's `mix` where its weights are to be seen, or some of its heads to be silent.

Knows no network.  The one idea: values are mixed by the same fused call as ever, and the weights that are asked for are
worked out beside it, some rows at a time; so that looking takes memory for what is looked at and no more.
"""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ..network.attention import Attention, AttentionFunction, RelativeAttention

SCORE_ROWS = 256  # of which scores exist at a time


@dataclass(frozen=True)
class WeightBuffer:
    """Where the weights of some layers and heads of a part are put, of one text alone."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    values: NDArray[np.float32]  # [L, H, Q, K], or [L, 1, Q, K] for the mean of those heads

    @classmethod
    def allocate(
        cls, layers: tuple[int, ...], heads: tuple[int, ...], shape: tuple[int, int], *, mean: bool
    ) -> "WeightBuffer":
        """`shape`: how many rows look at how many."""
        return cls(layers, heads, np.zeros((len(layers), 1 if mean else len(heads), *shape), np.float32))

    def store(self, layer: int, first: int, weights: Tensor) -> None:
        """Weights [H, R, K] of those heads, of the rows from `first` on."""
        seen = weights.mean(0, keepdim=True) if self.values.shape[1] < len(self.heads) else weights
        self.values[self.layers.index(layer), :, first : first + weights.size(1)] = seen.cpu().numpy()


class AttentionProbe:
    """Over one layer's attention."""

    def __init__(self, attention: Attention) -> None:
        self.layer, self.heads = attention.layer, attention.config.heads
        self.buffer: WeightBuffer | None = None  # nobody looks
        self.silenced_heads: AbstractSet[int] = frozenset()
        self.original_mix: AttentionFunction = attention.mix
        attention.mix = self.mix
        if isinstance(attention, RelativeAttention):
            self.original_weigh, attention.weigh = attention.weigh, self.weigh
        attention.output.register_forward_pre_hook(self.zero_silenced)

    @contextmanager
    def record_into(self, plate: WeightBuffer) -> Iterator[None]:
        """What is computed meanwhile is laid on the plate, if it is of this layer."""
        self.buffer = plate if self.layer in plate.layers else None
        try:
            yield
        finally:
            self.buffer = None

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """See models.network.attention.attend."""
        if self.buffer is not None:
            self._record(self.buffer, query, key, mask, scale or query.size(3) ** -0.5)
        return self.original_mix(query, key, value, mask, scale)

    def weigh(self, scores: Tensor) -> Tensor:
        """See models.network.attention.Relative."""
        weights = self.original_weigh(scores)
        if self.buffer is not None:
            self.buffer.store(self.layer, 0, weights[0, list(self.buffer.heads)])
        return weights

    def _record(self, plate: WeightBuffer, query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> None:
        """Of [1, Q, H, D] queries and [1, KV, K, D] keys, of which several heads may share one."""
        heads, shared = list(plate.heads), self.heads // key.size(1)
        asking = query[0, :, heads].transpose(0, 1) * scale  # [H, Q, D]
        keys = key[0, [head // shared for head in heads]].mT
        added = None if mask is None else mask[0, heads if mask.size(1) > 1 else [0]]  # [H or 1, Q or 1, K]
        for first in range(0, asking.size(1), SCORE_ROWS):
            scores = asking[:, first : first + SCORE_ROWS] @ keys
            if added is not None:
                scores += added[:, first : first + SCORE_ROWS] if added.size(1) > 1 else added
            plate.store(self.layer, first, scores.softmax(dim=-1))

    def zero_silenced(self, output: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor] | None:  # noqa: ARG002
        """What silent heads mixed is nothing to what comes behind them (Michel et al. 2019, arXiv:1905.10650)."""
        if not self.silenced_heads:
            return None
        mixed = inputs[0].view(len(inputs[0]), self.heads, -1)
        loud = mixed.new_tensor([head not in self.silenced_heads for head in range(self.heads)])
        return ((mixed * loud[:, None]).flatten(1),)
