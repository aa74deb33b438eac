"""Spans of words for given labels: choosing them equals a comparison of all pairs."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from polyhead.models.core.label_prompt import LabelPrompt
from polyhead.service.core.errors import AnswerTooLarge
from polyhead.service.text import label_spans
from polyhead.service.text.label_spans import (
    Span,
    SpanSearch,
    choose_spans,
    find_label_spans,
    join_words,
    list_spans,
    name_spans,
    split_words,
)


def conflict(one: Span, other: Span, search: SpanSearch) -> bool:
    """Whether two spans may not both be taken, by the definition."""
    if (one.first, one.last) == (other.first, other.last):
        return not search.is_multiple
    apart = one.first > other.last or other.first > one.last
    inside = (one.first <= other.first and one.last >= other.last) or (
        other.first <= one.first and other.last >= one.last
    )
    return not apart and not (search.is_nested and inside)


def choose_by_pairs(found: Sequence[Span], search: SpanSearch) -> list[Span]:
    taken: list[Span] = []
    for span in sorted(found, key=lambda each: -each.score):
        if not any(conflict(span, other, search) for other in taken):
            taken.append(span)
    return sorted(taken, key=lambda each: each.first)


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("is_multiple", [False, True])
def test_chosen_spans_equal_those_of_all_pairs(is_nested: bool, is_multiple: bool) -> None:
    search, numbers = SpanSearch(is_nested=is_nested, is_multiple=is_multiple), random.Random(7)
    for _ in range(60):
        words = numbers.randint(1, 14)
        found = []
        for _ in range(numbers.randint(0, 60)):
            first = numbers.randrange(words)
            last = numbers.randrange(first, words)
            found.append(Span(first, last, numbers.randrange(3), numbers.randint(1, 9) / 10))  # with equal scores
        assert choose_spans(found, search, words) == choose_by_pairs(found, search)


def test_spans_beyond_the_last_word_are_none() -> None:
    scores = np.full((3, 2, 1), 0.9, np.float32)
    found = list_spans(scores, 0.5, "inputs")
    assert [(each.first, each.last) for each in found] == [(0, 0), (0, 1), (1, 1), (1, 2), (2, 2)]
    assert list_spans(scores, 0.9, "inputs") == [], "equal to the threshold is not above it"


def test_joined_words_equal_those_of_all_pairs() -> None:
    numbers = np.random.RandomState(3)
    for _ in range(40):
        words, labels = numbers.randint(1, 9), numbers.randint(1, 4)
        scores = numbers.rand(words, labels, 3).astype(np.float32)
        wanted = []
        for first in range(words):
            for label in range(labels):
                for last in range(first, words):
                    insides = scores[first : last + 1, label, 2]
                    start, end = scores[first, label, 0], scores[last, label, 1]
                    if start > 0.4 and end > 0.4 and all(float(each) >= 0.4 for each in insides):
                        wanted.append(Span(first, last, label, float(min(*insides, start, end))))
        assert list(join_words(scores, 0.4, "inputs")) == wanted


@pytest.mark.parametrize("width", [0, 4])
def test_too_many_candidates_are_refused(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(label_spans, "MAX_CANDIDATES", 10)
    prompt = LabelPrompt("<<ENT>>", "<<SEP>>", 1, max_words=8, max_width=width)
    scores = np.full((8, prompt.columns * 2), 0.9, np.float32)
    with pytest.raises(AnswerTooLarge, match=r"^inputs: more than 10 spans are above the threshold; ask for a higher"):
        find_label_spans(prompt, SpanSearch(), ("a", "b"), scores, "inputs")
    assert find_label_spans(prompt, SpanSearch(threshold=0.95), ("a", "b"), scores, "inputs") == []


@pytest.mark.parametrize("ends", [0.1, 0.9])
def test_no_start_is_followed_in_vain(monkeypatch: pytest.MonkeyPatch, ends: float) -> None:
    """20,000 words begin a span of some label: none is followed where no end is in reach, or too many are."""
    scores = np.full((200, 100, 3), 0.9, np.float32)
    scores[:, :, 1] = ends
    searches, real = list[int](), np.nonzero

    def counted(table: np.ndarray) -> tuple[np.ndarray, ...]:
        searches.append(1)
        return real(table)

    monkeypatch.setattr(np, "nonzero", counted)
    if ends < 0.5:
        assert not list(join_words(scores, 0.5, "inputs"))
    else:
        with pytest.raises(AnswerTooLarge):
            next(join_words(scores, 0.5, "inputs"))
    assert len(searches) == 1


def test_words_and_names() -> None:
    text = "Größe_x, New-York- 日本 5.2"
    words = split_words(text)
    assert [text[start:end] for start, end in words] == ["Größe_x", ",", "New-York", "-", "日本", "5", ".", "2"]
    [entity] = name_spans(text, words, ("place",), [Span(2, 4, 0, 0.5)])
    assert (entity.word, entity.start, entity.end, entity.label) == ("New-York- 日本", 9, 21, "place")
