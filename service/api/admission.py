"""How many requests are let in at once, and how long the others are told to wait.

Knows nothing of what is asked.  The one idea: a bound on requests in flight is a bound on memory, kept before a body
is read; and the wait is computed from how fast answers left lately, not guessed.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.errors import Overloaded, Unavailable

REMEMBERED = 64  # answers from which the rate is measured
LONGEST_WAIT = 60  # seconds


class Admission:
    """At most `limit` requests in flight.  Lives on the event loop thread."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.clock = limit, clock
        self.in_flight = 0
        self.draining = False
        self._began = clock()
        self._left: deque[float] = deque(maxlen=REMEMBERED)

    def close(self) -> None:
        """Let nobody in any more; what is in flight goes on."""
        self.draining = True

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """A place in flight.  Raises Unavailable while draining and Overloaded when there is none."""
        if self.draining:
            raise Unavailable("the server is shutting down", retry_after=self.wait())
        if self.in_flight >= self.limit:
            message = f"{self.limit} requests are in flight, no more are taken until one is answered"
            raise Overloaded(message, retry_after=self.wait())
        if self.in_flight == 0:
            # what was measured before a pause says nothing of now
            self._left.clear()
            self._began = self.clock()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self._left.append(self.clock())

    def wait(self) -> int:
        """Whole seconds in which what is in flight now leaves, at the rate of late; from 1 to LONGEST_WAIT."""
        since = self._left[0] if len(self._left) == REMEMBERED else self._began
        elapsed = max(self.clock() - since, 1e-9)
        rate = max(len(self._left), 1) / elapsed  # nobody left yet: at best one in the time that has passed
        return min(max(math.ceil(self.in_flight / rate), 1), LONGEST_WAIT)
