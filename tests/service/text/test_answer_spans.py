"""Answers in a context: the spans that the decoding of transformers picks, merged as its pipeline did."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.pipelines.document_question_answering import select_starts_ends

from polyhead.models.tokenizer import Encoding, Tokenizer
from polyhead.service.core.errors import AnswerTooLarge
from polyhead.service.text import answer_spans
from polyhead.service.text.answer_spans import (
    ScoredWindow,
    SpanAnswer,
    SpanOptions,
    best_spans,
    find_answers,
    find_ranges,
    window_maxima,
)
from tests.service.engine.test_head_outputs import answered, read, worker
from tests.support import checkpoints

QUESTION = "What is the capital of France?"
CONTEXT = (
    "Größere naïve cafés: Paris, of course.  A quick brown fox 日本語 jumps over the lazy dog; PARIS, of course! " * 2
)
EPSILON = 1e-7  # spans are not ordered by smaller differences


class Case:
    """A network and its tokenizer, and their answers with transformers and with ours."""

    def __init__(self, folder: Path, kind: Any) -> None:
        self.fast = tf.PreTrainedTokenizerFast.from_pretrained(folder)
        self.reader, self.tokenizer = worker(folder), Tokenizer.from_folder(folder)

    def windows(self, longest: int, stride: int) -> tuple[list[ScoredWindow], list[Any]]:
        """Return the windows of the question and its context: ours, and the library's encodings."""
        cut = self.fast(
            QUESTION,
            CONTEXT,
            truncation="only_second",
            max_length=longest,
            stride=stride,
            return_overflowing_tokens=True,
        ).encodings
        encodings = [Encoding(each) for each in cut]
        events = answered(self.reader, *(read(each.ids, segments=segments(each)) for each in encodings))
        tables = [np.asarray(event.scores) for event in events]
        return [ScoredWindow(*each) for each in zip(encodings, tables, strict=True)], cut


def segments(encoding: Encoding) -> tuple[int, ...]:
    return tuple(encoding.segments) if any(encoding.segments) else ()


def expected(asking: SpanOptions, windows: Sequence[ScoredWindow], encodings: Sequence[Any]) -> list[SpanAnswer]:
    """The question-answering pipeline of transformers, whose span decoding is still part of the library."""
    none, found = 1_000_000.0, list[dict[str, Any]]()
    for window, encoding in zip(windows, encodings, strict=True):
        hidden = np.array([[text != 1 for text in encoding.sequence_ids]])
        hidden[0, 0] = False
        start, end = (window.scores[None, :, column].copy() for column in (0, 1))
        count = asking.top_k * 2 + 10 if asking.whole_words else asking.top_k
        starts, ends, scores, none = select_starts_ends(
            start, end, hidden, np.ones_like(hidden, int), none, count, asking.allows_no_answer, asking.max_tokens
        )
        for first, last, score in zip(starts, ends, scores, strict=True):
            begins, finishes = encoding.offsets[first][0], encoding.offsets[last][1]
            if asking.whole_words and score > 0:
                begins = encoding.word_to_chars(encoding.token_to_word(first), sequence_index=1)[0]
                finishes = encoding.word_to_chars(encoding.token_to_word(last), sequence_index=1)[1]
            text = CONTEXT[begins:finishes]
            known = next((each for each in found if each["text"].lower() == text.lower()), None)
            if known is None:
                found.append({"text": text, "score": float(score), "start": begins, "end": finishes})
            else:
                known["score"] += float(score)
    if asking.allows_no_answer:
        found.append({"text": "", "score": none, "start": 0, "end": 0})
    ranked = sorted(found, key=lambda each: each["score"], reverse=True)
    return [SpanAnswer(**each) for each in ranked[: asking.top_k]]


@pytest.fixture(scope="module", params=[tf.BertForQuestionAnswering, tf.RobertaForQuestionAnswering])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(checkpoints.encoder(tmp_path_factory.mktemp("reader"), request.param), request.param)


