"""Request bodies that are being received: a limit on their total bytes, and which of them is aborted to make room.

A request has no permit until its body is complete (`service.api.access.admission`), so this bounds the memory of
incomplete bodies.  The slowest body is the one that has gone longest without another PROGRESS_BYTES bytes: a client
that sends a byte now and then does not get ahead of one that sends steadily, and a new body is aborted last.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...core.errors import SlowBody

PROGRESS_BYTES = 16 << 10  # bytes of a body that count as progress
FULL_BODIES = 8  # the limit on all incomplete bodies, in bodies of the largest size


class IncomingBody:
    """One incomplete body: its `size` in bytes so far, and when it last made progress, by `time.monotonic`."""

    def __init__(self) -> None:
        self.size = self.progress_size = 0
        self.progress_time = time.monotonic()
        self.is_aborted = False
        self.release: Callable[[], None] = lambda: None  # releases the memory that is claimed for it
        self._timeout: asyncio.Timeout | None = None

    @contextmanager
    def watch_timeout(self, timeout: asyncio.Timeout) -> Iterator[None]:
        """While its request waits for more of the body, `timeout` is used to wake that request."""
        self.check_aborted()
        self._timeout = timeout
        try:
            yield
        finally:
            self._timeout = None

    def abort(self) -> None:
        """Make its request end with SlowBody."""
        self.is_aborted = True
        self.release()
        # An expired timeout wakes the request by itself, and cannot be rescheduled.
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def check_aborted(self) -> None:
        """Raises SlowBody if the body was aborted."""
        if self.is_aborted:
            raise SlowBody("the server ran out of room while this body came more slowly than all others; send it again")


class IncomingBodies:
    """All incomplete bodies, at most `most` bytes together.  Lives on the event loop thread.

    `room()` returns the free memory in bytes, a second limit; one body of the largest size is always within it.
    """

    def __init__(self, most: int = FULL_BODIES * (8 << 20), room: Callable[[], float] = lambda: math.inf) -> None:
        self.max_bytes, self.free_memory = most, room
        self.held_bytes = 0
        self.aborted_count = 0  # bodies that were aborted and whose requests are not answered yet
        self._bodies: dict[IncomingBody, None] = {}  # the slowest first

    def __len__(self) -> int:
        return len(self._bodies)

    @contextmanager
    def open_body(self) -> Iterator[IncomingBody]:
        """A new body, counted until it is complete (`remove`) or its request ends."""
        body = IncomingBody()
        self._bodies[body] = None
        try:
            yield body
        finally:
            self.remove(body)
            self.aborted_count -= body.is_aborted

    def add_bytes(self, body: IncomingBody, count: int) -> None:
        """Add `count` received bytes.  Raises SlowBody if this body is aborted to make room."""
        body.check_aborted()
        body.size += count
        self.held_bytes += count
        if body.size - body.progress_size >= PROGRESS_BYTES:
            body.progress_size, body.progress_time = body.size, time.monotonic()
            del self._bodies[body]
            self._bodies[body] = None
        bound = min(self.max_bytes, max(self.free_memory(), self.max_bytes / FULL_BODIES))
        while self.held_bytes > bound:
            self.abort_slowest()
        body.check_aborted()

    def make_room(self, body: IncomingBody, size: float) -> bool:
        """Abort the slowest of the bodies that are slower than `body` until `size` bytes are free.

        Returns False, and aborts none, if they have fewer bytes together.
        """
        slower, found = [], 0
        for each in self._bodies:
            if each is body or found >= size:
                break
            slower += [each] if each.size else []
            found += each.size
        if found < size:
            return False
        for each in slower:
            self._abort(each)
        return True

    def remove(self, body: IncomingBody) -> None:
        """Stop counting a body that is complete or no longer needed."""
        if body in self._bodies:
            del self._bodies[body]
            self.held_bytes -= body.size

    @property
    def slowest_since(self) -> float:
        """When the slowest body last made progress, by `time.monotonic`; infinity if there is none."""
        return next((body.progress_time for body in self._bodies), math.inf)

    def abort_slowest(self) -> None:
        self._abort(next(iter(self._bodies)))

    def _abort(self, body: IncomingBody) -> None:
        self.remove(body)
        self.aborted_count += 1
        body.abort()
