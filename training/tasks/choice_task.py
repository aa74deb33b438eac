"""The lesson of a question with a few answers of which one is right (Radford et al. 2018, section 3.3).

It doesn't know what the texts are.  The one idea: each answer is read behind the question, on its own, and has one
score; the scores are compared by a softmax.  That is what `pairs` does; here there are few answers, in learning as
many as in measuring, and what it is compared with needs no vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .pair_task import Pairs, Ranked
from .similarity_task import overlap
from .task import Embed, Figures

ANSWERS = 4


@dataclass(frozen=True)
class Choices(Pairs):
    """One in four; half of the wrong ones share words with the question."""

    measured: int = ANSWERS
    learned: int = ANSWERS

    def figures(self, items: Sequence[Ranked], scores: Tensor) -> Figures:  # noqa: ARG002 - the first is the right one
        """The share of questions answered rightly; whoever scores as much is in the right one's way."""
        return {"accuracy": ((scores >= scores[:, :1]).sum(dim=1) == 1).float().mean().item()}

    def baselines(self, learned: Sequence[Ranked], items: Sequence[Ranked], embed: Embed) -> Figures:  # noqa: ARG002
        """Drawing lots, and the answer that shares the largest part of its words with the question."""
        shared = [[overlap(item.query, answer) for answer in item.passages[: self.measured]] for item in items]
        by_words = self.figures(items, torch.tensor(shared))
        return {"by lot": 1 / self.measured, "words in common": by_words["accuracy"]}
