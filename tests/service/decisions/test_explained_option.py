"""What is explained of the answers of models that read questions beside the text: the row of the chosen option, and the
places of tokens in the state."""

from dataclasses import replace
from pathlib import Path

import pytest

from polyhead.models.core.decision_prompt import SCHEMA_TOKENS, LabelSchemaPrompt, OptionMarkPrompt
from polyhead.models.core.label_prompt import LabelPrompt
from polyhead.service.core.model import Model
from polyhead.service.core.request import DEFAULT_TERMS
from polyhead.service.decisions.decider_reads import read_deciders, request_bytes
from polyhead.service.decisions.encoder_reads import read_heads
from polyhead.service.decisions.explained_option import (
    build_decider_subject,
    build_head_encoding,
    build_head_subject,
)
from polyhead.service.decisions.question import DecisionRequest, Option, OptionScores, Question
from polyhead.service.explain.explain_request import ExplainSubject
from polyhead.service.resources.request_memory import BYTES_PER_SHARED_TOKEN, BYTES_PER_TEXT, BYTES_PER_TOKEN
from polyhead.service.text.decision_prompts import QuestionedText, QuestionText
from polyhead.service.text.encoder_inputs import EncodedInput
from polyhead.service.text.label_prompts import read_labelled_inputs
from tests.support import label_models
from tests.support.scripted import model

STATE = "The fox\u2014[MASK] a dog runs"
GOOD = Question("q", "good", "predicate", "a good film", (Option("yes"), Option("no")))
ANIMAL = Question("q", "animal", "choice", "which", (Option("fox"), Option("dog"), Option("person")), permutations=2)
DECISION = DecisionRequest("state", STATE, (GOOD, ANIMAL), "the film")
MARKED = range(STATE.index("["), STATE.index("]") + 1)  # not spelled by a model whose options have this mark


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    label_models.tokenizer(*SCHEMA_TOKENS, *"0123:!", "<<LABEL>>", "<<SEP>>").save_pretrained(path)
    return path


def choose(question: Question, option: int) -> OptionScores:
    """Scores by which this option is chosen."""
    return OptionScores(tuple(float(each == option) for each in range(len(question.options))))


def spell(served: Model, subject: ExplainSubject, row: int) -> str:
    """What stands after a row, up to the next one of an option."""
    end = min((each for each in subject.label_rows if each > row), default=len(subject.tokens))
    return "".join(served.tokenizer.piece(id) for id in subject.tokens[row + 1 : end]).replace("\u2581", "_")


def check_places(subject: ExplainSubject, hidden: range = range(0)) -> None:
    """Tokens are those of the state, all of it, and the rows of others are kept."""
    places = set[int]()
    for row, token in enumerate(subject.shown_tokens):
        assert (row in subject.kept_rows) == (token.text is None) or token.special
        if token.start is not None and token.end is not None:
            spelled = token.piece.replace("\u2581", "")
            assert spelled in ("", "[UNK]") or STATE[token.start : token.end].lower().strip() in (spelled, "[mask]")
            places |= set(range(token.start, token.end))
    letters = {place for place, letter in enumerate(STATE) if letter.isalpha()}
    assert letters - set(hidden) <= places <= set(range(len(STATE)))


@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.parametrize("prompt", [OptionMarkPrompt(1, 2, 4, question_tokens=130), LabelSchemaPrompt()])
def test_the_option_and_the_state_of_models_made_for_questions(
    folder: Path, prompt: OptionMarkPrompt | LabelSchemaPrompt, is_joint: bool
) -> None:
    served = model(folder, "decider", "decide", decision_prompt=prompt, max_tokens=256)
    decision = replace(DECISION, is_joint=is_joint)
    sizes = list[int]()
    reads = read_deciders(served, decision, "call", DEFAULT_TERMS, sizes.append)
    claimed = [size for size in sizes if size]
    assert len(claimed) == len(reads), "the memory of each turn is claimed"
    for size, read in zip(claimed, reads, strict=True):
        assert size >= sum(BYTES_PER_TEXT + 8 * len(each.tokens) for each in read.requests)
    names = {0: ("true", "false"), 1: ("fox", "dog", "person")}
    for read in reads:
        for index in read.indices:
            question = decision.questions[index]
            for option, name in enumerate(names[index]):
                subject = build_decider_subject(served, decision, index, read, choose(question, option))
                [described] = subject.goals
                [(row, column)] = described.goal
                assert (row, described.description["option"]) == (0, question.options[option].name)
                assert spell(served, subject, subject.label_rows[column]).startswith(f"_{name}"), name
                check_places(subject, MARKED if isinstance(prompt, OptionMarkPrompt) else range(0))
    assert {read.requests[0].question for read in reads} <= {"noul", "choice"}


def test_the_tokens_of_a_question_are_claimed_as_its_own(folder: Path) -> None:
    """The text is tokenised once for all requests, a question for its own."""
    served = model(folder, "decider", "decide", decision_prompt=LabelSchemaPrompt(), max_tokens=256)

    def claimed(text: int, asked: int) -> int:
        question = QuestionText("q", "choice", "a" * asked, (("fox", ""),))
        return request_bytes(served, QuestionedText("state", "a" * text, (question,), is_joint=False))

    assert claimed(30, 10) - claimed(20, 10) == 10 * BYTES_PER_SHARED_TOKEN
    assert claimed(20, 20) - claimed(20, 10) == 10 * (BYTES_PER_SHARED_TOKEN + BYTES_PER_TOKEN)
    assert claimed(20, 1000) == BYTES_PER_TEXT + 256 * (BYTES_PER_SHARED_TOKEN + BYTES_PER_TOKEN)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_label_and_the_state_of_models_with_labels(folder: Path, is_first: bool) -> None:
    words = model(folder, "classifier", "label_texts").tokenizer
    label = words.token_id("<<LABEL>>")
    assert label is not None
    prompt = LabelPrompt("<<LABEL>>", "<<SEP>>", label, is_first=is_first)
    served = model(folder, "classifier", "label_texts", label_prompt=prompt, max_tokens=256)
    _, orders = read_heads(served, DECISION, lambda: None)
    for read in orders:
        for option, name in enumerate(("fox", "dog", "person")):
            scores = choose(ANIMAL, option)
            [encoded] = read_labelled_inputs(served, build_head_encoding(read, scores), "call", DEFAULT_TERMS)
            assert isinstance(encoded, EncodedInput)
            subject = build_head_subject(DECISION, ANIMAL, read, scores, encoded)
            [((_, column),)] = [described.goal for described in subject.goals]
            assert spell(served, subject, subject.label_rows[column]).startswith(f"_{name}")
            assert subject.text_rows
            check_places(subject)
