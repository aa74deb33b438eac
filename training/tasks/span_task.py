"""The lesson of answers that stand in a text: where one begins, and where it ends (Devlin et al. 2019, section 4.2).

It doesn't know what is asked.  A question and its text are read together; the tokens of the text are compared as a
beginning, and again as an end.  The first token of all stands for what is not there: an answer behind what is read.
Figures are SQuAD's (Rajpurkar et al. 2016): what is said, in the same words or in some of them.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from ..data.examples import Example
from ..loop.errors import RecipeError
from .task import EmbedTexts, Figures, TaskBatch
from .text_reader import EncodedText, TextReader

MAX_ANSWER_TOKENS = 30  # tokens of an answer
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
REMOVE_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class SpanItem:
    """A question and a text as they were read; `rows` are the first token and those of the text, `right` the two of
    them between which the answer stands."""

    encoded: EncodedText
    rows: list[int]
    targets: tuple[int, int]
    text: str
    answer: str
    kind: str

    def answer_text(self, first: int, last: int) -> str:
        """What stands in the text between two of its rows."""
        return self.text[self.encoded.offsets[self.rows[first]][0] : self.encoded.offsets[self.rows[last]][1]]


@dataclass(frozen=True)
class SpanTask:
    """Two choices a question: where its answer begins and where it ends."""

    kind: Literal["span"] = "span"

    def items(self, examples: Sequence[Example[tuple[int, int]]], read: TextReader) -> list[SpanItem]:
        texts = read([example.text for example in examples])
        return [build_item(example, text) for text, example in zip(texts, examples, strict=True)]

    def truncated_count(self, items: Sequence[SpanItem]) -> int:
        return sum(item.encoded.is_truncated for item in items)

    def pack(self, items: Sequence[SpanItem], read: TextReader, learning: bool) -> TaskBatch:  # noqa: ARG002 - read once
        starts = accumulate((len(item.encoded.tokens) for item in items), initial=0)
        widest = max(len(item.rows) for item in items)
        scores = [
            [2 * (start + row) + side for row in item.rows] + [-1] * (widest - len(item.rows))
            for start, item in zip(starts, items, strict=False)
            for side in (0, 1)
        ]
        return TaskBatch(
            [item.encoded.tokens for item in items],
            [item.encoded.segments for item in items],
            [score for some in scores for score in some],
            [place for item in items for place in item.targets],
            rows_are_scores=True,
        )

    def figures(self, items: Sequence[SpanItem], scores: Tensor) -> Figures:
        """The share of questions answered in the right words ("exact"), of all and of each kind; the mean overlap in
        words ("F1")."""
        pairs = scores.reshape(len(items), 2, -1)
        return squad_figures(
            items, [item.answer_text(*best_span(*pair)) for item, pair in zip(items, pairs, strict=True)]
        )

    def baselines(self, learned: Sequence[SpanItem], items: Sequence[SpanItem], embed: EmbedTexts) -> Figures:  # noqa: ARG002
        """What stands where answers to questions of the kind stand most often; the whole of the text."""
        places: dict[str, Counter[tuple[int, int]]] = {item.kind: Counter() for item in [*items, *learned]}
        for item in learned:
            places[item.kind][item.targets] += 1
        usual = {kind: counts.most_common(1)[0][0] if counts else (1, 1) for kind, counts in places.items()}
        ends = [[min(place, len(item.rows) - 1) for place in usual[item.kind]] for item in items]
        there = squad_figures(items, [item.answer_text(*places) for item, places in zip(items, ends, strict=True)])
        return {
            "usual place exact": there["exact"],
            "usual place F1": there["F1"],
            "whole text F1": squad_figures(items, [item.text for item in items])["F1"],
        }


def build_item(example: Example[tuple[int, int]], read: EncodedText) -> SpanItem:
    """RecipeError if nothing tells the tokens of the text from those of the question."""
    rows = [row for row, (start, end) in enumerate(read.offsets) if read.segments[row] == 1 and end > start]
    if not rows:
        shown = f"{example.text[0][:60]!r}"
        raise RecipeError(f"trunk, data.most_tokens: no token of the second text is read, or none is marked: {shown}")
    begins, ends = example.label
    found = [at for at, row in enumerate(rows, 1) if read.offsets[row][1] > begins and read.offsets[row][0] < ends]
    whole = bool(found) and read.offsets[rows[-1]][1] >= ends
    return SpanItem(
        encoded=read,
        rows=[0, *rows],
        targets=(found[0], found[-1]) if whole else (0, 0),
        text=example.text[1],
        answer=example.text[1][begins:ends],
        kind=example.domain,
    )


def best_span(begins: Tensor, ends: Tensor) -> tuple[int, int]:
    """The likeliest place [first, last] of at most LONGEST tokens, of [L] scores each; the first of them is none."""
    both = begins[1:, None] + ends[None, 1:]
    allowed = torch.ones_like(both, dtype=torch.bool).triu().tril(MAX_ANSWER_TOKENS - 1)
    first, last = divmod(int(both.masked_fill(~allowed, -torch.inf).argmax()), len(both))
    return first + 1, last + 1


def squad_figures(items: Sequence[SpanItem], said: Sequence[str]) -> Figures:
    exact: Counter[str] = Counter()
    count = Counter(item.kind for item in items)
    overlap = 0.0
    for item, answer in zip(items, said, strict=True):
        ours, theirs = answer_words(answer), answer_words(item.answer)
        exact[item.kind] += ours == theirs
        overlap += f1(ours, theirs)
    kinds = {kind: exact[kind] / count[kind] for kind in sorted(count)}
    return {"exact": exact.total() / len(items), "F1": overlap / len(items), **kinds}


def answer_words(text: str) -> list[str]:
    """Its words, without case, punctuation and articles."""
    return ARTICLES.sub(" ", text.lower().translate(REMOVE_PUNCTUATION)).split()


def f1(said: Sequence[str], right: Sequence[str]) -> float:
    """The harmonic mean of precision and recall, of words."""
    common = (Counter(said) & Counter(right)).total()
    return 2 * common / (len(said) + len(right)) if common else float(list(said) == list(right))
