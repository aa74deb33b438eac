"""What was measured of foretelling tokens: how often it is right, and what a step takes.

Plain integers and seconds.  The one idea: both are small tables that forget, so they can be asked before every step.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

DOUBT = 4.0  # for how many trials what is expected counts
MEMORY = 64.0  # trials after which those before count half
DRIFT = 1.002  # by which the least seconds grow whenever they are looked at, as contexts do
STALE = 512  # steps after which what was measured with more rows counts no more
ROWS = (*range(1, 17), *(round(16 * 2 ** (part / 4)) for part in range(1, 65)))  # a step's rows in kinds, up to each


class Odds:
    """How often what was foretold came, by kind.

    `first` is what is expected of each before anything is measured; instead, where there are `wider` ones, what those
    say, which are told what is counted here.
    """

    def __init__(self, first: Sequence[float], wider: "Odds | None" = None) -> None:
        self._first, self._wider = first, wider
        self._right, self._tried = [0.0] * len(first), [0.0] * len(first)

    def narrower(self) -> "Odds":
        """Those of one sequence."""
        return Odds(self._first, self)

    def of(self, kind: int = 0) -> float:
        expected = self._wider.of(kind) if self._wider else self._first[kind]
        return (self._right[kind] + DOUBT * expected) / (self._tried[kind] + DOUBT)

    def count(self, kind: int, right: bool) -> None:
        if self._wider:
            self._wider.count(kind, right)
        if self._tried[kind] >= MEMORY:
            self._right[kind] /= 2
            self._tried[kind] /= 2
        self._right[kind] += right
        self._tried[kind] += 1


class Costs:
    """What a step takes, by its rows: the least it took, since what disturbs it only ever adds."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by kind
        self._looked: dict[int, int] = {}  # in which step, by kind
        self._steps = 0

    @property
    def known(self) -> bool:
        """Whether there was a step."""
        return self._steps > 0

    def learn(self, rows: int, seconds: float) -> None:
        kind = bisect_left(ROWS, rows)
        self._steps += 1
        self._looked[kind] = self._steps
        self._seconds[kind] = min(seconds, self._seconds.get(kind, seconds) * DRIFT)

    def of(self, rows: int, more: int) -> list[float]:
        """Seconds of a step of `rows`, and of one with one more, and so on, up to `more`.

        What is not known lies in between; what was known long ago is found out again.  0 while nothing is known.
        """
        base = bisect_left(ROWS, rows)
        known = [kind for kind in sorted(self._seconds) if kind <= base or self._steps - self._looked[kind] < STALE]
        if not known:
            return [0.0] * (more + 1)
        at, seconds = [ROWS[kind] for kind in known], [self._seconds[kind] for kind in known]
        if len(known) > 1:
            slope = max(seconds[-1] - seconds[-2], 0.0) / (at[-1] - at[-2])
            at.append(at[-1] + rows + more)
            seconds.append(seconds[-1] + slope * (rows + more))
        curve: list[float] = np.interp(range(rows, rows + more + 1), at, seconds).tolist()
        return curve
