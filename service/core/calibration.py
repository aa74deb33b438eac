"""Calibration of a model's decisions, as plain values: how probabilities of options become those that labelled answers
have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

CalibrationMethod = Literal["temperature", "platt", "isotonic", "bias"]
CONFIDENCE_BINS = 10  # of equal width, from 0 to 1


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Answers of similar confidence: their mean confidence, and the share of them that is right."""

    confidence: float
    accuracy: float
    answers: int


@dataclass(frozen=True, slots=True)
class Reliability:
    """How right and how certain the held-out labelled answers were. `brier` is summed over the options of an answer,
    `log_loss` in nats. `bins` are by increasing confidence; a file may have none.
    """

    accuracy: float
    brier: float
    ece: float
    log_loss: float
    bins: tuple[ReliabilityBin, ...]


@dataclass(frozen=True, slots=True)
class CalibrationMap:
    """A map of the probabilities of options: of one question, or of all questions of a `kind`.

    `name` is what answers call it. `question` is the digest of the question's content, `question_name` its name for
    people; both are empty if the map is for the whole kind.
    `parameters` are the temperature; or the slope and the intercept of a logistic function (Platt); or the knots of a
    piecewise linear function (isotonic), all x before all y; or a temperature and a bias for each option.
    `confidences` has the share of labelled answers whose calibrated confidence is in each of CONFIDENCE_BINS bins.
    `before` and `after` are measures of the held-out answers without the map and with it.
    """

    name: str
    kind: str
    question: str
    question_name: str
    method: CalibrationMethod
    parameters: tuple[float, ...]
    confidences: tuple[float, ...]
    fitted_answers: int
    held_out_answers: int
    before: Reliability
    after: Reliability


@dataclass(frozen=True)
class Calibration:
    """The maps of one model; without any its probabilities stay as they are."""

    maps: tuple[CalibrationMap, ...] = ()

    @cached_property
    def by_target(self) -> Mapping[tuple[str, str], CalibrationMap]:
        """The maps by kind and digest."""
        return {(each.kind, each.question): each for each in self.maps}

    @cached_property
    def has_questions(self) -> bool:
        """Whether some map is for one question alone."""
        return any(each.question for each in self.maps)


NO_CALIBRATION = Calibration()
