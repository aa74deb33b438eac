"""What heads read for questions: how many texts there are, how long they are, and when the work stops."""

from pathlib import Path

import pytest

from polyhead.service.core.errors import Expired, TooLong, TooMany
from polyhead.service.core.model import Model
from polyhead.service.core.request import Task
from polyhead.service.decisions.encoder_reads import (
    MAX_READ_OPTIONS,
    check_read_size,
    count_written_characters,
    read_heads,
)
from polyhead.service.decisions.question import MAX_PERMUTATIONS, DecisionRequest, Option, Question
from tests.support.scripted import model

ENTAILMENT = ("contradiction", "neutral", "entailment")


def head(folder: Path, task: Task) -> Model:
    return model(folder, "judge", task, max_tokens=512, labels=ENTAILMENT if task == "classify" else ())


def ask(options: int, count: int = 1, instructions: str = "Which?", description: str = "") -> DecisionRequest:
    named = tuple(Option(f"o{number}", description) for number in range(options))
    question = Question("questions.a", "a", "choice", instructions, named, MAX_PERMUTATIONS)
    return DecisionRequest("state", "A fox.", (question,) * count)


def test_options_are_counted_in_all_orders(tiny_classifier: Path) -> None:
    judge = head(tiny_classifier, "label_texts")
    check_read_size(judge, ask(32, count=MAX_READ_OPTIONS // (32 * MAX_PERMUTATIONS)))
    with pytest.raises(TooMany, match="they have 67320 options in all orders, at most 65536 a call"):
        check_read_size(judge, ask(255, count=11))
    check_read_size(head(tiny_classifier, "rank"), ask(255, count=11))  # one order


def test_too_long_instructions_are_refused_before_texts_are_made_of_them(tiny_classifier: Path) -> None:
    with pytest.raises(TooLong, match=r"questions\.a: has 65537 characters"):
        check_read_size(head(tiny_classifier, "rank"), ask(2, instructions="a" * 65537))


@pytest.mark.parametrize("task", ["classify", "rank", "choose", "label_texts"])
@pytest.mark.parametrize("description", ["", "means " * 9])
def test_the_characters_of_all_texts_are_within_the_count(tiny_classifier: Path, task: Task, description: str) -> None:
    """An option is written into each of its places in the instructions, so a short question may make long texts."""
    judge, asked = head(tiny_classifier, task), ask(4, 2, "Is it {} or {} or {}?" * 7, description)
    made = set[str]()
    for read in (read for orders in read_heads(judge, asked, lambda: None) for read in orders):
        for given in read.encoding.inputs:
            made |= {given} if isinstance(given, str) else {str(part) for part in given}
        made |= set(read.encoding.labels)
    assert sum(map(len, made - {asked.state})) <= count_written_characters(judge, asked)


def test_the_work_stops_when_its_result_is_no_longer_needed(tiny_classifier: Path) -> None:
    checks = list[None]()

    def check() -> None:
        checks.append(None)
        if len(checks) == 3:
            raise Expired("too late")

    with pytest.raises(Expired):
        read_heads(head(tiny_classifier, "label_texts"), ask(3, count=9), check)
    assert len(checks) == 3
