"""Probes that replace the `mix` function of an attention layer to record its weights or to silence some heads.

Values are still mixed by the fused kernel. The recorded weights are computed in addition, some rows at a time, so that
recording takes memory only for what is recorded.
"""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ..network.attention import Attention, AttentionFunction, GlobalAttention, RelativeAttention
from ..network.scoring import Scoring

SCORE_ROWS = 256  # rows whose scores exist at a time


@dataclass(frozen=True)
class WeightBuffer:
    """The recorded weights of some layers and heads of a part of the network, for one text."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    values: NDArray[np.float32]  # [L, H, Q, K], or [L, 1, Q, K] for the mean of those heads

    @classmethod
    def allocate(
        cls, layers: tuple[int, ...], heads: tuple[int, ...], shape: tuple[int, int], *, mean: bool
    ) -> "WeightBuffer":
        """`shape`: the numbers of query rows and key columns."""
        return cls(layers, heads, np.zeros((len(layers), 1 if mean else len(heads), *shape), np.float32))

    def store(self, layer: int, first: int, weights: Tensor) -> None:
        """Store weights [H, R, K] of the recorded heads, for the rows from `first` on."""
        seen = weights.mean(0, keepdim=True) if self.values.shape[1] < len(self.heads) else weights
        self.values[self.layers.index(layer), :, first : first + weights.size(1)] = seen.cpu().numpy()


class AttentionProbe:
    """The probe of one attention layer."""

    def __init__(self, attention: Attention) -> None:
        self.layer, self.heads = attention.layer, attention.config.heads
        self.buffer: WeightBuffer | None = None  # nothing is recorded
        self.first_row = 0  # of the rows that are mixed
        self.silenced_heads: AbstractSet[int] = frozenset()
        self.original_mix: AttentionFunction = attention.mix
        attention.mix = self.mix
        if isinstance(attention, RelativeAttention):
            self.original_weigh, attention.weigh = attention.weigh, self.weigh
        if isinstance(attention, GlobalAttention):
            self.original_mix_global = attention.mix_global
            attention.mix_global = self.mix_global  # type: ignore[method-assign]
        attention.output.register_forward_pre_hook(self.zero_silenced)

    @contextmanager
    def record_into(self, buffer: WeightBuffer) -> Iterator[None]:
        """Within this context, weights of this layer are recorded into `buffer` if it contains this layer."""
        self.buffer = buffer if self.layer in buffer.layers else None
        try:
            yield
        finally:
            self.buffer = None

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
        """See models.network.attention.attend."""
        if self.buffer is not None:
            self._record(self.buffer, query, key, mask, scoring)
        return self.original_mix(query, key, value, mask, scoring)

    def mix_global(self, query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
        """See models.network.attention.GlobalAttention. The weights replace those that the rows have in the window."""
        self.first_row = first
        try:
            return self.original_mix_global(query, key, value, first)
        finally:
            self.first_row = 0

    def weigh(self, scores: Tensor) -> Tensor:
        """See models.network.attention.Relative."""
        weights = self.original_weigh(scores)
        if self.buffer is not None:
            self.buffer.store(self.layer, 0, weights[0, list(self.buffer.heads)])
        return weights

    def _record(self, buffer: WeightBuffer, query: Tensor, key: Tensor, mask: Tensor | None, scoring: Scoring) -> None:
        """Record the weights of [1, Q, H, D] queries over [1, KV, K, D] keys; several heads may share a key head."""
        heads, shared = list(buffer.heads), self.heads // key.size(1)
        queries = query[0, :, heads].transpose(0, 1)  # [H, Q, D]
        keys = key[0, [head // shared for head in heads]]
        sinks = None if scoring.sinks is None else scoring.sinks[heads][:, None, None]
        added = None if mask is None else mask[0, heads if mask.size(1) > 1 else [0]]  # [H or 1, Q or 1, K]
        for first in range(0, queries.size(1), SCORE_ROWS):
            shown = added if added is None or added.size(1) == 1 else added[:, first : first + SCORE_ROWS]
            scores = scoring.score(queries[:, first : first + SCORE_ROWS], keys, shown)
            buffer.store(self.layer, self.first_row + first, scoring.weigh(scores, sinks))

    def zero_silenced(self, output: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor] | None:  # noqa: ARG002
        """Set the output of silenced heads to zero (Michel et al. 2019, arXiv:1905.10650)."""
        if not self.silenced_heads:
            return None
        mixed = inputs[0].view(len(inputs[0]), self.heads, -1)
        loud = mixed.new_tensor([head not in self.silenced_heads for head in range(self.heads)])
        return ((mixed * loud[:, None]).flatten(1),)
