"""The reads of a generator: how many there are of a question, and which option each label stands for."""

from pathlib import Path

import pytest

from polyhead.service.core.errors import Overloaded, TooMany
from polyhead.service.core.request import Terms
from polyhead.service.decisions.generator_reads import (
    ANSWER,
    LabelRead,
    QuestionPrompts,
    read_labels,
    write_question,
)
from polyhead.service.decisions.question import (
    MAX_PERMUTATIONS,
    PROMPT_VERSION,
    DecisionRequest,
    Option,
    Question,
    QuestionKind,
)
from polyhead.service.resources.request_memory import BYTES_PER_SHARED_TOKEN, BYTES_PER_TEXT, BYTES_PER_TOKEN
from tests.support.scripted import model


def read(folder: Path, kind: QuestionKind, options: int, count: int = 1) -> list[list[LabelRead]]:
    named = tuple(Option(f"o{number}") for number in range(options))
    question = Question("questions.a", "a", kind, "Is it?", named, MAX_PERMUTATIONS)
    request = DecisionRequest("state", "A fox.", (question,) * count)
    return read_labels(model(folder, "talker", "generate", max_tokens=512), request, "call", Terms(), lambda size: None)


def test_a_predicate_has_one_order_and_a_choice_has_many(tiny_generator: Path) -> None:
    [[only]] = read(tiny_generator, "predicate", 2)
    assert only.order == (0, 1)
    [orders] = read(tiny_generator, "choice", 3)
    assert {each.order for each in orders} == {(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)}


def test_reads_are_counted_by_orders(tiny_generator: Path) -> None:
    with pytest.raises(TooMany, match="they need 4104 reads of the model, at most 4096 a call"):
        read(tiny_generator, "choice", 5, count=171)
    assert len(read(tiny_generator, "predicate", 2, count=171)) == 171


def test_reads_are_claimed_before_they_are_made(tiny_generator: Path) -> None:
    """Each prompt has the whole text, however short the question is, and tokens of its own, which are held once."""
    options, sizes = (Option("yes"), Option("no")), list[int]()

    def claim(size: int) -> None:
        sizes.append(size)
        if len(sizes) == 3:
            raise Overloaded("no room")

    request = DecisionRequest("state", "A fox. " * 20, (Question("a", "a", "predicate", "Is it?", options),) * 5)
    served = model(tiny_generator, "talker", "generate", max_tokens=512)
    with pytest.raises(Overloaded, match="no room"):
        read_labels(served, request, "call", Terms(), claim)
    made = read_labels(served, request, "call", Terms(), lambda size: None)[0][0].requests
    own = len(made[0].tokens) - QuestionPrompts(served, request).shared_tokens
    assert own >= len(ANSWER)
    slots = len(made) * (BYTES_PER_TEXT + BYTES_PER_SHARED_TOKEN * len(made[0].tokens))
    assert sizes == [slots + BYTES_PER_TOKEN * own] * 3


def test_questions_are_written_as_their_version_says() -> None:
    """Whoever changes these texts raises PROMPT_VERSION: calibrations were fitted to answers after them."""
    options = (Option("payment", "bills"), Option("parcel"))
    written = [
        write_question(Question("q", "q", "predicate", "Is it?", (Option("yes"), Option("no", "not at all"))), (0, 1)),
        write_question(Question("q", "q", "choice", "Which?", options), (1, 0)),
        write_question(Question("q", "q", "score", "", options), (0, 1)),
    ]
    assert (PROMPT_VERSION, ANSWER, written) == (
        1,
        "Answer:",
        [
            "Question: Is it?\nNo: not at all\nAnswer only Yes or No.",
            "Question: Which?\nOptions:\nA: parcel\nB: payment - bills\n"
            "Answer only with the letter of the right option.",
            "Options:\n0: payment - bills\n1: parcel\nAnswer only with the number of the right level.",
        ],
    )
