"""Measures of labelled decisions: accuracy, Brier score, calibration error, log loss, and thresholds of confidence.

Tables of probabilities [N, K] have a row for each answer, with NaN after the last option of its question. Labels [N]
are the numbers of the right options. The confidence of an answer is the probability of its likeliest option.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.calibration import CONFIDENCE_BINS
from .calibration import FLOOR, Table
from .calibration_file import RELIABILITY_BINS, FileBin, Measures, Threshold

Labels = NDArray[np.int64]
Vector = NDArray[np.float64]
Truth = NDArray[np.bool_]
DRAWS = 200  # sets of answers that are drawn for the error by chance
CERTAINTY = 1.645  # standard deviations; one-sided 95 %


def measure_answers(shares: Table, labels: Labels) -> Measures:
    """The measures of answers. The Brier score is the sum over all options (Brier 1950), from 0 to 2."""
    confidences, right = judge_answers(shares, labels)
    bins = sort_into_bins(confidences, right)
    return Measures(
        accuracy=float(right.mean()),
        brier=float(((np.nan_to_num(shares) - one_hot(shares, labels)) ** 2).sum(axis=1).mean()),
        ece=calibration_error(bins),
        log_loss=log_loss(shares, labels),
        bins=bins,
    )


def log_loss(shares: Table, labels: Labels) -> float:
    """The mean of -log of the right option's probability, in nats."""
    return float(answer_losses(shares, labels).mean())


def answer_losses(shares: Table, labels: Labels) -> Vector:
    """-log of the right option's probability [N], in nats."""
    return np.asarray(-np.log(np.maximum(shares[np.arange(len(labels)), labels], FLOOR)))


def one_hot(shares: Table, labels: Labels) -> Table:
    """1 for the right option of each answer, 0 for all others [N, K]."""
    return np.asarray(np.arange(shares.shape[1]) == labels[:, None], np.float64)


def judge_answers(shares: Table, labels: Labels) -> tuple[Vector, Truth]:
    """The confidence of each answer, and whether it is right."""
    return np.nanmax(shares, axis=1), np.nanargmax(shares, axis=1) == labels


def sort_into_bins(confidences: Vector, right: Truth) -> list[FileBin]:
    """RELIABILITY_BINS bins with the same number of answers, or one more, by increasing confidence.

    Answers of equal confidence are in one bin, whatever their order, so bins may be fewer and larger.
    """
    order = np.argsort(confidences, kind="stable")
    parts = np.split(order, bin_starts(confidences[order])[1:])
    return [
        FileBin(confidence=float(confidences[part].mean()), accuracy=float(right[part].mean()), answers=len(part))
        for part in parts
    ]


def bin_starts(rising: Vector) -> NDArray[np.intp]:
    """The first answer of each bin, of answers with rising confidences."""
    count = min(RELIABILITY_BINS, len(rising))
    even = np.arange(count) * len(rising) // count
    return np.unique(np.searchsorted(rising, rising[even], side="left"))


def calibration_error(bins: list[FileBin]) -> float:
    """The expected calibration error: the mean distance between confidence and accuracy, weighted by answers."""
    total = sum(each.answers for each in bins)
    return sum(each.answers * abs(each.confidence - each.accuracy) for each in bins) / total


def chance_error(confidences: Vector) -> float:
    """The calibration error that answers of these confidences have by chance if the confidences are exactly right.

    A few hundred answers have an error of several hundredths, however well they are calibrated.
    """
    source, rising = np.random.default_rng(0), np.sort(confidences)
    starts = bin_starts(rising)
    draws = (np.add.reduceat((source.random(len(rising)) < rising) - rising, starts) for _ in range(DRAWS))
    return float(np.mean([np.abs(gaps).sum() for gaps in draws]) / len(rising))


def share_by_confidence(confidences: Vector) -> list[float]:
    """The share of answers in each of CONFIDENCE_BINS bins of equal width."""
    counts: NDArray[Any] = np.histogram(confidences, bins=CONFIDENCE_BINS, range=(0, 1))[0]
    return [float(share) for share in counts / counts.sum()]


def find_threshold(confidences: Vector, right: Truth, precision: float) -> Threshold | None:
    """The lowest confidence above which at least this share of answers is right; None if there is none."""
    order = np.argsort(-confidences, kind="stable")
    falling = confidences[order]
    precisions = np.cumsum(right[order]) / np.arange(1, len(order) + 1)
    is_last = np.append(falling[:-1] > falling[1:], True)  # of answers with the same confidence
    allowed = np.flatnonzero(is_last & (precisions >= precision))
    if not len(allowed):
        return None
    last = int(allowed[-1])
    return Threshold(
        precision=precision,
        confidence=float(falling[last]),
        share=(last + 1) / len(order),
        right=float(precisions[last]),
    )


def lower_bound(share: float, answers: int) -> float:
    """The share of right answers is at least this with a certainty of 95 % (Wilson 1927)."""
    square = CERTAINTY**2 / answers
    middle = share + square / 2
    return float(max(middle - np.sqrt(square * (share * (1 - share) + square / 4)), 0) / (1 + square))
