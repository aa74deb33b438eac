"""Detects pauses of the whole process: it was stopped (SIGSTOP), frozen, or its machine was paused.

The event loop's clock goes on during a pause, so a step would look as if it hung.
"""

import asyncio
from collections import deque
from time import perf_counter

CHECK_INTERVAL_S = 1.0
MAX_PAUSES = 16  # that are remembered


class PauseDetector:
    """Used on the event loop thread only."""

    def __init__(self) -> None:
        self._last_check = perf_counter()
        self._pauses: deque[tuple[float, float]] = deque(maxlen=MAX_PAUSES)  # when each ended, and its seconds

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._last_check = perf_counter()
        loop.call_later(CHECK_INTERVAL_S, self._check_and_repeat, loop)

    def paused_since(self, moment: float) -> float:
        """Seconds of all pauses that ended after `moment` (`time.perf_counter`)."""
        self._check()
        return sum(seconds for ended, seconds in self._pauses if ended > moment)

    def _check_and_repeat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._check()
        self.start(loop)

    def _check(self) -> None:
        """A check that is more than one interval late means a pause."""
        now = perf_counter()
        if (late := now - self._last_check - CHECK_INTERVAL_S) > CHECK_INTERVAL_S:
            self._pauses.append((now, late))
        self._last_check = now
