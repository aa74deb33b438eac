"""Prompts with questions: their tokens, the rows of options, the places of scores, errors."""

from pathlib import Path
from typing import Any

import pytest

from polyhead.models.core.decision_prompt import SCHEMA_TOKENS, LabelSchemaPrompt, OptionMarkPrompt
from polyhead.models.core.errors import EncodingError
from polyhead.service.core.errors import BadRequest, EmptyInput, TooLong
from polyhead.service.core.model import Model
from polyhead.service.core.request import DEFAULT_TERMS, Encode
from polyhead.service.text.decision_prompts import EncodedDecision, QuestionedText, QuestionText, read_decision
from tests.support import label_models
from tests.support.scripted import model

CHOICE = QuestionText("questions.animal", "choice", "which animal", (("fox", ""), ("dog", "a dog runs")))
TRUTH = QuestionText("questions.good", "noul", "a good film")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    label_models.tokenizer(*SCHEMA_TOKENS, *"0123:!").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def marks(folder: Path) -> Model:
    prompt = OptionMarkPrompt(1, 2, 4, question_tokens=130, temperatures=(2.0, 1.0, 0.5))
    return model(folder, "marks", "decide", decision_prompt=prompt, max_tokens=128)


@pytest.fixture(scope="module")
def schema(folder: Path) -> Model:
    return model(folder, "schema", "decide", decision_prompt=LabelSchemaPrompt(4.0), max_tokens=128)


def read(served: Model, *questions: QuestionText, text: str = "the fox", is_joint: bool = True) -> EncodedDecision:
    return read_decision(served, QuestionedText("state", text, questions, is_joint), "call", DEFAULT_TERMS)


def spell(served: Model, request: Encode) -> str:
    """The tokens as text, with `_` for the beginning of a word."""
    return "".join(map(served.tokenizer.piece, request.tokens)).replace("\u2581", "_")


def test_each_question_is_a_sequence_with_marks_before_options(marks: Model) -> None:
    found = read(marks, CHOICE, TRUTH)
    first, second = found.requests
    assert spell(marks, first) == (
        "[CLS]_choice_question:_which_animal[SEP][MASK]_fox[MASK]_dog:_a_dog_runs[SEP]_the_fox[SEP]"
    )
    assert spell(marks, second) == (
        "[CLS]_noul_question:_a_good_film[SEP][MASK]_false:_no,_the_statement_does_not_hold"
        "[MASK]_true:_yes,_the_statement_holds[SEP]_the_fox[SEP]"
    )
    assert (first.question, second.question, first.id) == ("choice", "noul", "call-0")
    for request in found.requests:
        assert [request.tokens[row] for row in request.label_rows] == [4, 4]
    assert found.read_logits([[1.0, 2.0], [3.0, 4.0]]) == [[0.5, 1.0], [6.0, 8.0]]


def test_levels_are_numbered_and_marks_are_not_spelled(marks: Model) -> None:
    levels = (("0", "bad"), ("good", ""), ("fox", "the dog"), ("3", ""))
    [request] = read(marks, QuestionText("q", "score", "how", levels), text="a [MASK] dog").requests
    assert spell(marks, request).endswith(
        "[MASK]_level_0:_bad[MASK]_level_1:_good[MASK]_level_2:_fox:_the_dog[MASK]_level_3:_3[SEP]_a___dog[SEP]"
    )
    assert request.tokens.count(4) == 4
    named = QuestionText("q", "noul", "how", ((" no ", ""), ("yes", "it is")))
    [request] = read(marks, named).requests
    assert "[MASK]_no:_no,_the_statement_does_not_hold[MASK]_yes:_it_is[SEP]" in spell(marks, request)


def test_scores_are_in_the_order_of_the_options_whatever_the_order_they_are_read_in(
    marks: Model, schema: Model
) -> None:
    levels = (("bad", ""), ("good", "the fox"), ("x", ""))
    turned = QuestionText("q", "score", "how", levels, order=(1, 2, 0))
    found = read(marks, turned)
    assert "[MASK]_level_1:_good:_the_fox[MASK]_level_2:_x[MASK]_level_0:_bad[SEP]" in spell(marks, found.requests[0])
    assert found.read_logits([[10.0, 20.0, 30.0]]) == [[30.0, 10.0, 20.0]]
    found = read(schema, TRUTH, turned)
    assert "([L]_good[L]_x[L]_bad_)" in spell(schema, found.requests[0])
    assert found.read_logits([[0.0, 4.0, 40.0, 80.0, 120.0]]) == [[0.0, 1.0], [30.0, 10.0, 20.0]]


