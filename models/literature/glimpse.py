"""Soft attention, a weighted mean of all places, and hard attention, which samples one place (Xu et al. 2015,
arXiv:1502.03044).

Both use the same scores. Gradients flow through the mean, but not through a sample; its scores learn from rewards
(REINFORCE, Williams 1992).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .score_functions import ScoreFunction, masked_softmax


@dataclass(frozen=True)
class Glimpse:
    """The result of N questions about P places: the contexts [N, D], by `weights` [N, P], which follow from `odds` [N,
    P]."""

    context: Tensor
    weights: Tensor
    odds: Tensor


class SoftAttention(nn.Module):
    """The mean of all places, weighted by their odds."""

    def __init__(self, score: ScoreFunction) -> None:
        super().__init__()
        self.score = score

    def forward(self, question: Tensor, places: Tensor, mask: Tensor) -> Glimpse:
        """[N, Q] questions about [N, P, D] places; a place exists where `mask` [N, P] is True."""
        odds = masked_softmax(self.score(question[:, None], places)[:, 0], mask)
        weights = self.weights_from(odds)
        return Glimpse((weights[:, None] @ places)[:, 0], weights, odds)

    def weights_from(self, odds: Tensor) -> Tensor:
        """[N, P] odds to weights."""
        return odds


class HardAttention(SoftAttention):
    """One place: sampled by the odds in training, the most likely one in evaluation."""

    def weights_from(self, odds: Tensor) -> Tensor:
        place = torch.multinomial(odds, 1)[:, 0] if self.training else odds.argmax(dim=-1)
        return F.one_hot(place, odds.size(-1)).to(odds)


class ReinforceLoss:
    """The REINFORCE loss of sampled places: samples that were followed by a reward above the recent mean become more
    likely.

    The recent mean is a moving one, of which `kept` remains at each step; a step's rewards are compared with those of
    earlier steps. `entropy` is the weight of the entropy bonus.
    """

    def __init__(self, kept: float = 0.9, entropy: float = 0.01) -> None:
        self.kept, self.entropy, self.baseline = kept, entropy, 0.0

    def loss(self, glimpse: Glimpse, reward: Tensor) -> Tensor:
        """Of [N] rewards, which are constants: no gradient flows into them."""
        given = reward.detach()
        logs = glimpse.odds.clamp(min=torch.finfo(glimpse.odds.dtype).tiny).log()
        drawn = (glimpse.weights * logs).sum(dim=-1)
        spread = -(glimpse.odds * logs).sum(dim=-1)
        better = given - self.baseline
        self.baseline = self.kept * self.baseline + (1 - self.kept) * float(given.mean())
        return -(better * drawn + self.entropy * spread).mean()
