"""Attention of recurrent decoders to a source: the scores of its annotations, and global or local reach.

Sources are padded to one rectangle, and what a score function computes for all queries is kept with them, so that a
step costs only its query.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..literature.score_functions import SCORE_FUNCTIONS, ScoreFunction, ScoreWidths, masked_softmax
from .recurrent_config import RecurrentConfig
from .sequence_layouts import padded_rows

# "concat" is additive: the two halves of its matrix are two matrices.
SCORE_NAMES = {"dot": "dot", "general": "general", "concat": "additive"}


@dataclass(frozen=True)
class EncodedSource:
    """Annotations of N sources, padded to the longest."""

    lengths: tuple[int, ...]
    rows: Tensor  # [N, K, A]
    keys: Tensor  # [N, K, D] the score function's prepared keys
    mask: Tensor  # [N, K] True where a token is

    def first_rows(self, count: int) -> "EncodedSource":
        return EncodedSource(self.lengths[:count], self.rows[:count], self.keys[:count], self.mask[:count])

    def select_rows(self, at: Tensor) -> "EncodedSource":
        """The sources at [M] indices, padded to their longest."""
        lengths = tuple(self.lengths[n] for n in at.tolist())
        rows, keys, mask = (
            part[:, : max(lengths, default=0)].index_select(0, at) for part in (self.rows, self.keys, self.mask)
        )
        return EncodedSource(lengths, rows, keys, mask)


def join_sources(sources: Sequence[EncodedSource]) -> EncodedSource:
    """All sources, one after the other."""
    longest = max(source.mask.size(1) for source in sources)
    lengths = tuple(length for source in sources for length in source.lengths)
    rows, keys = (
        torch.cat([F.pad(part, (0, 0, 0, longest - part.size(1))) for part in parts])
        for parts in ([source.rows for source in sources], [source.keys for source in sources])
    )
    return EncodedSource(
        lengths, rows, keys, torch.cat([F.pad(s.mask, (0, longest - s.mask.size(1))) for s in sources])
    )


class GlobalReach(nn.Module):
    """The global reach: every token is seen."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, scores: Tensor, query: Tensor, mask: Tensor, times: Tensor) -> Tensor:  # noqa: ARG002
        """[N, Q, K] scores to weights, for [N, Q, H] queries at steps `times` [N, Q] or [1, Q]; `mask` [N, K] is True
        for tokens."""
        return masked_softmax(scores, mask[:, None])

    def within_window(self, mask: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens are within the window around [N, Q] centres, and their distance: [N, Q, K]."""
        distance = torch.arange(mask.size(1), device=mask.device) - centre[..., None]
        return mask[:, None] & (distance.abs() <= self.config.window), distance


class MonotonicReach(GlobalReach):
    """local-m: the window is centred at the source position equal to the step. Beyond the end of a short source no
    token is seen."""

    def forward(self, scores: Tensor, query: Tensor, mask: Tensor, times: Tensor) -> Tensor:  # noqa: ARG002
        return masked_softmax(scores, self.within_window(mask, times)[0])


class PredictiveReach(GlobalReach):
    """local-p: the centre is predicted from the query, S sigmoid(v . tanh(W h)). A Gaussian of half the window makes it
    learnable."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.inner = nn.Linear(config.hidden, config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, 1, bias=False)

    def centre(self, query: Tensor, mask: Tensor) -> Tensor:
        """[N, Q] centres between 0 and the number of tokens."""
        share: Tensor = self.out(self.inner(query).tanh()).squeeze(-1).sigmoid()
        return share * mask.sum(dim=-1, keepdim=True)

    def forward(self, scores: Tensor, query: Tensor, mask: Tensor, times: Tensor) -> Tensor:  # noqa: ARG002
        within, distance = self.within_window(mask, self.centre(query, mask))
        return masked_softmax(scores, within) * (distance.square() / (-2 * (self.config.window / 2) ** 2)).exp()


REACH_CLASSES: dict[str, type[GlobalReach]] = {
    "global": GlobalReach,
    "local-m": MonotonicReach,
    "local-p": PredictiveReach,
}


class SourceAttention(nn.Module):
    """Attention for one query a step, or for all known queries (Luong et al. 2015, arXiv:1508.04025, for its
    variants)."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.score: ScoreFunction = SCORE_FUNCTIONS[SCORE_NAMES[config.score]](
            ScoreWidths(query=config.hidden, key=config.hidden)
        )
        self.reach = REACH_CLASSES[config.reach](config)

    def build_source(self, annotations: Tensor, lengths: Sequence[int]) -> EncodedSource:
        """The sources of [T, A] annotations of N texts, each padded with its last annotation."""
        rows, mask = (part.to(annotations.device) for part in padded_rows(lengths, range(len(lengths))))
        return EncodedSource(tuple(lengths), annotations[rows], self.score.prepare(annotations)[rows], mask)

    def forward(self, query: Tensor, source: EncodedSource, times: Tensor) -> tuple[Tensor, Tensor]:
        """[N, Q, H] queries at [N, Q] or [1, Q] steps to [N, Q, A] contexts, and their weights [N, Q, K]."""
        scores = self.score.score_prepared(query, source.keys)
        weights: Tensor = self.reach(scores, query, source.mask, times)
        return weights @ source.rows, weights