def test_questions_have_a_sequence_each_or_one_together(schema: Model) -> None:
    score = QuestionText("q", "score", "how good", (("bad", ""), ("good", "")))
    first, second = (
        "_([P]_which_animal_[DESCRIPTION]_dog:_a_dog_runs_([L]_fox[L]_dog_)_)",
        "_([P]_how_good_([L]_bad[L]_good_)_)",
    )
    found = read(schema, CHOICE, score, text="The fox")
    [request] = found.requests
    assert spell(schema, request) == f"{first}[SEP_STRUCT]{second}[SEP_TEXT]_the_fox_."
    label = schema.tokenizer.token_id("[L]")
    assert [request.tokens[row] for row in request.label_rows] == [label] * 4
    assert found.read_logits([[4.0, 8.0, 12.0, 16.0]]) == [[1.0, 2.0], [3.0, 4.0]]
    found = read(schema, CHOICE, score, text="the fox!", is_joint=False)
    ending = "[SEP_TEXT]_the_fox!"  # a sentence that has an end gets no other
    assert [spell(schema, each) for each in found.requests] == [first + ending, second + ending]
    assert [each.id for each in found.requests] == ["call-0", "call-1"]
    assert found.read_logits([[4.0, 8.0], [12.0, 16.0]]) == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    ("question", "error", "words"),
    [
        ({"kind": "rank"}, BadRequest, "q: its kind should be one of choice, score, noul"),
        ({"instructions": " "}, EmptyInput, "q: has no instructions"),
        ({"options": ()}, BadRequest, "q: has no options"),
        ({"options": (("a", ""), (" ", ""))}, BadRequest, "q: an option has no name"),
        ({"options": (("a", ""), ("a ", "b"))}, BadRequest, "q: two options have the same name"),
        ({"order": (1,)}, BadRequest, "q: its order should have the index of each option once"),
        ({"kind": "noul"}, BadRequest, "q: a noul has two options, or none to have the default ones"),
    ],
)
def test_questions_are_checked(
    marks: Model, schema: Model, question: dict[str, Any], error: type[BadRequest], words: str
) -> None:
    known = {"field": "q", "kind": "choice", "instructions": "a", "options": (("a", ""),)} | question
    for served in (marks, schema):
        with pytest.raises(error) as caught:
            read(served, QuestionText(**known))
        assert (type(caught.value), caught.value.param, words in str(caught.value)) == (error, "q", True), caught.value


def test_nothing_is_cut_off(marks: Model, schema: Model) -> None:
    with pytest.raises(TooLong, match=r"state: has 112 tokens, beside 37 of questions.animal. This model's maximum"):
        read(marks, CHOICE, text=repeat(112))
    with pytest.raises(TooLong, match=r"state: has 112 tokens, beside 29 of questions.animal. This model's maximum"):
        read(schema, CHOICE, text=repeat(110))
    long = QuestionText("q", "choice", "a", ((repeat(49), ""), ("dog", "")))
    with pytest.raises(TooLong, match=r"q: option 'fox .*' has 49 tokens, at most 48 are read"):
        read(marks, long)
    many = QuestionText("q", "choice", "a", tuple((repeat(n), "") for n in range(1, 15)))
    with pytest.raises(TooLong, match=r"q: its 14 options have 119 tokens; 114 are read, or 8 of each"):
        read(marks, many)
    with pytest.raises(TooLong, match=r"q: its instructions have 142 tokens, beside its options 125 are read"):
        read(marks, QuestionText("q", "choice", repeat(125), (("a", ""), ("dog", ""))))
    short = QuestionText("q", "choice", "a", tuple((str(n), "") for n in range(15)))
    assert len(read(marks, short).requests[0].label_rows) == 15


def repeat(count: int) -> str:
    return " ".join(["fox"] * count)


def test_other_errors_name_the_field(marks: Model, schema: Model) -> None:
    for served in (marks, schema):
        with pytest.raises(EmptyInput, match="state: is empty"):
            read(served, CHOICE, text=" \n")
        with pytest.raises(BadRequest, match="there are no questions"):
            read(served)
        with pytest.raises(EncodingError, match="lone surrogate"):
            read(served, CHOICE, text="a \ud800")
        with pytest.raises(TooLong, match=r"state: has 70000 characters with its prompt of 28"):
            read(served, CHOICE, text="a" * 69_972)
    with pytest.raises(TooLong, match=r"state: has 92 tokens, beside \d+ of the questions"):
        read(schema, CHOICE, TRUTH, text=repeat(90))
    for spelled in (("a [L]", ""), ("a", "b [DESCRIPTION] c")):
        with pytest.raises(BadRequest, match=r"q: no text of it may have \[(L|DESCRIPTION)\] in it"):
            read(schema, QuestionText("q", "choice", "a", (spelled,)))
    with pytest.raises(BadRequest, match=r"q: no text of it may have \[SEP_TEXT\] in it"):
        read(schema, QuestionText("q", "choice", "[SEP_TEXT]", (("a", ""),)))
