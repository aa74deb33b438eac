"""Fits of calibrations: known distortions are found, useful maps are kept, halves share no text."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhead.service.decisions import calibration_fit as fits
from polyhead.service.decisions.calibration import Table, map_probabilities
from polyhead.service.decisions.calibration_file import MAX_KNOTS, AskedQuestion, Bias, Isotonic, Platt
from polyhead.service.decisions.calibration_fit import (
    LabelledAnswers,
    allowed_methods,
    fit_answers,
    fit_bias,
    fit_temperature,
    split_texts,
)
from polyhead.service.decisions.calibration_measures import Labels, log_loss, measure_answers

needs_sklearn = pytest.mark.skipif(not fits.HAS_SKLEARN, reason="the extra calibrate is not installed")


def answers(
    kind: Any, options: int, factor: float = 1.0, shift: float = 0.0, *, count: int = 3000, seed: int = 3
) -> LabelledAnswers:
    """Labels are drawn with probabilities whose logits the model multiplies by `factor`, with `shift` for the first."""
    source = np.random.default_rng(seed)
    logits = source.normal(size=(count, options)) * 1.2
    labels = (softmax(logits).cumsum(1) > source.random((count, 1))).argmax(1)
    logits = logits * factor
    logits[:, 0] += shift
    return LabelledAnswers(kind, softmax(logits), labels, np.arange(count) % 2 == 1)


def softmax(logits: Table) -> Table:
    powers = np.exp(logits)
    return np.asarray(powers / powers.sum(1, keepdims=True))


@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("kind", ["choice", "score", "predicate"])
def test_the_temperature_of_a_distortion_is_found(kind: Any, factor: float) -> None:
    labelled = answers(kind, 2 if kind == "predicate" else 5, factor)
    found = fit_temperature(kind, labelled.shares, labelled.labels)
    assert found.temperature == pytest.approx(factor, rel=0.15)
    losses = [
        log_loss(map_probabilities(kind, "temperature", (found.temperature * near,), labelled.shares), labelled.labels)
        for near in (0.95, 1.0, 1.05)
    ]
    assert min(losses) == losses[1]


def test_temperatures_have_bounds() -> None:
    certain = np.array([[0.9, 0.1]] * 40)
    assert fit_temperature("choice", certain, np.zeros(40, np.int64)).temperature == pytest.approx(0.01)
    assert fit_temperature("choice", certain, np.ones(40, np.int64)).temperature == pytest.approx(100)


def test_a_calibrated_model_is_left_as_it_is_or_hardly_changed() -> None:
    found = fit_answers(answers("choice", 4), None, ("temperature",))
    assert found.map is None or found.map.parameters[0] == pytest.approx(1, abs=0.1)
    assert found.after.log_loss <= found.before.log_loss + 0.001


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), factor=st.floats(0.2, 5), options=st.integers(2, 6))
def test_answers_without_a_map_stay_as_they_are(seed: int, factor: float, options: int) -> None:
    source = np.random.default_rng(seed)
    shares = softmax(source.normal(size=(60, options)) * factor)
    labels: Labels = source.integers(0, options, 60)
    found = fit_answers(LabelledAnswers("choice", shares, labels, np.arange(60) % 2 == 0), None, ("temperature",))
    assert found.after.accuracy == found.before.accuracy
    assert (found.map is None) == (found.after == found.before)
    assert (found.as_file_map([0.5]) is None) == (found.map is None)


def test_calibration_lowers_the_error_to_what_chance_allows() -> None:
    found = fit_answers(answers("choice", 4, 3.0, count=6000), None, ("temperature",))
    assert found.before.ece > 0.15
    assert found.after.ece < 2 * found.chance < 0.06


def test_halves_are_of_different_texts_and_do_not_depend_on_their_order() -> None:
    texts = [f"text {number // 3}" for number in range(300)]
    held_out = split_texts(texts)
    assert sum(held_out) == 150
    assert {text for text, out in zip(texts, held_out, strict=True) if out}.isdisjoint(
        text for text, out in zip(texts, held_out, strict=True) if not out
    )
    assert split_texts(texts[::-1]).tolist() == held_out[::-1].tolist()
    assert split_texts(["\ud800"]).tolist() == [False]


def test_scores_have_a_temperature_only() -> None:
    assert allowed_methods("score", of_one_question=False) == ("temperature",)


@needs_sklearn
def test_a_shifted_predicate_needs_an_intercept() -> None:
    labelled = answers("predicate", 2, 3.0, 2.0)
    found = fit_answers(labelled, None, allowed_methods("predicate", of_one_question=False))
    assert found.losses.keys() == {"none", "temperature", "platt", "isotonic"}
    assert isinstance(found.map, Platt)
    assert found.map.slope == pytest.approx(1 / 3, rel=0.15)
    assert found.map.intercept == pytest.approx(-2 / 3, rel=0.2)
    assert found.after.ece < 2 * found.chance


@needs_sklearn
def test_a_platt_map_that_would_decrease_is_flat() -> None:
    """Probabilities that say the opposite of what is right become the share that is right."""
    labelled = answers("predicate", 2)
    flipped = LabelledAnswers("predicate", labelled.shares, 1 - labelled.labels, labelled.held_out)
    found = fit_answers(flipped, None, ("platt",)).map
    assert isinstance(found, Platt)
    shares = map_probabilities("predicate", "platt", found.parameters, flipped.shares)
    assert found.slope == fits.MIN_SLOPE
    assert shares[:, 0] == pytest.approx((flipped.labels[~flipped.held_out] == 0).mean(), abs=5e-3)


@needs_sklearn
@pytest.mark.parametrize(("kind", "options"), [("predicate", 2), ("choice", 5)])
def test_isotonic_maps_increase_and_stay_away_from_zero(kind: Any, options: int) -> None:
    labelled = answers(kind, options, 3.0)
    found = fits.fit_isotonic(kind, labelled.shares, labelled.labels)
    assert isinstance(found, Isotonic)
    assert len(found.x) <= MAX_KNOTS
    after = map_probabilities(kind, "isotonic", found.parameters, labelled.shares)
    assert log_loss(after, labelled.labels) < log_loss(labelled.shares, labelled.labels)
    assert after.min() > 0
    separated = fits.fit_isotonic("predicate", np.array([[0.9, 0.1], [0.2, 0.8]] * 10), np.array([0, 1] * 10))
    assert (separated.y[0], separated.y[-1]) == pytest.approx((1 / 22, 21 / 22), abs=1e-3)


@needs_sklearn
def test_rows_with_fewer_options_are_fitted_with_the_others() -> None:
    labelled = answers("choice", 4, 3.0, count=600)
    shares = labelled.shares.copy()
    shares[::2, 3] = np.nan
    shares /= np.nansum(shares, axis=1, keepdims=True)
    labels = np.where(np.isnan(shares[np.arange(600), labelled.labels]), 0, labelled.labels)
    for method in allowed_methods("choice", of_one_question=False):
        found = fit_answers(LabelledAnswers("choice", shares, labels, labelled.held_out), None, (method,))
        assert found.after.log_loss < found.before.log_loss
        assert found.map is not None


@needs_sklearn
def test_the_preference_for_an_option_is_found_and_taken_away() -> None:
    labelled = answers("choice", 4, factor=2.0, shift=3.0)
    found = fit_bias("choice", labelled.shares, labelled.labels)
    assert found.temperature == pytest.approx(2.0, rel=0.15)
    relative = [bias - found.biases[1] for bias in found.biases]
    assert relative == pytest.approx([-1.5, 0, 0, 0], abs=0.2)
    methods = allowed_methods("choice", of_one_question=True)
    fit = fit_answers(labelled, AskedQuestion(name="q", digest="0" * 32), methods)
    assert isinstance(fit.map, Bias)
    assert fit.after.accuracy > fit.before.accuracy + 0.05
    assert fit.after.log_loss < min(loss for method, loss in fit.losses.items() if method != "bias")


@needs_sklearn
def test_the_bias_of_an_option_that_is_never_right_is_finite() -> None:
    shares = np.tile([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]], (50, 1))
    found = fit_bias("choice", shares, np.tile([0, 2], 50).astype(np.int64))
    assert max(map(abs, found.biases)) < 20
    assert found.biases[1] < min(found.biases[0], found.biases[2])


def test_a_useful_map_is_not_lost_by_chance() -> None:
    found_maps = [
        fit_answers(answers("choice", 3, 2.0, count=60, seed=seed), None, ("temperature",)) for seed in range(100)
    ]
    assert sum(each.map is not None for each in found_maps) >= 95


def test_a_needless_map_does_no_harm() -> None:
    """On new answers, of a model that is calibrated already, the error grows by less than it is by chance."""
    new = answers("choice", 3, count=2000, seed=1000)
    before, grown = measure_answers(new.shares, new.labels), []
    for seed in range(25):
        found = fit_answers(answers("choice", 3, count=200, seed=seed), None, ("temperature",))
        after = measure_answers(fits.apply_fit("choice", found.map, new.shares), new.labels)
        assert after.ece - before.ece < found.chance
        grown.append(after.log_loss - before.log_loss)
    assert np.mean(grown) < 0.01
