"""The task of labelling each word of a sentence.  Words are separated by blanks.

A word's tag is predicted at its first token, and only those tokens are trained (Devlin et al. 2019).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from torch import Tensor

from ..data.examples import Example
from .task import EmbedTexts, Figures, TaskBatch
from .text_reader import EncodedText, TextReader


@dataclass(frozen=True)
class TagItem:
    """An encoded sentence.  `rows`, `words` and `tags` are of its words with a token: the first token, the word, the
    tag.
    """

    tokens: list[int]
    rows: list[int]
    words: list[str]
    tags: list[int]
    skipped_words: int  # words without a token
    domain: str
    is_truncated: bool


@dataclass(frozen=True)
class TagTask:
    """Classification of words into tags."""

    kind: Literal["tag"] = "tag"

    def items(self, examples: Sequence[Example[tuple[int, ...]]], read: TextReader) -> list[TagItem]:
        texts = read([example.text for example in examples])
        return [build_item(example, text) for text, example in zip(texts, examples, strict=True)]

    def truncated_count(self, items: Sequence[TagItem]) -> int:
        return sum(item.is_truncated for item in items)

    def pack(self, items: Sequence[TagItem], read: TextReader, learning: bool) -> TaskBatch:  # noqa: ARG002 - read once
        starts = accumulate((len(item.tokens) for item in items), initial=0)
        rows = [start + row for start, item in zip(starts, items, strict=False) for row in item.rows]
        tokens, segments = [item.tokens for item in items], [[0] * len(item.tokens) for item in items]
        return TaskBatch(tokens, segments, rows, [tag for item in items for tag in item.tags])

    def figures(self, items: Sequence[TagItem], scores: Tensor) -> Figures:
        """Return accuracy over words, of all and of each domain; a word without a token counts as wrong."""
        predicted = iter(scores.argmax(dim=-1).tolist())
        return tag_accuracies(items, [[next(predicted) for _ in item.tags] for item in items])

    def baselines(self, trained: Sequence[TagItem], items: Sequence[TagItem], embed: EmbedTexts) -> Figures:  # noqa: ARG002
        """Return the accuracy of the most frequent tag, and of each word's most frequent tag in training."""
        seen: dict[str, Counter[int]] = defaultdict(Counter)
        for item in trained:
            for word, tag in zip(item.words, item.tags, strict=True):
                seen[word.lower()][tag] += 1
        [(overall, _)] = Counter(tag for item in trained for tag in item.tags).most_common(1)
        usual = {word: tags.most_common(1)[0][0] for word, tags in seen.items()}
        by_word = [[usual.get(word.lower(), overall) for word in item.words] for item in items]
        return {
            "majority": tag_accuracies(items, [[overall] * len(item.words) for item in items])["accuracy"],
            "commonest tag of the word": tag_accuracies(items, by_word)["accuracy"],
            "words not learned": sum(word.lower() not in usual for item in items for word in item.words)
            / sum(len(item.words) + item.skipped_words for item in items),
        }


def build_item(example: Example[tuple[int, ...]], read: EncodedText) -> TagItem:
    """Build an item.  The first token of a word is the one that begins where the word does."""
    begins = {start: row for row, (start, end) in reversed(list(enumerate(read.offsets))) if end > start}
    found = [
        (begins[start], word, tag)
        for (start, word), tag in zip(split_words(example.text), example.label, strict=True)
        if start in begins
    ]
    return TagItem(
        tokens=read.tokens,
        rows=[row for row, _, _ in found],
        words=[word for _, word, _ in found],
        tags=[tag for _, _, tag in found],
        skipped_words=len(example.label) - len(found),
        domain=example.domain,
        is_truncated=read.is_truncated,
    )


def split_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield the start and the text of every word."""
    start = 0
    for word in text.split(" "):
        yield start, word
        start += len(word) + 1


def tag_accuracies(items: Sequence[TagItem], predicted: Sequence[Sequence[int]]) -> Figures:
    correct: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for item, tags in zip(items, predicted, strict=True):
        correct[item.domain] += sum(one == other for one, other in zip(item.tags, tags, strict=True))
        count[item.domain] += len(item.tags) + item.skipped_words
    domains = {domain: correct[domain] / count[domain] for domain in sorted(count)}
    return {"accuracy": correct.total() / count.total(), **domains}
