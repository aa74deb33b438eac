"""Connections to a replica that have not yet proved that they know the secret.

There are at most MAX_UNAUTHENTICATED; a new one replaces the oldest.  A flood of them writes one log line a second.
"""

import logging
import time
from asyncio import StreamWriter
from collections.abc import Callable

MAX_UNAUTHENTICATED = 64
LOG_INTERVAL_S = 1.0  # seconds between two lines in the log

log = logging.getLogger("polyhead.replica")


class UnauthenticatedConnections:
    """The set of unauthenticated connections.  It lives on the event loop thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._connections: dict[StreamWriter, None] = {}  # oldest first
        self._logged = -LOG_INTERVAL_S + clock()
        self._unlogged = 0

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, writer: StreamWriter) -> None:
        """Add a connection.  The oldest one is aborted if there would be more than MAX_UNAUTHENTICATED."""
        while len(self._connections) >= MAX_UNAUTHENTICATED:
            oldest = next(iter(self._connections))
            del self._connections[oldest]  # its task ends a few turns of the loop later
            oldest.transport.abort()
        self._connections[writer] = None

    def remove(self, writer: StreamWriter) -> None:
        """Remove a connection that is authenticated or over."""
        self._connections.pop(writer, None)

    def log_refusal(self, error: Exception) -> None:
        """Log why a connection was refused.  Those within one second are counted, and the next line has their
        number.
        """
        now = self._clock()
        if now - self._logged < LOG_INTERVAL_S:
            self._unlogged += 1
            return
        more = f"; {self._unlogged} more since the last line" if self._unlogged else ""
        self._logged, self._unlogged = now, 0
        log.warning("a connection without the secret is closed: %s%s", error or type(error).__name__, more)
