"""Measurements of speculative decoding: how often drafts are right, and how long steps take."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

PRIOR_TRIALS = 4.0  # weight of the assumed rate, in trials
MAX_TRIALS_COUNTED = 64.0  # after so many trials all counts are halved
AVERAGED_STEPS = 8  # steps over which seconds are averaged
STALE_STEPS, STALE_FACTOR = 512, 0.9  # after so many steps, seconds of larger steps are multiplied by this
ROW_BOUNDS = (
    *range(1, 17),
    *(round(16 * 2 ** (part / 4)) for part in range(1, 65)),
)  # upper bounds of the kinds of steps, in rows


class HitRates:
    """How often draft tokens were right, by kind.  Older trials count less.

    `first` are the rates assumed before anything is measured.  With a parent, its rates are assumed instead, and it
    counts all trials of its children.
    """

    def __init__(self, first: Sequence[float], wider: "HitRates | None" = None) -> None:
        self._priors, self._parent = first, wider
        self._hits, self._trials = [0.0] * len(first), [0.0] * len(first)

    def child(self) -> "HitRates":
        """The rates of one sequence."""
        return HitRates(self._priors, self)

    def rate(self, kind: int = 0) -> float:
        expected = self._parent.rate(kind) if self._parent else self._priors[kind]
        return (self._hits[kind] + PRIOR_TRIALS * expected) / (self._trials[kind] + PRIOR_TRIALS)

    def record(self, kind: int, right: bool) -> None:
        if self._parent:
            self._parent.record(kind, right)
        if self._trials[kind] >= MAX_TRIALS_COUNTED:
            self._hits[kind] /= 2
            self._trials[kind] /= 2
        self._hits[kind] += right
        self._trials[kind] += 1


class StepCosts:
    """Seconds of a step by its number of rows: a running average in which one disturbed step counts little."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by kind
        self._measured_at: dict[int, int] = {}  # number of the step, by kind
        self._steps = 0

    @property
    def has_data(self) -> bool:
        """Whether any step was measured."""
        return self._steps > 0

    def record(self, rows: int, seconds: float) -> None:
        kind = bisect_left(ROW_BOUNDS, rows)
        self._steps += 1
        before = self._seconds.get(kind, seconds) if self._age(kind) < STALE_STEPS else seconds
        self._seconds[kind] = before + (min(seconds, 2 * before) - before) / AVERAGED_STEPS
        self._measured_at[kind] = self._steps

    def estimate(self, rows: int, more: int) -> list[float]:
        """Seconds of a step of `rows`, `rows` + 1, ..., `rows` + `more` rows; 0 while nothing is measured.

        Values in between are interpolated.  A larger step that was not measured for long is assumed to be cheaper and
        cheaper, so that it is tried and measured again.
        """
        if not self._seconds:
            return [0.0] * (more + 1)
        base, known = bisect_left(ROW_BOUNDS, rows), sorted(self._seconds)
        fading = [STALE_FACTOR ** (self._age(kind) // STALE_STEPS) if kind > base else 1.0 for kind in known]
        at = [ROW_BOUNDS[kind] for kind in known]
        seconds = [self._seconds[kind] * faded for kind, faded in zip(known, fading, strict=True)]
        if len(known) > 1:
            slope = max(seconds[-1] - seconds[-2], 0.0) / (at[-1] - at[-2])
            at.append(at[-1] + rows + more)
            seconds.append(seconds[-1] + slope * (rows + more))
        curve = np.interp(range(rows, rows + more + 1), at, seconds)
        rising: list[float] = np.maximum(curve, curve[0]).tolist()
        return rising

    def _age(self, kind: int) -> int:
        return self._steps - self._measured_at.get(kind, 0)