@pytest.mark.parametrize("size", [(250, 20), (40, 10)], ids=["whole", "windows"])
@pytest.mark.parametrize("impossible", [False, True], ids=["always", "impossible"])
@pytest.mark.parametrize("whole_words", [False, True], ids=["tokens", "words"])
@pytest.mark.parametrize("top_k", [1, 4, 12])
@pytest.mark.parametrize("most_tokens", [1, 4, 15])
def test_as_the_pipeline_does(
    case: Case, size: tuple[int, int], impossible: bool, whole_words: bool, top_k: int, most_tokens: int
) -> None:
    asking = SpanOptions(top_k=top_k, max_tokens=most_tokens, allows_no_answer=impossible, whole_words=whole_words)
    windows, encodings = case.windows(*size)
    assert (len(windows) > 2) is (size[0] == 40)
    found, wanted = find_answers(asking, CONTEXT, windows), expected(asking, windows, encodings)
    wanted = [answer for answer in wanted if answer.score > EPSILON or not answer.end]
    assert wanted
    for ours, theirs in zip(found, wanted, strict=False):
        assert ours.score == pytest.approx(theirs.score, abs=1e-6)
        assert ours.text == CONTEXT[ours.start : ours.end]
        if theirs.score > EPSILON:
            assert (ours.text, ours.start, ours.end) == (theirs.text, theirs.start, theirs.end)
    assert len(found) >= min(len(wanted), top_k)


@pytest.fixture(scope="module")
def lazy(tmp_path_factory: pytest.TempPathFactory) -> Encoding:
    """[CLS] fox [SEP] dog fox ##e Dog [SEP]"""
    folder = tmp_path_factory.mktemp("words")
    checkpoints.word_piece().save_pretrained(folder)
    [encoding] = Tokenizer.from_folder(folder).encode_batch([("fox", "dog foxe Dog")])
    assert encoding.pieces == ["[CLS]", "fox", "[SEP]", "dog", "fox", "##e", "dog", "[SEP]"]
    return encoding


def window(encoding: Encoding, start: dict[int, float], end: dict[int, float]) -> ScoredWindow:
    """Logits that are high in these rows and low in the others."""
    scores = np.full((len(encoding), 2), -50, np.float32)
    for column, high in enumerate((start, end)):
        for row, logit in high.items():
            scores[row, column] = logit
    return ScoredWindow(encoding, scores)


def test_the_question_and_special_tokens_are_no_answer(lazy: Encoding) -> None:
    one = window(lazy, {0: 60, 1: 50, 2: 50, 7: 50, 3: 1}, {1: 50, 2: 50, 7: 50, 3: 1})
    assert [answer.text for answer in find_answers(SpanOptions(top_k=1), "dog foxe Dog", [one])] == ["dog"]


def test_the_score_of_no_answer_is_that_of_the_least_likely_window(lazy: Encoding) -> None:
    sure, unsure = ({0: logit, 3: 1.0} for logit in (4.0, 1.0))
    windows = [window(lazy, unsure, unsure), window(lazy, sure, sure)]
    [first, *_] = find_answers(SpanOptions(allows_no_answer=True), "dog foxe Dog", windows[1:])
    assert (first.text, first.start, first.end) == ("", 0, 0)
    assert first.score == pytest.approx((1 / (1 + np.exp(-3))) ** 2, abs=1e-5)
    none = next(
        a for a in find_answers(SpanOptions(top_k=9, allows_no_answer=True), "dog foxe Dog", windows) if not a.text
    )
    assert none.score == pytest.approx(0.25, abs=1e-5)
    assert all(answer.text for answer in find_answers(SpanOptions(top_k=9), "dog foxe Dog", windows))


def test_equal_answers_add_up_and_keep_the_first_place(lazy: Encoding) -> None:
    one = window(lazy, {3: 1, 6: 0.5}, {3: 1, 6: 0.5})
    [answer] = find_answers(SpanOptions(max_tokens=1), "dog foxe Dog", [one])
    p = 1 / (1 + np.exp(-0.5))
    assert answer == SpanAnswer("dog", pytest.approx(p**2 + (1 - p) ** 2, abs=1e-5), 0, 3)


def test_spans_are_extended_to_words_on_request(lazy: Encoding) -> None:
    one = window(lazy, {5: 1}, {5: 1})
    assert find_answers(SpanOptions(), "dog foxe Dog", [one])[0].text == "foxe"
    assert find_answers(SpanOptions(whole_words=False), "dog foxe Dog", [one])[0].text == "e"


