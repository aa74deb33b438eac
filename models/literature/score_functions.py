"""Attention score functions, and the softmax over their scores.

Every function is a module from [Q, Dq] queries and [K, Dk] keys to [Q, K] scores, with any leading dimensions, so
attention can use any of them. Transformers compute scaled dot products in one kernel (models.network.attention).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class ScoreWidths:
    """The sizes a score function is built for; each uses those it needs."""

    query: int
    key: int
    hidden: int = 0  # of the hidden layer of additive scores; 0: the query's width
    places: int = 0  # number of places, for scores that depend on places only


class ScoreFunction(nn.Module):
    """A score function, built from ScoreWidths, which it checks."""

    def __init__(self, widths: ScoreWidths) -> None:
        super().__init__()
        self.widths = widths

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """[..., Q, Dq] queries and [..., K, Dk] keys to [..., Q, K] scores."""
        raise NotImplementedError

    def prepare(self, keys: Tensor) -> Tensor:
        """What is the same for all queries, so that [..., K, Dk] keys can be prepared once."""
        return keys

    def score_prepared(self, query: Tensor, prepared: Tensor) -> Tensor:
        """The scores of prepared keys."""
        scores: Tensor = self(query, prepared)
        return scores


class EqualWidthScore(ScoreFunction):
    """A score of queries and keys of equal width, without a matrix between them."""

    def __init__(self, widths: ScoreWidths) -> None:
        super().__init__(widths)
        if widths.query != widths.key:
            name = type(self).__name__
            message = f"{name} scores queries and keys of one width, not {widths.query} and {widths.key}"
            raise ValueError(message)


class Dot(EqualWidthScore):
    """q . k (Luong et al. 2015, arXiv:1508.04025)."""

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return query @ keys.mT


class ScaledDot(EqualWidthScore):
    """q . k / sqrt(D): the spread does not grow with the width (Vaswani et al. 2017, arXiv:1706.03762)."""

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return query @ keys.mT / math.sqrt(query.size(-1))


class Cosine(EqualWidthScore):
    """The cosine times a learned strength; without it no weight could be much larger than another (Graves et al. 2014,
    arXiv:1410.5401; there each query has its own strength, here one is learned for all)."""

    def __init__(self, widths: ScoreWidths) -> None:
        super().__init__(widths)
        self.strength = nn.Parameter(torch.ones(()))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return F.normalize(query, dim=-1) @ F.normalize(keys, dim=-1).mT * self.strength


class General(ScoreFunction):
    """q W k: widths may differ, and the similarity is learned (Luong et al. 2015, arXiv:1508.04025)."""

    def __init__(self, widths: ScoreWidths) -> None:
        super().__init__(widths)
        self.match = nn.Linear(widths.key, widths.query, bias=False)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return self.score_prepared(query, self.prepare(keys))

    def prepare(self, keys: Tensor) -> Tensor:
        matched: Tensor = self.match(keys)
        return matched

    def score_prepared(self, query: Tensor, prepared: Tensor) -> Tensor:
        return query @ prepared.mT


class Additive(ScoreFunction):
    """v . tanh(W q + U k) (Bahdanau et al. 2015, arXiv:1409.0473); U k is the same for all queries."""

    def __init__(self, widths: ScoreWidths) -> None:
        super().__init__(widths)
        hidden = widths.hidden or widths.query
        self.of_query = nn.Linear(widths.query, hidden, bias=False)
        self.of_key = nn.Linear(widths.key, hidden, bias=False)
        self.out = nn.Linear(hidden, 1, bias=False)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return self.score_prepared(query, self.prepare(keys))

    def prepare(self, keys: Tensor) -> Tensor:
        hidden: Tensor = self.of_key(keys)
        return hidden

    def score_prepared(self, query: Tensor, prepared: Tensor) -> Tensor:
        inner = self.of_query(query).unsqueeze(-2) + prepared.unsqueeze(-3)  # [..., Q, K, hidden]
        scores: Tensor = self.out(inner.tanh()).squeeze(-1)
        return scores


class Concatenated(ScoreFunction):
    """v . tanh(W [q; k]): additive with one matrix over both, as Luong et al. 2015 write it ("concat")."""

    def __init__(self, widths: ScoreWidths) -> None:
        super().__init__(widths)
        hidden = widths.hidden or widths.query
        self.of_both = nn.Linear(widths.query + widths.key, hidden, bias=False)
        self.out = nn.Linear(hidden, 1, bias=False)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        between = (query.size(-2), keys.size(-2), -1)
        pairs = [query.unsqueeze(-2), keys.unsqueeze(-3)]
        both = torch.cat([part.expand(*part.shape[:-3], *between) for part in pairs], dim=-1)
        scores: Tensor = self.out(self.of_both(both).tanh()).squeeze(-1)
        return scores


class Location(ScoreFunction):
    """W q: each place has its row of W, and the key itself is ignored (Luong et al. 2015, arXiv:1508.04025)."""

    def __init__(self, widths: ScoreWidths) -> None:
        super().__init__(widths)
        if not widths.places:
            message = "Location scores places: give their number"
            raise ValueError(message)
        self.of_place = nn.Linear(widths.query, widths.places, bias=False)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        count = keys.size(-2)
        if count > self.widths.places:
            message = f"{count} keys are more than the {self.widths.places} places that Location was made for"
            raise ValueError(message)
        scores: Tensor = self.of_place(query)[..., :count]
        return scores


class Gaussian(EqualWidthScore):
    """-|q - k|^2 / 2, the logarithm of a Gaussian kernel of width one (Nadaraya 1964, Watson 1964)."""

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return (query.unsqueeze(-2) - keys.unsqueeze(-3)).square().sum(dim=-1) / -2


class LearnedGaussian(Gaussian):
    """-|(q - k) w|^2 / 2: the kernel's width, 1 / w, is learned."""

    def __init__(self, widths: ScoreWidths) -> None:
        super().__init__(widths)
        self.narrow = nn.Parameter(torch.ones(()))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return super().forward(query, keys) * self.narrow.square()


SCORE_FUNCTIONS: dict[str, type[ScoreFunction]] = {
    "dot": Dot,
    "scaled_dot": ScaledDot,
    "cosine": Cosine,
    "general": General,
    "additive": Additive,
    "concat": Concatenated,
    "location": Location,
    "gaussian": Gaussian,
    "learned_gaussian": LearnedGaussian,
}


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Weights [..., Q, K] over the keys for which `mask` is True; the mask may have fewer dimensions.

    A masked key has weight zero whatever its score, even NaN. A row without any key gets zeros, and a gradient of
    zeros; a softmax over -inf alone would give NaN.
    """
    hidden = ~mask
    blind = hidden.all(dim=-1, keepdim=True)
    seen = scores.masked_fill(hidden, float("-inf")).masked_fill(blind, 0.0)
    return seen.softmax(dim=-1).masked_fill(blind, 0.0)


def weighted_sum(
    query: Tensor, keys: Tensor, values: Tensor, score: ScoreFunction, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """[..., Q, Dv] sums of [..., K, Dv] values, weighted by the scores of queries and keys, and the weights [..., Q,
    K]."""
    weights = masked_softmax(score(query, keys), mask)
    return weights @ values, weights
