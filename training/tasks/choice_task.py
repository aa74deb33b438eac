"""The task of choosing the right one of a few answers to a question (Radford et al. 2018, section 3.3).

Each answer is read after the question on its own and gets one score; a softmax compares the scores.  It is a PairTask
with few answers, as many in training as in measuring, and with baselines that need no vectors.
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
    """A choice of one in four answers; half of the wrong ones share words with the question."""

    measured_passages: int = ANSWER_COUNT
    trained_passages: int = ANSWER_COUNT

    def figures(self, items: Sequence[PairItem], scores: Tensor) -> Figures:  # noqa: ARG002 - the first is the right one
        """Return the share of questions answered rightly; a tie with a wrong answer counts as wrong."""
        return {"accuracy": ((scores >= scores[:, :1]).sum(dim=1) == 1).float().mean().item()}

    def baselines(self, trained: Sequence[PairItem], items: Sequence[PairItem], embed: EmbedTexts) -> Figures:  # noqa: ARG002
        """Return the accuracy of a random choice, and of the answer with the largest word overlap."""
        shared = [
            [jaccard_overlap(item.query, answer) for answer in item.passages[: self.measured_passages]]
            for item in items
        ]
        by_words = self.figures(items, torch.tensor(shared))
        return {"by lot": 1 / self.measured_passages, "words in common": by_words["accuracy"]}
