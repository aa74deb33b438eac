"""What was measured of foretelling tokens: how often it is right, and what a step takes.

Plain integers and seconds.  The one idea: both are small tables that forget, so they can be asked before every step.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

PRIOR_TRIALS = 4.0  # for how many trials what is expected counts
MAX_TRIALS_COUNTED = 64.0  # trials after which those before count half
AVERAGED_STEPS = 8  # steps over which seconds are averaged
STALE_STEPS, STALE_FACTOR = 512, 0.9  # after so many steps what was measured with more rows counts for so much
ROW_BOUNDS = (
    *range(1, 17),
    *(round(16 * 2 ** (part / 4)) for part in range(1, 65)),
)  # a step's rows in kinds, up to each


class HitRates:
    """How often what was foretold came, by kind.

    `first` is what is expected of each before anything is measured; instead, where there are `wider` ones, what those
    say, which are told what is counted here.
    """

    def __init__(self, first: Sequence[float], wider: "HitRates | None" = None) -> None:
        self._priors, self._parent = first, wider
        self._hits, self._trials = [0.0] * len(first), [0.0] * len(first)

    def child(self) -> "HitRates":
        """Those of one sequence."""
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
    """What a step takes, by its rows: an average of the last ones, of which one that was disturbed spoils little."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by kind
        self._measured_at: dict[int, int] = {}  # in which step, by kind
        self._steps = 0

    @property
    def has_data(self) -> bool:
        """Whether there was a step."""
        return self._steps > 0

    def record(self, rows: int, seconds: float) -> None:
        kind = bisect_left(ROW_BOUNDS, rows)
        self._steps += 1
        before = self._seconds.get(kind, seconds) if self._age(kind) < STALE_STEPS else seconds
        self._seconds[kind] = before + (min(seconds, 2 * before) - before) / AVERAGED_STEPS
        self._measured_at[kind] = self._steps

    def estimate(self, rows: int, more: int) -> list[float]:
        """Seconds of a step of `rows`, and of one with one more, and so on, up to `more`.

        What is not known lies in between.  What was more, and was not looked at for long, is thought to be less by and
        by, so that it is found out again if it comes to matter.  0 while nothing is known.
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
