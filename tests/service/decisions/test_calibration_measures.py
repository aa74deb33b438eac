"""Measures of labelled answers: values computed by hand, bounds, thresholds with equal confidences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyhead.service.decisions.calibration_file import RELIABILITY_BINS
from polyhead.service.decisions.calibration_measures import (
    calibration_error,
    chance_error,
    find_threshold,
    lower_bound,
    measure_answers,
    share_by_confidence,
    sort_into_bins,
)

SHARES = np.array([[0.7, 0.2, 0.1], [0.4, 0.6, np.nan], [0.5, 0.3, 0.2], [0.1, 0.9, np.nan]])
LABELS = np.array([0, 0, 2, 1])


def test_measures_of_a_few_answers() -> None:
    found = measure_answers(SHARES, LABELS)
    assert found.accuracy == 0.5
    assert found.brier == pytest.approx((0.14 + 0.72 + 0.98 + 0.02) / 4)
    assert found.log_loss == pytest.approx(-np.log([0.7, 0.4, 0.2, 0.9]).mean())
    assert found.ece == pytest.approx((0.3 + 0.6 + 0.5 + 0.1) / 4)  # every answer is a bin


def test_a_right_option_with_the_probability_zero_has_a_finite_loss() -> None:
    assert np.isfinite(measure_answers(np.array([[1.0, 0.0]]), np.array([1])).log_loss)


def test_bins_have_the_same_number_of_answers() -> None:
    source = np.random.default_rng(1)
    confidences = source.random(1000)
    bins = sort_into_bins(confidences, source.random(1000) < confidences)
    assert len(bins) == RELIABILITY_BINS
    assert {each.answers for each in bins} == {66, 67}
    assert [each.confidence for each in bins] == sorted(each.confidence for each in bins)
    assert calibration_error(bins) < 0.1


def test_answers_of_equal_confidence_are_in_one_bin() -> None:
    """Else the error would depend on the order of the rows."""
    confidences, right = np.repeat([0.6, 0.8], [70, 30]), np.arange(100) % 50 < 30
    bins = sort_into_bins(confidences, right)
    assert [(each.confidence, each.answers) for each in bins] == [(pytest.approx(0.6), 70), (pytest.approx(0.8), 30)]
    mixed = np.random.default_rng(3).permutation(100)
    assert calibration_error(sort_into_bins(confidences[mixed], right[mixed])) == pytest.approx(calibration_error(bins))


def test_few_answers_have_an_error_by_chance() -> None:
    source = np.random.default_rng(2)
    few, many = (chance_error(source.uniform(0.5, 1, count)) for count in (100, 10_000))
    assert 0.08 < few < 0.2
    assert many < 0.02


@given(st.lists(st.tuples(st.sampled_from((0.2, 0.5, 0.6, 0.9)), st.booleans()), min_size=1, max_size=30))
def test_a_threshold_is_the_lowest_that_has_the_precision(answers: list[tuple[float, bool]]) -> None:
    confidences, right = np.array([each for each, _ in answers]), np.array([each for _, each in answers])
    means = {each: right[confidences >= each].mean() for each in set(confidences.tolist())}
    allowed = [each for each, mean in means.items() if mean >= 0.75]
    found = find_threshold(confidences, right, 0.75)
    if not allowed:
        assert found is None
        return
    assert found is not None
    assert found.confidence == min(allowed)
    assert found.right == pytest.approx(means[found.confidence])
    assert found.share == pytest.approx((confidences >= found.confidence).mean())


def test_the_bound_of_a_share() -> None:
    assert lower_bound(1.0, 268) == pytest.approx(0.99, abs=1e-3)
    assert 0 <= lower_bound(0.0, 5) < lower_bound(0.9, 10) < lower_bound(0.9, 1000) < 0.9


def test_confidences_by_bin() -> None:
    assert share_by_confidence(np.array([0.0, 0.05, 0.95, 1.0])) == [0.5, *[0] * 8, 0.5]
