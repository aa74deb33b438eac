"""Answers to questions: how long they are."""

from importlib import import_module
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import pytest

from polyhead.service.api.shared.decision_calls import answer_numbers
from polyhead.service.api.shared.encoding_calls import INLINE_NUMBERS
from polyhead.service.decisions.question import OptionScores
from tests.support.scripted import Registry, application, ask, echo, model


def test_answers_with_explanations_are_too_long_for_the_event_loop() -> None:
    """Two explained answers have hundreds of tokens and characters each, though they have few options."""
    plain, explained = OptionScores((0.5, 0.5)), OptionScores((0.5, 0.5), explanation={"tokens": []})
    assert answer_numbers([plain, plain]) == 4
    assert answer_numbers([plain, explained]) > INLINE_NUMBERS


@pytest.mark.parametrize(("dialect", "read"), [("decisions", "read_decisions"), ("systemone", "read_systemone")])
def test_many_options_are_read_on_a_thread(
    tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch, dialect: str, read: str
) -> None:
    routes = import_module(f"polyhead.service.api.dialects.{dialect}.routes")
    on_loop = list[bool]()
    function = getattr(routes, read)
    monkeypatch.setattr(routes, read, lambda wire: on_loop.append(current_thread() is main_thread()) or function(wire))
    app = application(Registry([model(tiny_classifier, "judge", "classify")], echo))

    def asked(questions: int) -> dict[str, Any]:
        names = [f"o{number}" for number in range(200)]
        if dialect == "systemone":
            asked = {"type": "choice", "criteria": {name: [1] for name in names}}
            return {"model": "judge", "state": "a", "questions": {f"q{at}": asked for at in range(questions)}}
        listed = {"type": "choice", "instructions": "a", "choices": [{"value": name} for name in names]}
        return {"model": "judge", "input": "a", "questions": [listed] * questions}

    ask(app, (f"/v1/{dialect}", asked(1)), (f"/v1/{dialect}", asked(40)))
    assert on_loop == [True, False]
