"""Where to look: soft attention weighs all places, hard attention draws one (Xu et al. 2015, arXiv:1502.03044).

Knows nothing of what stands in the places.  The one idea: the same scores are made for both, and only what is done
with the weights differs: a mean over places, which gradients go through; or a place drawn by them, which no gradient
goes through, so that how well it went is the only thing that tells the scores whether to draw it again (REINFORCE,
Williams 1992).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .score_functions import ScoreFunction, masked_softmax


@dataclass(frozen=True)
class Glimpse:
    """What N questions see of P places: `seen` [N, D], by `weights` [N, P], which come of `odds` [N, P]."""

    context: Tensor
    weights: Tensor
    odds: Tensor


class SoftAttention(nn.Module):
    """The mean of all places by their odds: what a glimpse shows on average."""

    def __init__(self, score: ScoreFunction) -> None:
        super().__init__()
        self.score = score

    def forward(self, question: Tensor, places: Tensor, mask: Tensor) -> Glimpse:
        """[N, Q] questions about [N, P, D] places, of which there are those where `mask` [N, P] is True."""
        odds = masked_softmax(self.score(question[:, None], places)[:, 0], mask)
        weights = self.weights_from(odds)
        return Glimpse((weights[:, None] @ places)[:, 0], weights, odds)

    def weights_from(self, odds: Tensor) -> Tensor:
        """[N, P] to the same."""
        return odds


class HardAttention(SoftAttention):
    """One place: drawn by the odds while it is learned, the likeliest ever after."""

    def weights_from(self, odds: Tensor) -> Tensor:
        place = torch.multinomial(odds, 1)[:, 0] if self.training else odds.argmax(dim=-1)
        return F.one_hot(place, odds.size(-1)).to(odds)


class ReinforceLoss:
    """What scores learn from drawn places: to draw those again after which it went better than it has of late.

    How well it goes of late is a moving mean, of which `kept` stays at each step; so a step's rewards are compared with
    those of the steps before it.  `entropy` is what it is worth to go on looking elsewhere.
    """

    def __init__(self, kept: float = 0.9, entropy: float = 0.01) -> None:
        self.kept, self.entropy, self.baseline = kept, entropy, 0.0

    def loss(self, glimpse: Glimpse, reward: Tensor) -> Tensor:
        """Of [N] rewards, which are only numbers here: no gradient goes into them."""
        given = reward.detach()
        logs = glimpse.odds.clamp(min=torch.finfo(glimpse.odds.dtype).tiny).log()
        drawn = (glimpse.weights * logs).sum(dim=-1)
        spread = -(glimpse.odds * logs).sum(dim=-1)
        better = given - self.baseline
        self.baseline = self.kept * self.baseline + (1 - self.kept) * float(given.mean())
        return -(better * drawn + self.entropy * spread).mean()
