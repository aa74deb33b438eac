"""The lesson of two texts that say the same or do not, neither of which comes first.

It doesn't know what the texts are.  The one idea (Radford et al. 2018, section 3.3): a causal network reads them in
both orders, and the two states are added before the one linear layer.  That has no bias, so the scores may be added
instead: it is the same sum.
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
    """A pair as it was read in both orders; `shared` is the share of its words that both texts have."""

    encoded: tuple[EncodedText, EncodedText]
    label: int
    domain: str
    word_overlap: float


@dataclass(frozen=True)
class SimilarityTask:
    """Choices among `names`, one a pair."""

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
        right = [item.label for item in items]
        return TaskBatch(tokens, segments, list(range(len(reads))), right, order_count=ORDERS)

    def figures(self, items: Sequence[SimilarityItem], scores: Tensor) -> Figures:
        """As of texts with one label."""
        return LabelTask(self.names).figures(items, scores)

    def baselines(
        self,
        learned: Sequence[SimilarityItem],
        items: Sequence[SimilarityItem],
        embed: EmbedTexts,  # noqa: ARG002
    ) -> Figures:
        """The commonest label, and the accuracy of a bound on the share of words that both texts have, the best one in
        what was learned."""
        bound, above = max(
            ((bound, above) for bound in sorted({item.word_overlap for item in learned}) for above in (0, 1)),
            key=lambda rule: threshold_accuracy(learned, *rule),
        )
        return {
            "majority": majority_accuracy(learned, items),
            "words in common": threshold_accuracy(items, bound, above),
        }


def jaccard_overlap(first: str, second: str) -> float:
    """Jaccard's."""
    one, other = word_set(first), word_set(second)
    return len(one & other) / len(one | other)


def threshold_accuracy(items: Sequence[SimilarityItem], bound: float, above: int) -> float:
    """How often the label is `above` where at least so much is shared, and the other one where less is."""
    return sum((above if item.word_overlap >= bound else 1 - above) == item.label for item in items) / len(items)
