"""The task of texts with one label each, with precision and recall of each label."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from ..data.examples import Example
from .task import EmbedTexts, Figures, TaskBatch
from .text_reader import EncodedText, TextReader


class LabelledItem(Protocol):
    """An item with a label and a domain."""

    @property
    def label(self) -> int: ...
    @property
    def domain(self) -> str: ...


@dataclass(frozen=True)
class LabelItem:
    """An encoded text and its label."""

    encoded: EncodedText
    label: int
    domain: str


@dataclass(frozen=True)
class LabelTask:
    """Classification of texts into `names`."""

    names: tuple[str, ...]
    kind: Literal["classify"] = "classify"

    def items(self, examples: Sequence[Example[int]], read: TextReader) -> list[LabelItem]:
        texts = read([example.text for example in examples])
        return [LabelItem(text, each.label, each.domain) for text, each in zip(texts, examples, strict=True)]

    def truncated_count(self, items: Sequence[LabelItem]) -> int:
        return sum(item.encoded.is_truncated for item in items)

    def pack(self, items: Sequence[LabelItem], read: TextReader, learning: bool) -> TaskBatch:  # noqa: ARG002 - read once
        tokens, segments = [item.encoded.tokens for item in items], [item.encoded.segments for item in items]
        return TaskBatch(tokens, segments, list(range(len(items))), [item.label for item in items])

    def figures(self, items: Sequence[LabelledItem], scores: Tensor) -> Figures:
        """Return accuracy, of all texts and of each domain, and precision and recall of each label."""
        predicted = scores.argmax(dim=-1).tolist()
        hits = [item for item, label in zip(items, predicted, strict=True) if item.label == label]
        correct, actual, claimed = (
            Counter(self.names[item.label] for item in hits),
            Counter(self.names[item.label] for item in items),
            Counter(self.names[label] for label in predicted),
        )
        domains, correct_by_domain = Counter(item.domain for item in items), Counter(item.domain for item in hits)
        return {
            "accuracy": len(hits) / len(items),
            **{domain: correct_by_domain[domain] / count for domain, count in sorted(domains.items())},
            **{f"precision of {name}": correct[name] / claimed[name] for name in self.names if claimed[name]},
            **{f"recall of {name}": correct[name] / actual[name] for name in self.names if actual[name]},
        }

    def baselines(self, trained: Sequence[LabelItem], items: Sequence[LabelItem], embed: EmbedTexts) -> Figures:  # noqa: ARG002
        return {"majority": majority_accuracy(trained, items)}


def majority_accuracy(trained: Sequence[LabelledItem], items: Sequence[LabelledItem]) -> float:
    """Return the accuracy of the label that is most frequent in the training items."""
    [(commonest, _)] = Counter(item.label for item in trained).most_common(1)
    return sum(item.label == commonest for item in items) / len(items)
