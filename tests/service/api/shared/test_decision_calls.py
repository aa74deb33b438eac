"""Answers to questions: how long they are."""

from polyhead.service.api.shared.decision_calls import answer_numbers
from polyhead.service.api.shared.encoding_calls import INLINE_NUMBERS
from polyhead.service.decisions.question import OptionScores


def test_answers_with_explanations_are_too_long_for_the_event_loop() -> None:
    """Two explained answers have hundreds of tokens and characters each, though they have few options."""
    plain, explained = OptionScores((0.5, 0.5)), OptionScores((0.5, 0.5), explanation={"tokens": []})
    assert answer_numbers([plain, plain]) == 4
    assert answer_numbers([plain, explained]) > INLINE_NUMBERS
