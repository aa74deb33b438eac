"""The report of a calibration: what was fitted, thresholds, bars of the reliability diagram."""

import numpy as np
import pytest

from polyhead.service.cli.calibration_report import bin_line, describe_map, fit_lines, fits_as_json
from polyhead.service.decisions.calibration_file import AskedQuestion, FileBin
from polyhead.service.decisions.calibration_fit import Fit, LabelledAnswers, fit_answers

WHERE = AskedQuestion(name="where", digest="0" * 32)


def fitted(right: float, count: int = 200) -> Fit:
    """Of answers whose likeliest of two options, with 0.9, is right in this share."""
    held_out = np.arange(count) % 2 == 1
    labels = (np.arange(count) // 2 >= right * count // 2).astype(np.int64)
    shares = np.tile([0.9, 0.1], (count, 1))
    return fit_answers(LabelledAnswers("choice", shares, labels, held_out), WHERE, ("temperature",))


def test_a_fit_is_described_with_its_thresholds() -> None:
    lines = list(fit_lines(fitted(0.7), (0.6, 0.8)))
    assert lines[0].startswith("where: temperature 2.59")
    assert lines[1] == "fitted on 100 answers, measured on 100 answers about other texts"
    assert lines[5].startswith("ECE          0.2000   0.0000   (0.03")
    assert lines[8].startswith("for a precision of 0.6: confidence of at least 0.7000, which 100.0% of decisions have")
    assert lines[8].endswith("0.7000 of these are right (at least 0.6202 with a certainty of 95 %)")
    assert lines[9] == "for a precision of 0.8: no confidence is high enough"


def test_a_model_that_knows_nothing_and_one_that_is_calibrated_are_said_to_be() -> None:
    assert describe_map(fitted(0.4)).startswith("temperature 100, the highest: the probabilities tell nothing")
    calibrated = fitted(0.9)
    assert calibrated.map is None
    assert "a map makes the log loss higher" in describe_map(calibrated)
    [found] = fits_as_json([calibrated], [calibrated.as_file_map(())])
    assert found["map"] is None
    assert found["before"] == found["after"]


@pytest.mark.parametrize(
    ("confidence", "accuracy", "bar"),
    [(0.0, 1.0, "|" + "=" * 39), (1.0, 0.0, " " * 40 + "|"), (0.5, 0.25, "=" * 10 + " " * 10 + "|")],
)
def test_bars_show_the_share_and_the_confidence(confidence: float, accuracy: float, bar: str) -> None:
    line = bin_line(FileBin(confidence=confidence, accuracy=accuracy, answers=10))
    assert line == f"    {confidence:.4f} {accuracy:.4f}  {bar}"
