"""Calibrated probabilities: they sum to 1, keep the order of options, and are of the question that was calibrated."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhead.service.core.calibration import NO_CALIBRATION, Calibration
from polyhead.service.decisions.calibration import apply_calibration, digest_question, find_map
from polyhead.service.decisions.question import Option, OptionScores, Question
from tests.support.calibrations import served_map

YES_OR_NO = (Option("yes"), Option("no"))
MAPS = [
    ("temperature", (1.0,)),
    ("temperature", (0.05,)),
    ("temperature", (40.0,)),
    ("platt", (0.5, -1.0)),
    ("platt", (100.0, 1000.0)),
    ("platt", (100.0, -1000.0)),
    ("isotonic", (0.0, 0.4, 1.0, 0.01, 0.02, 0.9)),
]


def question(kind: Any, count: int = 2, **changes: Any) -> Question:
    options = YES_OR_NO if kind == "predicate" else tuple(Option(f"option {index}") for index in range(count))
    return replace(Question("questions.q", "q", kind, "Is it so?", options), **changes)


def calibration(method: Any, parameters: tuple[float, ...], kind: str, digest: str = "") -> Calibration:
    applied = replace(served_map(), name=f"{kind}:{method}", kind=kind, question=digest)
    return Calibration((replace(applied, method=method, parameters=parameters),))


@st.composite
def shares(draw: st.DrawFn) -> tuple[float, ...]:
    weights = draw(st.lists(st.floats(0, 1), min_size=1, max_size=12).filter(lambda values: sum(values) > 0))
    return tuple(weight / sum(weights) for weight in weights)


@pytest.mark.parametrize(("method", "parameters"), MAPS)
@settings(max_examples=30)
@given(given=shares())
def test_calibrated_probabilities_sum_to_one_and_keep_their_order(
    method: str, parameters: tuple[float, ...], given: tuple[float, ...]
) -> None:
    asked = question("choice", len(given))
    found = apply_calibration(calibration(method, parameters, "choice"), asked, OptionScores(given, 0.5))
    assert found.calibration == f"choice:{method}"
    assert sum(found.probabilities) == pytest.approx(1)
    assert all(math.isfinite(share) and share >= 0 for share in found.probabilities)
    by_share = sorted(range(len(given)), key=given.__getitem__)
    calibrated = [found.probabilities[index] for index in by_share]
    assert all(left <= right * (1 + 1e-9) for left, right in pairwise(calibrated))


@given(given=shares())
def test_a_temperature_of_one_changes_nothing(given: tuple[float, ...]) -> None:
    found = apply_calibration(
        calibration("temperature", (1.0,), "choice"), question("choice", len(given)), OptionScores(given)
    )
    assert found.probabilities == pytest.approx(given, abs=1e-9)


@pytest.mark.parametrize("yes", [0.0, 1e-15, 0.3, 0.5, 0.9, 1.0])
def test_maps_of_a_predicate_are_of_yes(yes: float) -> None:
    scores, asked = OptionScores((yes, 1 - yes)), question("predicate")
    logit = math.log(max(yes, 1e-12) / max(1 - yes, 1e-12))
    found = apply_calibration(calibration("platt", (0.5, -1.0), "predicate"), asked, scores)
    assert found.probabilities == pytest.approx(
        (1 / (1 + math.exp(1 - logit / 2)), 1 / (1 + math.exp(logit / 2 - 1))), abs=1e-9
    )
    found = apply_calibration(calibration("isotonic", (0, 0.5, 1, 0.1, 0.2, 0.9), "predicate"), asked, scores)
    expected = 0.1 + yes * 0.2 if yes <= 0.5 else 0.2 + (yes - 0.5) * 1.4
    assert found.probabilities == pytest.approx((expected, 1 - expected), abs=1e-9)


def test_temperature_divides_log_probabilities() -> None:
    found = apply_calibration(calibration("temperature", (2.0,), "score"), question("score"), OptionScores((0.8, 0.2)))
    assert found.probabilities == pytest.approx((2 / 3, 1 / 3))
    assert found.mean_level == pytest.approx(1 / 3)


def test_confidence_is_of_the_options_alone_once_calibrated() -> None:
    scores = OptionScores((0.8, 0.2), label_mass=0.5)
    assert scores.confidence == pytest.approx(0.4)
    applied = apply_calibration(calibration("temperature", (1.0,), "choice"), question("choice"), scores)
    assert applied.confidence == pytest.approx(0.8)
    assert applied.label_mass == 0.5


def test_a_question_without_a_map_keeps_its_scores() -> None:
    scores = OptionScores((0.8, 0.2))
    assert apply_calibration(NO_CALIBRATION, question("choice"), scores) is scores
    assert apply_calibration(calibration("temperature", (2.0,), "score"), question("choice"), scores) is scores


def test_the_map_of_a_question_goes_before_that_of_its_kind() -> None:
    asked = question("choice", 3)
    own, kind = (calibration("temperature", (2.0,), "choice", of).maps[0] for of in (digest_question(asked), ""))
    both = Calibration((kind, own))
    assert find_map(both, asked) is own
    assert find_map(both, replace(asked, name="another", field="questions[0]")) is own
    for changed in (
        replace(asked, instructions="Is it not so?"),
        replace(asked, options=asked.options[::-1]),
        replace(asked, permutations=2),
    ):
        assert find_map(both, changed) is kind
    assert find_map(both, question("score", 3)) is None


def test_names_of_a_predicates_options_do_not_count() -> None:
    """The dialects call them differently, and the model does not read them."""
    asked = question("predicate")
    renamed = replace(asked, options=(Option("true"), Option("false")))
    described = replace(asked, options=(Option("yes", "it holds"), Option("no")))
    assert digest_question(renamed) == digest_question(asked) != digest_question(described)


def test_biases_are_of_one_question() -> None:
    asked = question("choice", 3)
    digest, scores = digest_question(asked), OptionScores((0.6, 0.3, 0.1), 1.0)
    applied = calibration("bias", (1.0, -2.0, 0.0, 0.0), "choice", digest)
    found = apply_calibration(applied, asked, scores)
    assert sum(found.probabilities) == pytest.approx(1)
    assert found.probabilities[1] == max(found.probabilities)
    assert found.probabilities[1] / found.probabilities[2] == pytest.approx(3)
    assert not apply_calibration(applied, question("choice", 2), OptionScores((0.6, 0.4), 1.0)).calibration


def test_biases_for_another_number_of_options_are_not_applied() -> None:
    """As in a file that was changed by hand; the map of the kind is applied instead."""
    asked = question("choice", 3)
    own = calibration("bias", (1.0, -2.0, 0.0), "choice", digest_question(asked))
    [of_kind] = calibration("temperature", (2.0,), "choice").maps
    both = Calibration((*own.maps, of_kind))
    assert apply_calibration(own, asked, OptionScores((0.6, 0.3, 0.1), 1.0)).calibration == ""
    assert apply_calibration(both, asked, OptionScores((0.6, 0.3, 0.1), 1.0)).calibration == "choice:temperature"
