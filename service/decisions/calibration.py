"""Applies a calibration to the probabilities of a question's options.

Every map is increasing, so of a choice or a score the likeliest option stays the likeliest; except a map with biases,
which takes a model's preference for an option away. Of a predicate the probability of yes may cross one half.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import orjson
from numpy.typing import NDArray

from ..core.calibration import Calibration, CalibrationMap, CalibrationMethod
from .question import OptionScores, Question, QuestionKind

Table = NDArray[np.float64]  # probabilities of options [answers, options]
FLOOR = 1e-12  # the least probability that is distinguished from 0


def apply_calibration(calibration: Calibration, question: Question, scores: OptionScores) -> OptionScores:
    """The scores with calibrated probabilities and the name of the map; as they are if there is none for the
    question.
    """
    found = find_map(calibration, question)
    if found is None:
        return scores
    shares = np.array([scores.probabilities])
    [row] = map_probabilities(question.kind, found.method, found.parameters, shares).tolist()
    return replace(scores, probabilities=tuple(row), calibration=found.name)


def find_map(calibration: Calibration, question: Question) -> CalibrationMap | None:
    """The map of this very question, else that of its kind."""
    maps = calibration.by_target
    digest = digest_question(question) if calibration.has_questions else ""
    own = maps.get((question.kind, digest))
    if own is not None and own.method == "bias" and len(own.parameters) != 1 + len(question.options):
        own = None  # a file that was changed by hand
    return own or maps.get((question.kind, ""))


def digest_question(question: Question) -> str:
    """A digest of all that its answer depends on beside the text: the same question under another name has the same.

    Names of a predicate's options are left out, because the model does not read them.
    """
    names = [] if question.kind == "predicate" else [option.name for option in question.options]
    described = [option.description for option in question.options]
    content = orjson.dumps([question.kind, question.instructions, names, described, question.permutations])
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def map_probabilities(
    kind: QuestionKind, method: CalibrationMethod, parameters: Sequence[float], shares: Table
) -> Table:
    """Calibrated probabilities [N, K] of `shares` [N, K], whose rows sum to 1. Of an answer with fewer options than K
    the last columns are NaN, and stay it.

    Platt and isotonic maps are of one option against the rest: of a predicate that of yes, of a choice each, after
    which their sum is made 1 (Zadrozny and Elkan 2002). Temperature: Guo et al. 2017. Biases are of the options of one
    question (Alexandari et al. 2020).
    """
    logs = MAPS[method](np.clip(shares, FLOOR, 1 - FLOOR), parameters)  # of shares that do not sum to 1 yet
    if kind == "predicate" and method != "temperature":
        yes = np.clip(np.exp(logs[:, 0]), FLOOR, 1 - FLOOR)
        return np.stack([yes, 1 - yes], axis=1)
    raised = np.exp(logs - np.nanmax(logs, axis=1, keepdims=True))
    return np.asarray(raised / np.nansum(raised, axis=1, keepdims=True))


def scale_by_temperature(shares: Table, parameters: Sequence[float]) -> Table:
    return np.asarray(np.log(shares) / parameters[0])


def scale_by_logistic(shares: Table, parameters: Sequence[float]) -> Table:
    slope, intercept = parameters
    logits = slope * logits_of(shares) + intercept
    return np.asarray(np.minimum(logits, 0) - np.log1p(np.exp(-np.abs(logits))))


def interpolate_knots(shares: Table, parameters: Sequence[float]) -> Table:
    count = len(parameters) // 2
    return np.asarray(np.log(np.interp(shares, parameters[:count], parameters[count:])))


def add_biases(shares: Table, parameters: Sequence[float]) -> Table:
    temperature, *biases = parameters
    return np.asarray(np.log(shares) / temperature + np.array(biases))


def logits_of(shares: Table) -> Table:
    return np.asarray(np.log(shares) - np.log1p(-shares))


MAPS = {
    "temperature": scale_by_temperature,
    "platt": scale_by_logistic,
    "isotonic": interpolate_knots,
    "bias": add_biases,
}
