"""The task of telling whether two texts have the same meaning, without an order between them.

A causal network reads them in both orders, and the two states are added before the linear layer (Radford et al. 2018,
section 3.3).  The layer has no bias, so adding the scores gives the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..data.examples import Example, word_set
from .label_task import LabelTask, majority_accuracy
from .task import EmbedTexts, Figures, TaskBatch
from .text_reader import EncodedText, TextReader

ORDERS = 2


@dataclass(frozen=True)
class SimilarityItem:
    """A pair, encoded in both orders.  `word_overlap` is the share of words that both texts have."""

    encoded: tuple[EncodedText, EncodedText]
    label: int
    domain: str
    word_overlap: float


@dataclass(frozen=True)
class SimilarityTask:
    """Classification of pairs into `names`."""

    names: tuple[str, ...]
    kind: Literal["classify"] = "classify"

    def items(self, examples: Sequence[Example[int]], read: TextReader) -> list[SimilarityItem]:
        pairs: list[tuple[str, str]] = [example.text for example in examples]
        forth, back = read(pairs), read([(second, first) for first, second in pairs])
        return [
            SimilarityItem(both, each.label, each.domain, jaccard_overlap(*pair))
            for both, each, pair in zip(zip(forth, back, strict=True), examples, pairs, strict=True)
        ]

    def truncated_count(self, items: Sequence[SimilarityItem]) -> int:
        return sum(item.encoded[0].is_truncated for item in items)

    def pack(self, items: Sequence[SimilarityItem], read: TextReader, learning: bool) -> TaskBatch:  # noqa: ARG002 - read once
        reads = [each for item in items for each in item.encoded]
        tokens, segments = [each.tokens for each in reads], [each.segments for each in reads]
        targets = [item.label for item in items]
        return TaskBatch(tokens, segments, list(range(len(reads))), targets, order_count=ORDERS)

    def figures(self, items: Sequence[SimilarityItem], scores: Tensor) -> Figures:
        """Return the figures of LabelTask."""
        return LabelTask(self.names).figures(items, scores)

    def baselines(
        self,
        trained: Sequence[SimilarityItem],
        items: Sequence[SimilarityItem],
        embed: EmbedTexts,  # noqa: ARG002
    ) -> Figures:
        """Return the accuracy of the most frequent label, and of the threshold on word overlap that is best in
        training.
        """
        bound, above = max(
            ((bound, above) for bound in sorted({item.word_overlap for item in trained}) for above in (0, 1)),
            key=lambda rule: threshold_accuracy(trained, *rule),
        )
        return {
            "majority": majority_accuracy(trained, items),
            "words in common": threshold_accuracy(items, bound, above),
        }


def jaccard_overlap(first: str, second: str) -> float:
    """Return the Jaccard similarity of the texts' words."""
    one, other = word_set(first), word_set(second)
    return len(one & other) / len(one | other)


def threshold_accuracy(items: Sequence[SimilarityItem], bound: float, above: int) -> float:
    """Return the accuracy of the label `above` at or over the threshold `bound`, and of the other label under it."""
    return sum((above if item.word_overlap >= bound else 1 - above) == item.label for item in items) / len(items)
