"""Connections to a replica that have not shown yet that they know the secret.

There are at most MOST of them; the oldest makes room for a new one.  A flood of them writes one line a second into the
log.
"""

import logging
import time
from asyncio import StreamWriter
from collections.abc import Callable

MOST = 64
QUIET_S = 1.0  # seconds between two lines in the log

log = logging.getLogger("polyhead.replica")


class Strangers:
    """Lives on the event loop thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[StreamWriter, None] = {}  # oldest first
        self._logged = -QUIET_S + clock()
        self._unlogged = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, writer: StreamWriter) -> None:
        """One more; the oldest is aborted where that would be more than MOST."""
        while len(self._waiting) >= MOST:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]  # now: its task ends some turns of the loop later
            oldest.transport.abort()
        self._waiting[writer] = None

    def leave(self, writer: StreamWriter) -> None:
        """It has shown that it knows the secret, or it is over."""
        self._waiting.pop(writer, None)

    def refused(self, error: Exception) -> None:
        """Log why one was refused; those of the same second are counted, and the next line has their number."""
        now = self._clock()
        if now - self._logged < QUIET_S:
            self._unlogged += 1
            return
        more = f"; {self._unlogged} more since the last line" if self._unlogged else ""
        self._logged, self._unlogged = now, 0
        log.warning("a connection without the secret is closed: %s%s", error or type(error).__name__, more)