def test_no_span_is_too_long_or_runs_backwards(lazy: Encoding) -> None:
    one = window(lazy, {6: 9, 3: 5}, {6: 1, 3: 5, 4: 4})
    every = find_answers(SpanOptions(top_k=100, max_tokens=2, whole_words=False), "dog foxe Dog", [one])
    assert {answer.text for answer in every} <= {"dog", "dog fox", "fox", "foxe", "e", "e Dog", "Dog"}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=25),
    st.integers(1, 60),
    st.integers(1, 30),
)
def test_the_best_spans_are_those_of_all_spans(logits: list[tuple[int, int]], count: int, most: int) -> None:
    """Many are equally probable: the earlier ones come first."""
    start, end = (np.array(column, np.float32) / 4 for column in zip(*logits, strict=True))
    every = [
        (first, last, float(start[first] * end[last]))
        for first in range(1, len(start))
        for last in range(first, min(first + most, len(start)))
        if start[first] * end[last] > 0
    ]
    every.sort(key=lambda span: -span[2])
    assert list(best_spans(start, end, count, most)) == every[:count]


def test_few_first_tokens_are_looked_at_for_few_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4,096 tokens with 1,000 spans each, four million, those of twelve tokens are compared."""
    compared, largest = list[int](), answer_spans.largest_indices

    def counted(values: Any, count: int) -> Any:
        compared.append(len(values))
        return largest(values, count)

    monkeypatch.setattr(answer_spans, "largest_indices", counted)
    random = np.random.default_rng(0)
    start, end = (random.random(4096).astype(np.float32) for _ in range(2))
    assert len(list(best_spans(start, end, 12, 1000))) == 12
    assert compared == [12 * 1000]


@pytest.mark.parametrize("size", range(1, 10))
def test_the_maxima_of_neighbours(size: int) -> None:
    values = np.random.default_rng(size).random(20).astype(np.float32)
    expected = [max(values[place : place + size]) for place in range(20 - size + 1)]
    assert window_maxima(values, size).tolist() == pytest.approx(expected)


class CountedEncoding:
    """200 tokens of a context, two for each word; counts how often one of its lists is read."""

    reads = 0

    def __init__(self, count: int = 200) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getattr__(self, name: str) -> list[Any]:
        CountedEncoding.reads += self._count
        inner = self._count - 2
        return {
            "texts": [None, *[1] * inner, None],
            "words": [None, *[row // 2 for row in range(inner)], None],
            "special": [True, *[False] * inner, True],
            "offsets": [(0, 0), *[(3 * row, 3 * row + 3) for row in range(inner)], (0, 0)],
        }[name]


def wide_window(seed: int) -> ScoredWindow:
    scores = np.random.default_rng(seed).standard_normal((200, 2)).astype(np.float32)
    return ScoredWindow(CountedEncoding(), scores)  # type: ignore[arg-type]


def test_the_words_of_a_window_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in all its tokens for each of 2,010 spans. A text that is found in several windows is hashed once."""
    hashed, real = list[str](), answer_spans.hash_text

    def counted(text: str) -> bytes:
        hashed.append(text)
        return real(text)

    monkeypatch.setattr(answer_spans, "hash_text", counted)
    context = "".join(f"{number:x} " for number in range(1000))[:594]
    options, words = SpanOptions(top_k=1000, max_tokens=1000), answer_spans.word_ends
    searched = list[int]()
    monkeypatch.setattr(answer_spans, "word_ends", lambda encoding: searched.append(1) or words(encoding))  # type: ignore[func-returns-value]
    windows = [wide_window(seed) for seed in (1, 1, 1, 2)]
    found = find_answers(options, context, windows)
    assert len(found) == 1000
    assert len(searched) == 4
    assert len(hashed) == len(set(hashed)) <= 99 * 100 // 2, "of 99 words"


def test_the_search_ends_between_windows_if_nobody_waits() -> None:
    checks = list[int]()

    def check() -> None:
        checks.append(1)
        if len(checks) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        find_ranges(SpanOptions(), "a" * 600, (wide_window(seed) for seed in range(100)), check)


def test_long_spans_are_bounded_by_their_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their texts are not kept, but each is read."""
    monkeypatch.setattr(answer_spans, "MAX_SPAN_CHARACTERS", 10_000)
    with pytest.raises(AnswerTooLarge, match=r"^parameters.top_k: the spans .* more than 10000 characters") as caught:
        find_answers(SpanOptions(top_k=1000, max_tokens=1000), "ab " * 200, [wide_window(0)])
    assert caught.value.param == "parameters.top_k"
    assert find_answers(SpanOptions(top_k=1000, max_tokens=1), "ab " * 200, [wide_window(0)] * 9)
