"""Scores of options."""

import pytest

from polyhead.service.decisions.question import OptionScores, average_orders
from polyhead.service.text.answer_delta import Usage


def test_the_chosen_option_and_its_confidence() -> None:
    scores = OptionScores((0.2, 0.4, 0.4), label_mass=0.5)
    assert (scores.chosen, scores.confidence, scores.mean_level) == (1, 0.2, pytest.approx(1.2))
    assert OptionScores((0.2, 0.8), label_mass=0.5, calibration="c").confidence == 0.8


def test_orders_are_averaged() -> None:
    first = OptionScores((0.2, 0.8), 0.5, True, Usage(10, 1, 0))
    second = OptionScores((0.6, 0.4), 0.7, False, Usage(10, 1, 8))
    mean = average_orders([first, second])
    assert mean.probabilities == pytest.approx((0.4, 0.6))
    assert (mean.label_mass, mean.is_label_likeliest) == (pytest.approx(0.6), False)
    assert mean.usage == Usage(20, 2, 8)
    assert average_orders([first]) is first
