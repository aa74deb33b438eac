"""How the scores of attention follow from products of queries and keys."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scoring:
    """How scores follow from products of queries and keys: times `scale`; then, with a `cap`, cap * tanh(score / cap).
    `sinks` [H] are scores for no key, which take a share of the softmax."""

    scale: float
    cap: float = 0.0
    sinks: Tensor | None = None

    def of_heads(self, heads: slice) -> "Scoring":
        """The scoring of some heads."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[heads])

    def score(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """[..., Q, D] queries and [..., K, D] keys to masked scores [..., Q, K]."""
        scores = query @ key.mT * self.scale
        if self.cap:
            scores = torch.tanh(scores / self.cap) * self.cap
        return scores if mask is None else scores + mask

    def weigh(self, scores: Tensor, sinks: Tensor | None) -> Tensor:
        """[..., Q, K] scores to weights; `sinks` [..., 1, 1] are those of their heads."""
        if sinks is None:
            return scores.softmax(dim=-1)
        joined = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), dim=-1)
        return joined.softmax(dim=-1)[..., :-1]
