"""Request bodies that are being received: a bound on their bytes, and which of them ends to make room for others.

A request has no place in flight until its body is whole (`service.api.access.admission`), so this bounds what
incomplete bodies cost.  The slowest body is the one that has gone longest without another STRIDE bytes: a client
that sends a byte now and then does not get ahead of one that sends steadily, and a new body is the last to go."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...core.errors import SlowBody

STRIDE = 16 << 10  # bytes of a body that count as progress
WHOLE = 8  # bodies of the largest size that all incomplete bodies together may weigh as much as


class Body:
    """One incomplete body: its `size` in bytes so far, and when it last made progress, by `time.monotonic`."""

    def __init__(self) -> None:
        self.size = self.marked = 0
        self.since = time.monotonic()
        self.given_up = False
        self.release: Callable[[], None] = lambda: None  # the memory that is claimed for it
        self._waiting: asyncio.Timeout | None = None

    @contextmanager
    def waiting(self, timeout: asyncio.Timeout) -> Iterator[None]:
        """While its request waits for more of it, `timeout` is the way to wake that request."""
        self.check()
        self._waiting = timeout
        try:
            yield
        finally:
            self._waiting = None

    def give_up(self) -> None:
        """Have its request answered with SlowBody."""
        self.given_up = True
        self.release()
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())

    def check(self) -> None:
        """Raises SlowBody if it was given up."""
        if self.given_up:
            raise SlowBody("the server ran out of room while this body came more slowly than all others; send it again")


class Receiving:
    """All incomplete bodies, within `most` bytes together.  Lives on the event loop thread.

    `room()` bytes is a second bound, that of memory; one body of the largest size is always within it.
    """

    def __init__(self, most: int = WHOLE * (8 << 20), room: Callable[[], float] = lambda: math.inf) -> None:
        self.most, self.room = most, room
        self.held = 0  # bytes
        self.ending = 0  # bodies that were given up and whose requests are not answered yet
        self._bodies: dict[Body, None] = {}  # the slowest first

    def __len__(self) -> int:
        return len(self._bodies)

    @contextmanager
    def receive(self) -> Iterator[Body]:
        """A body, counted until it is whole (`end`) or its request is over."""
        body = Body()
        self._bodies[body] = None
        try:
            yield body
        finally:
            self.end(body)
            self.ending -= body.given_up

    def grow(self, body: Body, count: int) -> None:
        """So many bytes of it came.  Raises SlowBody if it has to make room itself."""
        body.check()
        body.size += count
        self.held += count
        if body.size - body.marked >= STRIDE:
            body.marked, body.since = body.size, time.monotonic()
            del self._bodies[body]
            self._bodies[body] = None
        bound = min(self.most, max(self.room(), self.most / WHOLE))
        while self.held > bound:
            self.give_up_slowest()
        body.check()

    def make_room(self, body: Body, size: float) -> bool:
        """Whether the bodies slower than `body` have `size` bytes together; then the slowest of them are given up."""
        slower, found = [], 0
        for each in self._bodies:
            if each is body or found >= size:
                break
            slower += [each] if each.size else []
            found += each.size
        if found < size:
            return False
        for each in slower:
            self._give_up(each)
        return True

    def end(self, body: Body) -> None:
        """It is whole, or nothing more of it is wanted."""
        if body in self._bodies:
            del self._bodies[body]
            self.held -= body.size

    @property
    def slowest(self) -> float:
        """When the slowest last made progress, by `time.monotonic`; infinity if there is none."""
        return next((body.since for body in self._bodies), math.inf)

    def give_up_slowest(self) -> None:
        self._give_up(next(iter(self._bodies)))

    def _give_up(self, body: Body) -> None:
        self.end(body)
        self.ending += 1
        body.give_up()
