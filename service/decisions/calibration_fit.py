"""Fits a calibration on labelled answers.

Half of the texts is for fitting, the other half for measuring. The method is chosen by cross-validation within the
first half, so figures of the second half are of texts that had no part in the fit. A map that makes the log loss
higher is not used. Platt and isotonic fits are scikit-learn's, from the extra `calibrate`; biases are
found by SciPy, which comes with it.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal

import numpy as np

from ..core.calibration import CalibrationMethod
from .calibration import FLOOR, Table, logits_of, map_probabilities
from .calibration_file import (
    MAX_BIAS,
    MAX_INTERCEPT,
    MAX_KNOTS,
    MAX_SLOPE,
    MAX_TEMPERATURE,
    MIN_SHARE,
    MIN_TEMPERATURE,
    AskedQuestion,
    Bias,
    FileMap,
    Isotonic,
    Measures,
    Platt,
    Temperature,
)
from .calibration_measures import (
    Labels,
    Truth,
    Vector,
    answer_losses,
    chance_error,
    find_threshold,
    judge_answers,
    measure_answers,
    one_hot,
    share_by_confidence,
)
from .question import QuestionKind

HAS_SKLEARN = find_spec("sklearn") is not None
if HAS_SKLEARN:
    from scipy.optimize import minimize
    from sklearn.isotonic import IsotonicRegression
    from sklearn.linear_model import LogisticRegression

MIN_ANSWERS = 20  # in each half
FOLDS = 5  # of the cross-validation
STEPS = 40  # of the search for a temperature; each halves the interval
MIN_SLOPE = 1e-3  # of a Platt map
LINEAR_SHARE = 1e-3  # of an isotonic map: a line, so that it increases everywhere

FittedMap = Temperature | Platt | Isotonic | Bias
ChosenMethod = CalibrationMethod | Literal["none"]


@dataclass(frozen=True)
class LabelledAnswers:
    """Answers to questions of one kind: probabilities [N, K], NaN after the last option, the right options [N], and
    whether an answer is held out [N].
    """

    kind: QuestionKind
    shares: Table
    labels: Labels
    held_out: Truth

    def part(self, *, held_out: bool) -> tuple[Table, Labels]:
        chosen = self.held_out == held_out
        return self.shares[chosen], self.labels[chosen]


@dataclass(frozen=True)
class Fit:
    """The result for one kind of question, or one question.

    `map` is None if it would make the log loss higher. `losses` are those of the cross-validation, by method.
    `before` and `after` are of the held-out answers; `chance` is the calibration error that they have
    by chance (chance_error).
    """

    kind: QuestionKind
    question: AskedQuestion | None
    map: FittedMap | None
    losses: Mapping[ChosenMethod, float]
    fitted_answers: int
    before: Measures
    after: Measures
    chance: float
    confidences: Vector = field(repr=False)
    right: Truth = field(repr=False)

    def as_file_map(self, precisions: Iterable[float]) -> FileMap | None:
        """The map as the file has it, with thresholds for these precisions."""
        if self.map is None:
            return None
        found = (find_threshold(self.confidences, self.right, precision) for precision in precisions)
        return FileMap(
            kind=self.kind,
            question=self.question,
            map=self.map,
            fitted_answers=self.fitted_answers,
            held_out_answers=len(self.right),
            before=self.before,
            after=self.after,
            confidences=share_by_confidence(self.confidences),
            thresholds=[threshold for threshold in found if threshold is not None],
        )


def split_texts(texts: Sequence[str]) -> Truth:
    """Whether each text is held out: half of the different ones, whatever their order."""
    digests = {text: hashlib.blake2b(text.encode(errors="replace")).digest() for text in texts}
    order = sorted(digests, key=digests.__getitem__)
    held_out = set(order[1::2])
    return np.array([text in held_out for text in texts], np.bool_)


def allowed_methods(kind: QuestionKind, *, of_one_question: bool) -> tuple[CalibrationMethod, ...]:
    """The methods for a kind of question that can be fitted here; some are for the options of one question."""
    if not HAS_SKLEARN or kind == "score":
        return ("temperature",)
    return ("temperature", "platt", "isotonic", *(("bias",) if kind == "choice" and of_one_question else ()))


def fit_answers(answers: LabelledAnswers, question: AskedQuestion | None, methods: Sequence[CalibrationMethod]) -> Fit:
    """Fit the best of `methods`. Both halves have at least MIN_ANSWERS answers.

    The map is used unless it makes the log loss higher by over one standard error. This is judged by all answers: those
    of the first half in their folds, and the held-out ones. A needless map of one parameter that was fitted on N
    answers costs about 1 / 2N nats an answer (Wilks 1938), much less than a useful one gains that one split of few
    answers hides.
    """
    shares, labels = answers.part(held_out=False)
    losses = cross_validate(answers.kind, shares, labels, methods)
    method = choose_method(losses)
    tried: FittedMap | None = FITS[method](answers.kind, shares, labels)
    held_out, right_options = answers.part(held_out=True)
    calibrated = apply_fit(answers.kind, tried, held_out)
    after = np.concatenate([losses[method], answer_losses(calibrated, right_options)])
    before = np.concatenate([losses["none"], answer_losses(held_out, right_options)])
    if is_larger(after, before):
        tried, calibrated = None, held_out
    confidences, right = judge_answers(calibrated, right_options)
    return Fit(
        kind=answers.kind,
        question=question,
        map=tried,
        losses={method: float(each.mean()) for method, each in losses.items()},
        fitted_answers=len(labels),
        before=measure_answers(held_out, right_options),
        after=measure_answers(calibrated, right_options),
        chance=chance_error(confidences),
        confidences=confidences,
        right=right,
    )


def cross_validate(
    kind: QuestionKind, shares: Table, labels: Labels, methods: Sequence[CalibrationMethod]
) -> Mapping[ChosenMethod, Vector]:
    """The log losses [N] of answers in folds that a map was not fitted on, by method; those of no map as `none`."""
    losses: dict[ChosenMethod, Vector] = {"none": answer_losses(shares, labels)}
    folds = np.random.default_rng(0).permutation(len(labels)) % FOLDS
    for method in methods:
        calibrated = np.empty_like(shares)
        for fold in range(FOLDS):
            inside = folds == fold
            fitted = FITS[method](kind, shares[~inside], labels[~inside])
            calibrated[inside] = apply_fit(kind, fitted, shares[inside])
        losses[method] = answer_losses(calibrated, labels)
    return losses


def choose_method(losses: Mapping[ChosenMethod, Vector]) -> CalibrationMethod:
    """The first method whose mean loss is within one standard error of the lowest (Breiman et al. 1984, section 3.4.3).

    Methods have more parameters from first to last, so of those that cannot be told apart the simplest is chosen.
    """
    methods = [method for method in losses if method != "none"]
    best = min(methods, key=lambda method: float(losses[method].mean()))
    return next(method for method in methods if not is_larger(losses[method], losses[best]))


def is_larger(losses: Vector, others: Vector) -> bool:
    """Whether the mean of these losses is larger than that of others of the same answers, by over one standard error of
    the difference.
    """
    more = losses - others
    return bool(more.mean() > more.std(ddof=1) / np.sqrt(len(more)))


def apply_fit(kind: QuestionKind, fitted: FittedMap | None, shares: Table) -> Table:
    return shares if fitted is None else map_probabilities(kind, fitted.method, fitted.parameters, shares)


def fit_temperature(_: QuestionKind, shares: Table, labels: Labels) -> Temperature:
    """The temperature with the lowest log loss (Guo et al. 2017).

    The loss is convex in the inverse temperature, so the root of its derivative is found by bisection.
    """
    logs = np.log(np.clip(shares, FLOOR, 1 - FLOOR))
    expected = logs[np.arange(len(labels)), labels].mean()
    below = np.nan_to_num(logs - np.nanmax(logs, axis=1, keepdims=True), nan=-np.inf)
    logs = np.nan_to_num(logs)

    def slope(inverse: float) -> float:
        powers = np.exp(inverse * below)
        return float(((powers * logs).sum(axis=1) / powers.sum(axis=1)).mean() - expected)

    low, high = np.log(1 / MAX_TEMPERATURE), np.log(1 / MIN_TEMPERATURE)
    for _step in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(float(np.exp(middle))) > 0 else (middle, high)
    return Temperature(temperature=float(np.clip(np.exp(-low), MIN_TEMPERATURE, MAX_TEMPERATURE)))


def one_against_rest(kind: QuestionKind, shares: Table, labels: Labels) -> tuple[Vector, Vector]:
    """The probability of each option and 1 if it is right; of a predicate that of yes alone."""
    if kind == "predicate":
        return shares[:, 0], np.asarray(labels == 0, np.float64)
    present = ~np.isnan(shares)
    return shares[present], one_hot(shares, labels)[present]


def fit_platt(kind: QuestionKind, shares: Table, labels: Labels) -> Platt:
    """A logistic function of the logit, with Platt's smoothed targets (Platt 1999).

    Where the best one would decrease, it is nearly flat: every answer gets about the share that is right.
    """
    found, right = one_against_rest(kind, shares, labels)
    positives = right.sum()
    high, low = (positives + 1) / (positives + 2), 1 / (len(right) - positives + 2)
    target = np.where(right > 0, high, low)
    logits = np.tile(logits_of(np.clip(found, FLOOR, 1 - FLOOR)), 2)[:, None]
    classes = np.repeat([1, 0], len(right))
    model = LogisticRegression(C=np.inf).fit(logits, classes, sample_weight=np.concatenate([target, 1 - target]))
    slope, intercept = float(model.coef_[0, 0]), float(model.intercept_[0])
    if slope < MIN_SLOPE:
        slope, intercept = MIN_SLOPE, float(logits_of(target.mean(keepdims=True))[0])
    return Platt(slope=min(slope, MAX_SLOPE), intercept=float(np.clip(intercept, -MAX_INTERCEPT, MAX_INTERCEPT)))


def fit_isotonic(kind: QuestionKind, shares: Table, labels: Labels) -> Isotonic:
    """An increasing function through at most MAX_KNOTS points (Zadrozny and Elkan 2002).

    Where all answers of a kind of confidence are right, or none is, it stays away from 1 and 0 by as much as the number
    of answers allows.
    """
    found, right = one_against_rest(kind, shares, labels)
    model = IsotonicRegression().fit(found, right)
    x, y = (np.asarray(each, np.float64) for each in (model.X_thresholds_, model.y_thresholds_))
    x, y = np.concatenate([[0.0], x, [1.0]]), np.concatenate([y[:1], y, y[-1:]])
    x, first = np.unique(x, return_index=True)
    y = y[first]
    if len(x) > MAX_KNOTS:
        kept = np.linspace(0, len(x) - 1, MAX_KNOTS).round().astype(int)
        x, y = x[kept], y[kept]
    margin = max(1 / (len(right) + 2), MIN_SHARE)
    line = margin + x * (1 - 2 * margin)
    y = (1 - LINEAR_SHARE) * np.clip(y, margin, 1 - margin) + LINEAR_SHARE * line
    return Isotonic(x=x.tolist(), y=y.tolist())


def fit_bias(_: QuestionKind, shares: Table, labels: Labels) -> Bias:
    """The temperature and the biases with the lowest log loss. A small penalty on the squares of biases, as of one
    answer, keeps that of an option that is never right finite.
    """
    logs = np.log(np.clip(shares, FLOOR, 1 - FLOOR))
    right, count = one_hot(shares, labels), len(labels)

    def loss(parameters: Vector) -> tuple[float, Vector]:
        logits = parameters[0] * logs + parameters[1:]
        logits -= logits.max(axis=1, keepdims=True)
        found = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        error, biases = np.exp(found) - right, parameters[1:]
        slopes = np.concatenate([[(error * logs).sum()], error.sum(axis=0) + biases])
        return float((biases @ biases / 2 - found[right > 0].sum()) / count), slopes / count

    start = np.zeros(1 + shares.shape[1])
    start[0] = 1.0
    bounds = [(1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE), *[(-MAX_BIAS, MAX_BIAS)] * shares.shape[1]]
    inverse, *biases = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x.tolist()
    return Bias(temperature=float(np.clip(1 / inverse, MIN_TEMPERATURE, MAX_TEMPERATURE)), biases=biases)


FITS: Mapping[CalibrationMethod, Callable[[QuestionKind, Table, Labels], FittedMap]] = {
    "temperature": fit_temperature,
    "platt": fit_platt,
    "isotonic": fit_isotonic,
    "bias": fit_bias,
}
