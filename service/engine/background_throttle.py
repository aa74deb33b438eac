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

BACKGROUND_SHARE = 0.05  # of the time, for all that are patient together, where others are busy
BUSY_FRACTION = 0.3  # part of the time that was left to them: from then on others are
DECAY_S = 1.0  # how long what was measured counts, about
LEFT_S = 0.1  # of MEMORY_S that count as left to others, however much of it the patient ones took


class ThrottledWorker(Protocol):
    @property
    def is_background(self) -> bool:
        """Whether it takes what others leave."""


P = TypeVar("P", bound=ThrottledWorker)


class BackgroundThrottle:
    """Seconds of turns, of which the older count less and less."""

    def __init__(self) -> None:
        self.wait_s: float | None = None  # until somebody may go who was held back, seconds
        self._foreground_s = self._background_s = 0.0  # of the last MEMORY_S
        self._updated_at = perf_counter()
        self._background_at = 0.0  # when a patient one has had no more than its share

    def select_runnable(self, wanting: Sequence[P]) -> list[P]:
        """Those of them that may have a turn now."""
        now = perf_counter()
        self.wait_s = (
            self._background_at - now
            if self._is_throttling(now) and any(each.is_background for each in wanting)
            else None
        )
        return [each for each in wanting if self.wait_s is None or not each.is_background]

    def record_turn(self, worker: ThrottledWorker, began: float, ended: float) -> None:
        """A turn is over."""
        self._decay(ended)
        if worker.is_background:
            self._background_s += ended - began
            self._background_at = ended + (ended - began) * (1 / BACKGROUND_SHARE - 1)
        else:
            self._foreground_s += ended - began

    def _is_throttling(self, now: float) -> bool:
        self._decay(now)
        return now < self._background_at and self._foreground_s > BUSY_FRACTION * max(
            DECAY_S - self._background_s, LEFT_S
        )

    def _decay(self, now: float) -> None:
        kept = math.exp((self._updated_at - now) / DECAY_S)
        self._foreground_s, self._background_s, self._updated_at = (
            self._foreground_s * kept,
            self._background_s * kept,
            now,
        )
