"""What is known of sequences that are being written: rows that can be picked, repeated and joined."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .source_attention import Source, joined


@dataclass(frozen=True)
class RecurrentState:
    """Of N sequences."""

    source: Source
    memory: Tensor  # [M, depth, N, H] of the cells; M is 2 of an LSTM
    made: Tensor  # [N, W] of the last step, where the next one reads it
    written: Tensor  # [N] steps
    weights: Tensor  # [N, K] of the last step

    def first(self, count: int) -> "RecurrentState":
        if count == len(self.written):
            return self
        rest = (part[:count] for part in (self.made, self.written, self.weights))
        return RecurrentState(self.source.first(count), self.memory[:, :, :count], *rest)

    def pick(self, rows: Tensor) -> "RecurrentState":
        source = self.source.pick(rows)
        weights = self.weights[:, : source.mask.size(1)]
        rest = (part.index_select(0, rows) for part in (self.made, self.written, weights))
        return RecurrentState(source, self.memory.index_select(2, rows), *rest)


def join(states: Sequence[RecurrentState]) -> RecurrentState:
    """All of their sequences, one state behind the other."""
    source = joined([state.source for state in states])
    weights = [F.pad(state.weights, (0, source.mask.size(1) - state.weights.size(1))) for state in states]
    memory = torch.cat([state.memory for state in states], dim=2)
    rest = ([state.made for state in states], [state.written for state in states], weights)
    return RecurrentState(source, memory, *(torch.cat(part) for part in rest))
