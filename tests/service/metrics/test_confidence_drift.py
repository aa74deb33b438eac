"""The drift of confidences: none for the same distribution, forgotten with time, the largest of several maps."""

import random
from dataclasses import replace

import pytest

from polyhead.service.core.calibration import NO_CALIBRATION, Calibration, CalibrationMap
from polyhead.service.metrics.confidence_drift import MIN_ANSWERS, ConfidenceDrift
from tests.support.calibrations import served_map

EXPECTED = (0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.2, 0.1, 0.05, 0.05)
MAP = replace(served_map(), confidences=EXPECTED)
OTHER = replace(MAP, name="where:temperature:2", question="0" * 32)


def judged(*maps: CalibrationMap) -> ConfidenceDrift:
    drift = ConfidenceDrift()
    drift.expect("judge", Calibration(maps or (MAP,)))
    return drift


def record(drift: ConfidenceDrift, count: int, applied: CalibrationMap = MAP, shift: float = 0.0) -> None:
    source = random.Random(1)
    for _ in range(count):
        [number] = source.choices(range(10), EXPECTED)
        drift.record("judge", "choice", applied.name, min((number + source.random()) / 10 + shift, 1.0))


def test_answers_as_expected_have_no_drift() -> None:
    drift = judged()
    record(drift, 3000)
    assert 0 <= drift.indexes()["judge", "choice"] < 0.05


def test_a_drift_appears_and_is_forgotten() -> None:
    drift = judged()
    record(drift, 2000, shift=0.4)
    moved = drift.indexes()["judge", "choice"]
    assert moved > 0.25
    record(drift, 6000)
    assert drift.indexes()["judge", "choice"] < moved / 4


def test_few_answers_have_no_index() -> None:
    drift = judged()
    record(drift, MIN_ANSWERS - 1, shift=0.5)
    assert drift.indexes() == {("judge", "choice"): 0.0}
    record(drift, 1)
    assert drift.indexes()["judge", "choice"] > 0


def test_the_largest_drift_of_a_kind_is_shown() -> None:
    drift = judged(MAP, OTHER)
    record(drift, 1000, OTHER, shift=0.4)
    alone = drift.indexes()["judge", "choice"]
    record(drift, 1000)
    assert drift.indexes() == {("judge", "choice"): alone}
    drift.expect("judge", NO_CALIBRATION)
    record(drift, 1000)
    assert drift.indexes() == {("judge", "choice"): 0.0}
    drift.remove("judge")
    assert drift.indexes() == {}


@pytest.mark.parametrize("confidence", [0.0, 0.999, 1.0])
def test_every_confidence_has_a_bin(confidence: float) -> None:
    drift = judged()
    for _ in range(MIN_ANSWERS):
        drift.record("judge", "choice", MAP.name, confidence)
    assert drift.indexes()["judge", "choice"] > 1
