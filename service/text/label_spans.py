"""Spans of words for labels of the request, chosen from their probabilities as GLiNER does (Zaratiana et al. 2024,
arXiv:2311.08526).

A span is (label, first word, last word). The most probable span is taken first, and then each that may stand beside
those that are taken.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyhead.models.core.label_prompt import LabelPrompt

from ..core.errors import AnswerTooLarge
from .entities import Entity

WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")
MAX_CANDIDATES = 1 << 16  # spans above the threshold, of one text

ScoreTable = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSearch:
    """A span needs a probability above `threshold`. With `is_nested` a span may lie in another one, with `is_multiple`
    it may have several labels. Otherwise spans do not overlap.
    """

    threshold: float = 0.5
    is_nested: bool = False
    is_multiple: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """Words from `first` to `last`, and the number of a label."""

    first: int
    last: int
    label: int
    score: float


def split_words(text: str) -> list[tuple[int, int]]:
    """The words of a text as ranges of code points: letters and digits, joined by hyphens, or one other character."""
    return [match.span() for match in WORD.finditer(text)]


def find_label_spans(
    prompt: LabelPrompt, search: SpanSearch, labels: Sequence[str], scores: ScoreTable, field: str
) -> list[Span]:
    """The spans in the order of the text. `scores` [N, K * C] are the probabilities of N words' spans of 1 to K words
    for C labels; without a widest span [N, C * 3], of words as the start, the end and the inside of a span. Raises
    AnswerTooLarge for more than MAX_CANDIDATES above the threshold; `field` is the text's name.
    """
    if prompt.max_width:
        found = list_spans(scores.reshape(len(scores), prompt.max_width, len(labels)), search.threshold, field)
    else:
        found = list(join_words(scores.reshape(len(scores), len(labels), 3), search.threshold, field))
    return choose_spans(found, search, len(scores))


def list_spans(scores: ScoreTable, threshold: float, field: str) -> list[Span]:
    """The spans above the threshold, by first word, length and label, from [N, K, C] probabilities."""
    count, widths, _ = scores.shape
    inside = np.arange(count)[:, None] + np.arange(widths) < count  # [N, K]
    firsts, sizes, labels = np.nonzero((scores > np.float32(threshold)) & inside[:, :, None])
    check_candidates(len(firsts), field)
    chosen = scores[firsts, sizes, labels]
    rows = zip(firsts.tolist(), sizes.tolist(), labels.tolist(), chosen.tolist(), strict=True)
    return [Span(first, first + size, label, score) for first, size, label, score in rows]


def join_words(scores: ScoreTable, threshold: float, field: str) -> Iterator[Span]:
    """The spans from [N, C, 3] probabilities: the first word is a start, the last one an end, and all are inside. The
    score is the least of all. By first word, label and last word.
    """
    least = np.float32(threshold)
    starts, ends = scores[:, :, 0] > least, scores[:, :, 1] > least
    outside = scores[:, :, 2].astype(np.float64) < threshold  # [N, C]
    count = len(scores)
    # [N, C] the next word that is outside, from each word on
    borders = np.where(outside, np.arange(count)[:, None], count)
    borders = np.minimum.accumulate(borders[::-1], axis=0)[::-1]
    # [N + 1, C] how many ends there are before a word
    ends_before = np.concatenate([np.zeros((1, ends.shape[1]), np.int64), np.cumsum(ends, axis=0)])
    reached = np.take_along_axis(ends_before, borders, axis=0) - ends_before[:-1]  # [N, C] of a span that starts here
    firsts, labels = np.nonzero(starts & (borders > np.arange(count)[:, None]) & (reached > 0))
    check_candidates(int(reached[firsts, labels].sum()), field)
    for first, label in zip(firsts.tolist(), labels.tolist(), strict=True):
        lasts = np.nonzero(ends[first : int(borders[first, label]), label])[0]
        insides = np.minimum.accumulate(scores[first : first + int(lasts[-1]) + 1, label, 2])
        found = np.minimum(np.minimum(insides[lasts], scores[first + lasts, label, 1]), scores[first, label, 0])
        for last, score in zip((first + lasts).tolist(), found.tolist(), strict=True):
            yield Span(first, last, label, score)


def check_candidates(count: int, field: str) -> None:
    if count > MAX_CANDIDATES:
        message = (
            f"{field}: more than {MAX_CANDIDATES} spans are above the threshold; ask for a higher "
            "parameters.threshold or fewer labels, or send a shorter text"
        )
        raise AnswerTooLarge(message, param="parameters.threshold")


def choose_spans(found: Sequence[Span], search: SpanSearch, words: int) -> list[Span]:
    """The most probable of `found` that may stand beside each other, in the order of the text of `words` words. Equal
    scores keep their order."""
    taken, chosen = TakenSpans(words, is_nested=search.is_nested), list[Span]()
    for span in sorted(found, key=lambda one: -one.score):
        if search.is_multiple if taken.has(span.first, span.last) else taken.allows(span.first, span.last):
            taken.add(span.first, span.last)
            chosen.append(span)
    return sorted(chosen, key=lambda one: one.first)


class TakenSpans:
    """Which spans of N words are taken. With `is_nested` two spans may not cross, otherwise they may not overlap."""

    def __init__(self, words: int, *, is_nested: bool) -> None:
        self._spans = set[tuple[int, int]]()
        self._is_nested = is_nested
        self._used = np.zeros(words, bool)
        # Of the spans that start at a word: the last word of the longest; of those that end there: the first word.
        self._farthest, self._earliest = np.arange(words), np.arange(words)

    def has(self, first: int, last: int) -> bool:
        return (first, last) in self._spans

    def allows(self, first: int, last: int) -> bool:
        """Whether a span may stand beside those that are taken."""
        if not self._is_nested:
            return not self._used[first : last + 1].any()
        # A crossing span starts inside and ends after this one, or starts before it and ends inside.
        return not ((self._farthest[first + 1 : last + 1] > last).any() or (self._earliest[first:last] < first).any())

    def add(self, first: int, last: int) -> None:
        self._spans.add((first, last))
        self._used[first : last + 1] = True
        self._farthest[first] = max(self._farthest[first], last)
        self._earliest[last] = min(self._earliest[last], first)


def name_spans(
    text: str, words: Sequence[tuple[int, int]], labels: Sequence[str], spans: Sequence[Span]
) -> list[Entity]:
    """The entities of spans of these `words`."""
    return [
        Entity(labels[span.label], span.score, text[start:end], start, end)
        for span in spans
        for start, end in [(words[span.first][0], words[span.last][1])]
    ]
