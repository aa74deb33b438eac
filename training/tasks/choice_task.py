"""The lesson of a question with a few answers of which one is right (Radford et al. 2018, section 3.3).

It doesn't know what the texts are.  The one idea: each answer is read behind the question, on its own, and has one
score; the scores are compared by a softmax.  That is what `pairs` does; here there are few answers, in learning as
many as in measuring, and what it is compared with needs no vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .pair_task import PairItem, PairTask
from .similarity_task import jaccard_overlap
from .task import EmbedTexts, Figures

ANSWER_COUNT = 4


@dataclass(frozen=True)
class ChoiceTask(PairTask):
    """One in four; half of the wrong ones share words with the question."""

    measured_passages: int = ANSWER_COUNT
    trained_passages: int = ANSWER_COUNT

    def figures(self, items: Sequence[PairItem], scores: Tensor) -> Figures:  # noqa: ARG002 - the first is the right one
        """The share of questions answered rightly; whoever scores as much is in the right one's way."""
        return {"accuracy": ((scores >= scores[:, :1]).sum(dim=1) == 1).float().mean().item()}

    def baselines(self, learned: Sequence[PairItem], items: Sequence[PairItem], embed: EmbedTexts) -> Figures:  # noqa: ARG002
        """Drawing lots, and the answer that shares the largest part of its words with the question."""
        shared = [
            [jaccard_overlap(item.query, answer) for answer in item.passages[: self.measured_passages]]
            for item in items
        ]
        by_words = self.figures(items, torch.tensor(shared))
        return {"by lot": 1 / self.measured_passages, "words in common": by_words["accuracy"]}
