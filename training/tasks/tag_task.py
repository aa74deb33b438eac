"""The lesson of words with a label each.

It doesn't know what words are: they are what stands between blanks in an example.  A word is known by its first token
(Devlin et al. 2019), and only those tokens are learned from.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from torch import Tensor

from ..data.examples import Example
from .task import Embed, Figures, Packed
from .text_reader import Read, Reader


@dataclass(frozen=True)
class Sentence:
    """A text as it was read, and of each of its words that has a token: the first one, the word and its tag."""

    tokens: list[int]
    rows: list[int]
    words: list[str]
    tags: list[int]
    lost: int  # words without a token
    domain: str
    cut: bool


@dataclass(frozen=True)
class Tags:
    """Choices among all tags, one a word."""

    kind: Literal["tag"] = "tag"

    def items(self, examples: Sequence[Example[tuple[int, ...]]], read: Reader) -> list[Sentence]:
        texts = read([example.text for example in examples])
        return [sentence(example, text) for text, example in zip(texts, examples, strict=True)]

    def cut(self, items: Sequence[Sentence]) -> int:
        return sum(item.cut for item in items)

    def pack(self, items: Sequence[Sentence], read: Reader, learning: bool) -> Packed:  # noqa: ARG002 - read once
        starts = accumulate((len(item.tokens) for item in items), initial=0)
        rows = [start + row for start, item in zip(starts, items, strict=False) for row in item.rows]
        tokens, segments = [item.tokens for item in items], [[0] * len(item.tokens) for item in items]
        return Packed(tokens, segments, rows, [tag for item in items for tag in item.tags])

    def figures(self, items: Sequence[Sentence], scores: Tensor) -> Figures:
        """The share of words tagged rightly: of all ("accuracy"), of each domain; words without a token are not."""
        said = iter(scores.argmax(dim=-1).tolist())
        return shares(items, [[next(said) for _ in item.tags] for item in items])

    def baselines(self, learned: Sequence[Sentence], items: Sequence[Sentence], embed: Embed) -> Figures:  # noqa: ARG002
        """Always the commonest tag; the commonest of each word, and that of all words for one that was not learned."""
        seen: dict[str, Counter[int]] = defaultdict(Counter)
        for item in learned:
            for word, tag in zip(item.words, item.tags, strict=True):
                seen[word.lower()][tag] += 1
        [(overall, _)] = Counter(tag for item in learned for tag in item.tags).most_common(1)
        usual = {word: tags.most_common(1)[0][0] for word, tags in seen.items()}
        by_word = [[usual.get(word.lower(), overall) for word in item.words] for item in items]
        return {
            "majority": shares(items, [[overall] * len(item.words) for item in items])["accuracy"],
            "commonest tag of the word": shares(items, by_word)["accuracy"],
            "words not learned": sum(word.lower() not in usual for item in items for word in item.words)
            / sum(len(item.words) + item.lost for item in items),
        }


def sentence(example: Example[tuple[int, ...]], read: Read) -> Sentence:
    """The first token of a word is the one that begins where the word does."""
    begins = {start: row for row, (start, end) in reversed(list(enumerate(read.offsets))) if end > start}
    found = [
        (begins[start], word, tag)
        for (start, word), tag in zip(words(example.text), example.label, strict=True)
        if start in begins
    ]
    return Sentence(
        tokens=read.tokens,
        rows=[row for row, _, _ in found],
        words=[word for _, word, _ in found],
        tags=[tag for _, _, tag in found],
        lost=len(example.label) - len(found),
        domain=example.domain,
        cut=read.cut,
    )


def words(text: str) -> Iterator[tuple[int, str]]:
    """Every word and where it begins."""
    start = 0
    for word in text.split(" "):
        yield start, word
        start += len(word) + 1


def shares(items: Sequence[Sentence], said: Sequence[Sequence[int]]) -> Figures:
    right: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for item, tags in zip(items, said, strict=True):
        right[item.domain] += sum(one == other for one, other in zip(item.tags, tags, strict=True))
        count[item.domain] += len(item.tags) + item.lost
    domains = {domain: right[domain] / count[domain] for domain in sorted(count)}
    return {"accuracy": right.total() / count.total(), **domains}
