"""The task of extracting an answer from a text: where it begins and ends (Devlin et al. 2019, section 4.2).

Question and text are read together, and the tokens of the text are scored as the beginning and as the end.  The first
token stands for an answer that is beyond the truncated text.  The figures are SQuAD's exact match and F1 (Rajpurkar et
al. 2016).
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

MAX_ANSWER_TOKENS = 30  # tokens of an answer, at most
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
REMOVE_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class SpanItem:
    """An encoded question and text.

    `rows` are the first token and those of the text; `targets` are the indexes in `rows` of the answer's first and last
    token.
    """

    encoded: EncodedText
    rows: list[int]
    targets: tuple[int, int]
    text: str
    answer: str
    kind: str

    def answer_text(self, first: int, last: int) -> str:
        """Return the text between two of the rows."""
        return self.text[self.encoded.offsets[self.rows[first]][0] : self.encoded.offsets[self.rows[last]][1]]


@dataclass(frozen=True)
class SpanTask:
    """Extraction of an answer: two choices per question, its beginning and its end."""

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
        """Return exact match ("exact"), of all questions and of each kind, and the mean F1 of words ("F1")."""
        pairs = scores.reshape(len(items), 2, -1)
        return squad_figures(
            items, [item.answer_text(*best_span(*pair)) for item, pair in zip(items, pairs, strict=True)]
        )

    def baselines(self, trained: Sequence[SpanItem], items: Sequence[SpanItem], embed: EmbedTexts) -> Figures:  # noqa: ARG002
        """Return the figures of the most frequent place of answers to questions of the kind, and of the whole text."""
        places: dict[str, Counter[tuple[int, int]]] = {item.kind: Counter() for item in [*items, *trained]}
        for item in trained:
            places[item.kind][item.targets] += 1
        usual = {kind: counts.most_common(1)[0][0] if counts else (1, 1) for kind, counts in places.items()}
        ends = [[min(place, len(item.rows) - 1) for place in usual[item.kind]] for item in items]
        at_usual_place = squad_figures(
            items, [item.answer_text(*places) for item, places in zip(items, ends, strict=True)]
        )
        return {
            "usual place exact": at_usual_place["exact"],
            "usual place F1": at_usual_place["F1"],
            "whole text F1": squad_figures(items, [item.text for item in items])["F1"],
        }


def build_item(example: Example[tuple[int, int]], read: EncodedText) -> SpanItem:
    """Build an item.  Raises RecipeError if the encoding does not separate text and question."""
    rows = [row for row, (start, end) in enumerate(read.offsets) if read.segments[row] == 1 and end > start]
    if not rows:
        shown = f"{example.text[0][:60]!r}"
        raise RecipeError(
            f"trunk, data.most_tokens: no token of the second text is read, or segments do not mark them: {shown}"
        )
    begins, ends = example.label
    found = [at for at, row in enumerate(rows, 1) if read.offsets[row][1] > begins and read.offsets[row][0] < ends]
    is_complete = bool(found) and read.offsets[rows[-1]][1] >= ends
    return SpanItem(
        encoded=read,
        rows=[0, *rows],
        targets=(found[0], found[-1]) if is_complete else (0, 0),
        text=example.text[1],
        answer=example.text[1][begins:ends],
        kind=example.domain,
    )


def best_span(begins: Tensor, ends: Tensor) -> tuple[int, int]:
    """Return the best span [first, last] of at most MAX_ANSWER_TOKENS tokens, from scores [L] of each end.  Index 0 is
    never chosen.
    """
    both = begins[1:, None] + ends[None, 1:]
    allowed = torch.ones_like(both, dtype=torch.bool).triu().tril(MAX_ANSWER_TOKENS - 1)
    first, last = divmod(int(both.masked_fill(~allowed, -torch.inf).argmax()), len(both))
    return first + 1, last + 1


def squad_figures(items: Sequence[SpanItem], answers: Sequence[str]) -> Figures:
    exact: Counter[str] = Counter()
    count = Counter(item.kind for item in items)
    overlap = 0.0
    for item, answer in zip(items, answers, strict=True):
        predicted, expected = answer_words(answer), answer_words(item.answer)
        exact[item.kind] += predicted == expected
        overlap += f1(predicted, expected)
    kinds = {kind: exact[kind] / count[kind] for kind in sorted(count)}
    return {"exact": exact.total() / len(items), "F1": overlap / len(items), **kinds}


def answer_words(text: str) -> list[str]:
    """Return the text's words, without case, punctuation and articles."""
    return ARTICLES.sub(" ", text.lower().translate(REMOVE_PUNCTUATION)).split()


def f1(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Return the F1 score of two bags of words."""
    common = (Counter(predicted) & Counter(expected)).total()
    return 2 * common / (len(predicted) + len(expected)) if common else float(list(predicted) == list(expected))
