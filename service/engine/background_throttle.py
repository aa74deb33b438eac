"""Limits the time of background workers (explanations) while foreground workers are busy.

Clients that wait for an answer before they send the next request leave the device idle for a moment after every step.
A background worker that used every such moment would take half of the time (deceptive idleness, Iyer and Druschel
2001).  So the load of the foreground is measured without the time that background workers took.  Where that load is
high, a background worker is held to its share of the time, even in moments when the foreground has no work.
"""

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Protocol, TypeVar

BACKGROUND_SHARE = 0.05  # of the time, for all background workers together, while the foreground is busy
BUSY_FRACTION = 0.3  # of the time left to the foreground: from this load on it counts as busy
DECAY_S = 0.2  # time constant of the decay: a longer pause of the foreground is no gap between two of its steps


class ThrottledWorker(Protocol):
    @property
    def is_background(self) -> bool:
        """Whether the worker uses time that others leave, and may be held back."""


P = TypeVar("P", bound=ThrottledWorker)


class BackgroundThrottle:
    """Measures the load of the foreground, as a mean with exponential decay, and decides who may step."""

    def __init__(self) -> None:
        self.wait_s: float | None = None  # seconds until a background worker that is held back may step; None: none is
        self._load = 0.0  # part of the time left by background workers that foreground steps took
        self._updated_at = perf_counter()
        self._background_at = 0.0  # from this time on a background worker has used no more than its share

    def select_runnable(self, wanting: Sequence[P]) -> list[P]:
        """The workers of `wanting` that may step now.  Sets `wait_s` where background workers are held back."""
        now = perf_counter()
        held_s = self._held_seconds(now) if any(each.is_background for each in wanting) else 0.0
        self.wait_s = held_s if held_s > 0 else None
        return [each for each in wanting if self.wait_s is None or not each.is_background]

    def record_turn(self, worker: ThrottledWorker, began: float, ended: float) -> None:
        """Count a step of `worker` from `began` to `ended` (`time.perf_counter`, seconds)."""
        self._decay(began)
        if worker.is_background:
            self._background_at = ended + (ended - began) * (1 / BACKGROUND_SHARE - 1)
        else:
            self._load = 1 - (1 - self._load) * math.exp((began - ended) / DECAY_S)
        self._updated_at = ended

    def _held_seconds(self, now: float) -> float:
        """Seconds until a background worker may step: its share is kept, or the foreground has become idle."""
        self._decay(now)
        if self._load <= BUSY_FRACTION:
            return 0.0
        return min(self._background_at - now, DECAY_S * math.log(self._load / BUSY_FRACTION))

    def _decay(self, now: float) -> None:
        self._load *= math.exp(min(self._updated_at - now, 0.0) / DECAY_S)
        self._updated_at = now
