"""The lesson of two texts that say the same or do not, neither of which comes first.

It doesn't know what the texts are.  The one idea (Radford et al. 2018, section 3.3): a causal network reads them in
both orders, and the two states are added before the one linear layer.  That has no bias, so the scores may be added
instead: it is the same sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..data.examples import Example, words
from .label_task import Labels, majority
from .task import Embed, Figures, Packed
from .text_reader import Read, Reader

ORDERS = 2


@dataclass(frozen=True)
class Compared:
    """A pair as it was read in both orders; `shared` is the share of its words that both texts have."""

    reads: tuple[Read, Read]
    label: int
    domain: str
    shared: float


@dataclass(frozen=True)
class Similar:
    """Choices among `names`, one a pair."""

    names: tuple[str, ...]
    kind: Literal["classify"] = "classify"

    def items(self, examples: Sequence[Example[int]], read: Reader) -> list[Compared]:
        pairs: list[tuple[str, str]] = [example.text for example in examples]
        forth, back = read(pairs), read([(second, first) for first, second in pairs])
        return [
            Compared(both, each.label, each.domain, overlap(*pair))
            for both, each, pair in zip(zip(forth, back, strict=True), examples, pairs, strict=True)
        ]

    def cut(self, items: Sequence[Compared]) -> int:
        return sum(item.reads[0].cut for item in items)

    def pack(self, items: Sequence[Compared], read: Reader, learning: bool) -> Packed:  # noqa: ARG002 - read once
        reads = [each for item in items for each in item.reads]
        tokens, segments = [each.tokens for each in reads], [each.segments for each in reads]
        right = [item.label for item in items]
        return Packed(tokens, segments, list(range(len(reads))), right, orders=ORDERS)

    def figures(self, items: Sequence[Compared], scores: Tensor) -> Figures:
        """As of texts with one label."""
        return Labels(self.names).figures(items, scores)

    def baselines(self, learned: Sequence[Compared], items: Sequence[Compared], embed: Embed) -> Figures:  # noqa: ARG002
        """The commonest label, and the accuracy of a bound on the share of words that both texts have, the best one in
        what was learned."""
        bound, above = max(
            ((bound, above) for bound in sorted({item.shared for item in learned}) for above in (0, 1)),
            key=lambda rule: by_words(learned, *rule),
        )
        return {"majority": majority(learned, items), "words in common": by_words(items, bound, above)}


def overlap(first: str, second: str) -> float:
    """Jaccard's."""
    one, other = words(first), words(second)
    return len(one & other) / len(one | other)


def by_words(items: Sequence[Compared], bound: float, above: int) -> float:
    """How often the label is `above` where at least so much is shared, and the other one where less is."""
    return sum((above if item.shared >= bound else 1 - above) == item.label for item in items) / len(items)
