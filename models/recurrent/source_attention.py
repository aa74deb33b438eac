"""Who looks where in a source: scores of its annotations, how far one reaches, and what is seen.

Knows no cells: a query is a query, whether it is made before the cell runs (Bahdanau) or behind it (Luong).  The one
idea: what is read is kept as a rectangle of annotations beside what a score makes of them for all queries, so that a
step costs its query alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..literature.score_functions import SCORE_FUNCTIONS, ScoreFunction, ScoreWidths, masked_softmax
from .recurrent_config import RecurrentConfig
from .sequence_layouts import padded_rows

SCORE_NAMES = {"dot": "dot", "general": "general", "concat": "additive"}  # two halves of one matrix are two matrices


@dataclass(frozen=True)
class EncodedSource:
    """Annotations of N sources, padded to the longest of them."""

    lengths: tuple[int, ...]
    rows: Tensor  # [N, K, A]
    keys: Tensor  # [N, K, D] what the score makes of them
    mask: Tensor  # [N, K] True where a token is

    def first_rows(self, count: int) -> "EncodedSource":
        return EncodedSource(self.lengths[:count], self.rows[:count], self.keys[:count], self.mask[:count])

    def select_rows(self, at: Tensor) -> "EncodedSource":
        """Of [M] of them, no wider than they need."""
        lengths = tuple(self.lengths[n] for n in at.tolist())
        rows, keys, mask = (
            part[:, : max(lengths, default=0)].index_select(0, at) for part in (self.rows, self.keys, self.mask)
        )
        return EncodedSource(lengths, rows, keys, mask)


def join_sources(sources: Sequence[EncodedSource]) -> EncodedSource:
    """All of them, one behind the other."""
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
        """[N, Q, K] scores to weights, of [N, Q, H] queries at [N, Q] or [1, Q] `times`, where [N, K] `mask` is."""
        return masked_softmax(scores, mask[:, None])

    def within_window(self, mask: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
        """What is no farther from [N, Q] centres than the window, and how far each token is: [N, Q, K]."""
        apart = torch.arange(mask.size(1), device=mask.device) - centre[..., None]
        return mask[:, None] & (apart.abs() <= self.config.window), apart


class MonotonicReach(GlobalReach):
    """local-m: around the token whose turn it is, were one written for each that was read.  Behind the end of a short
    source nothing is seen."""

    def forward(self, scores: Tensor, query: Tensor, mask: Tensor, times: Tensor) -> Tensor:  # noqa: ARG002
        return masked_softmax(scores, self.within_window(mask, times)[0])


class PredictiveReach(GlobalReach):
    """local-p: around a place that the query foretells, S sigmoid(v . tanh(W h)), with a Gaussian of half the window
    over it, so that the place is learned."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.inner = nn.Linear(config.hidden, config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, 1, bias=False)

    def centre(self, query: Tensor, mask: Tensor) -> Tensor:
        """[N, Q] places between 0 and how many tokens there are."""
        share: Tensor = self.out(self.inner(query).tanh()).squeeze(-1).sigmoid()
        return share * mask.sum(dim=-1, keepdim=True)

    def forward(self, scores: Tensor, query: Tensor, mask: Tensor, times: Tensor) -> Tensor:  # noqa: ARG002
        near, apart = self.within_window(mask, self.centre(query, mask))
        return masked_softmax(scores, near) * (apart.square() / (-2 * (self.config.window / 2) ** 2)).exp()


REACH_CLASSES: dict[str, type[GlobalReach]] = {
    "global": GlobalReach,
    "local-m": MonotonicReach,
    "local-p": PredictiveReach,
}


class SourceAttention(nn.Module):
    """Attention of one query a step, or of all that are known (Luong et al. 2015, arXiv:1508.04025, for its kinds)."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.score: ScoreFunction = SCORE_FUNCTIONS[SCORE_NAMES[config.score]](
            ScoreWidths(query=config.hidden, key=config.hidden)
        )
        self.reach = REACH_CLASSES[config.reach](config)

    def build_source(self, annotations: Tensor, lengths: Sequence[int]) -> EncodedSource:
        """[T, A] annotations of N sources, each padded with its last."""
        rows, mask = (part.to(annotations.device) for part in padded_rows(lengths, range(len(lengths))))
        return EncodedSource(tuple(lengths), annotations[rows], self.score.prepare(annotations)[rows], mask)

    def forward(self, query: Tensor, source: EncodedSource, times: Tensor) -> tuple[Tensor, Tensor]:
        """[N, Q, H] queries at [N, Q] or [1, Q] steps to [N, Q, A] contexts, and their weights [N, Q, K]."""
        scores = self.score.score_prepared(query, source.keys)
        weights: Tensor = self.reach(scores, query, source.mask, times)
        return weights @ source.rows, weights
