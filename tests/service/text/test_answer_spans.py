"""Answers in a context: the spans that the decoding of transformers picks, merged as its pipeline did."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as tf
from transformers.pipelines.document_question_answering import select_starts_ends

from polyhead.models.tokenizer import Encoding, Tokenizer
from polyhead.service.text.answer_spans import ScoredWindow, SpanAnswer, SpanOptions, find_answers
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
    for column, given in enumerate((start, end)):
        for row, logit in given.items():
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
