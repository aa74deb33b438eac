"""When those that take what others leave may have a turn.

Knows what turns took, not what they were for.  The one idea: clients that wait for each other's answers leave a device
idle for a moment after every step, and whoever takes each such moment takes half of everything (deceptive idleness,
Iyer and Druschel 2001).  So how busy the others are is measured without what was taken from them; where that is much,
a patient worker stays within its share of the time, whether anybody wants the moment or not.
"""

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Protocol, TypeVar

SHARE = 0.05  # of the time, for all that are patient together, where others are busy
BUSY = 0.3  # part of the time that was left to them: from then on others are
MEMORY_S = 1.0  # how long what was measured counts, about
LEFT_S = 0.1  # of MEMORY_S that count as left to others, however much of it the patient ones took


class Paced(Protocol):
    @property
    def patient(self) -> bool:
        """Whether it takes what others leave."""


P = TypeVar("P", bound=Paced)


class Pace:
    """Seconds of turns, of which the older count less and less."""

    def __init__(self) -> None:
        self.left: float | None = None  # until somebody may go who was held back, seconds
        self._others = self._own = 0.0  # of the last MEMORY_S
        self._at = perf_counter()
        self._next = 0.0  # when a patient one has had no more than its share

    def free(self, wanting: Sequence[P]) -> list[P]:
        """Those of them that may have a turn now."""
        now = perf_counter()
        self.left = self._next - now if self._held(now) and any(each.patient for each in wanting) else None
        return [each for each in wanting if self.left is None or not each.patient]

    def took(self, worker: Paced, began: float, ended: float) -> None:
        """A turn is over."""
        self._fade(ended)
        if worker.patient:
            self._own += ended - began
            self._next = ended + (ended - began) * (1 / SHARE - 1)
        else:
            self._others += ended - began

    def _held(self, now: float) -> bool:
        self._fade(now)
        return now < self._next and self._others > BUSY * max(MEMORY_S - self._own, LEFT_S)

    def _fade(self, now: float) -> None:
        kept = math.exp((self._at - now) / MEMORY_S)
        self._others, self._own, self._at = self._others * kept, self._own * kept, now
