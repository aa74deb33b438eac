"""The decoding state of recurrent decoders, whose rows can be selected, repeated and joined."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .source_attention import EncodedSource, join_sources


@dataclass(frozen=True)
class RecurrentState:
    """The state of N sequences."""

    source: EncodedSource
    memory: Tensor  # [M, depth, N, H] of the cells; M is 2 of an LSTM
    attentional: Tensor  # [N, W] the attentional vectors of the last step, if the next step reads them
    steps: Tensor  # [N] steps
    weights: Tensor  # [N, K] of the last step

    def first_rows(self, count: int) -> "RecurrentState":
        if count == len(self.steps):
            return self
        rest = (part[:count] for part in (self.attentional, self.steps, self.weights))
        return RecurrentState(self.source.first_rows(count), self.memory[:, :, :count], *rest)

    def select_rows(self, rows: Tensor) -> "RecurrentState":
        source = self.source.select_rows(rows)
        weights = self.weights[:, : source.mask.size(1)]
        rest = (part.index_select(0, rows) for part in (self.attentional, self.steps, weights))
        return RecurrentState(source, self.memory.index_select(2, rows), *rest)


def join_states(states: Sequence[RecurrentState]) -> RecurrentState:
    """The state of all their sequences, one state after the other."""
    source = join_sources([state.source for state in states])
    weights = [F.pad(state.weights, (0, source.mask.size(1) - state.weights.size(1))) for state in states]
    memory = torch.cat([state.memory for state in states], dim=2)
    rest = ([state.attentional for state in states], [state.steps for state in states], weights)
    return RecurrentState(source, memory, *(torch.cat(part) for part in rest))
