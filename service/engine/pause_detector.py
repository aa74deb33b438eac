"""How long the process did not run: it was stopped (SIGSTOP), frozen, or its machine was paused.

The event loop's clock goes on meanwhile, so that a step under way would look as if it hung.
"""

import asyncio
from collections import deque
from time import perf_counter

BEAT_S = 1.0
PAUSES = 16  # that are remembered


class Pulse:
    """Lives on the event loop thread."""

    def __init__(self) -> None:
        self._last = perf_counter()
        self._pauses: deque[tuple[float, float]] = deque(maxlen=PAUSES)  # when each ended, and its seconds

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._last = perf_counter()
        loop.call_later(BEAT_S, self._beat, loop)

    def paused_since(self, moment: float) -> float:
        """Seconds of all pauses that ended after `moment` (`time.perf_counter`)."""
        self._look()
        return sum(seconds for ended, seconds in self._pauses if ended > moment)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._look()
        self.start(loop)

    def _look(self) -> None:
        """A beat that is more than a beat late tells of a pause."""
        now = perf_counter()
        if (late := now - self._last - BEAT_S) > BEAT_S:
            self._pauses.append((now, late))
        self._last = now
