"""What was measured of foretelling tokens: how often it is right, and what a step takes.

Plain integers and seconds.  The one idea: both are small tables that forget, so they can be asked before every step.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

DOUBT = 4.0  # for how many trials what is expected counts
MEMORY = 64.0  # trials after which those before count half
RECENT = 8  # steps over which seconds are averaged
STALE, FADING = 512, 0.9  # after so many steps what was measured with more rows counts for so much
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
    """What a step takes, by its rows: an average of the last ones, of which one that was disturbed spoils little."""

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
        before = self._seconds.get(kind, seconds) if self._age(kind) < STALE else seconds
        self._seconds[kind] = before + (min(seconds, 2 * before) - before) / RECENT
        self._looked[kind] = self._steps

    def of(self, rows: int, more: int) -> list[float]:
        """Seconds of a step of `rows`, and of one with one more, and so on, up to `more`.

        What is not known lies in between.  What was more, and was not looked at for long, is thought to be less by and
        by, so that it is found out again if it comes to matter.  0 while nothing is known.
        """
        if not self._seconds:
            return [0.0] * (more + 1)
        base, known = bisect_left(ROWS, rows), sorted(self._seconds)
        fading = [FADING ** (self._age(kind) // STALE) if kind > base else 1.0 for kind in known]
        at = [ROWS[kind] for kind in known]
        seconds = [self._seconds[kind] * faded for kind, faded in zip(known, fading, strict=True)]
        if len(known) > 1:
            slope = max(seconds[-1] - seconds[-2], 0.0) / (at[-1] - at[-2])
            at.append(at[-1] + rows + more)
            seconds.append(seconds[-1] + slope * (rows + more))
        curve = np.interp(range(rows, rows + more + 1), at, seconds)
        rising: list[float] = np.maximum(curve, curve[0]).tolist()
        return rising

    def _age(self, kind: int) -> int:
        return self._steps - self._looked.get(kind, 0)
