"""Request bodies that are being received: a limit on their total bytes, and which of them is aborted to make room.

A request has no permit until its body is complete (`service.api.access.admission`), so this bounds the memory of
incomplete bodies.  What is aborted is the slowest body of the key that takes most of what is short, so that many bodies
of one key do not abort those of others.  The slowest body is the one that has gone longest without another
PROGRESS_BYTES bytes: a client that sends a byte now and then does not get ahead of one that sends steadily, and a new
body is aborted last.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ...core.errors import SlowBody

PROGRESS_BYTES = 16 << 10  # bytes of a body that count as progress
FULL_BODIES = 8  # the limit on all incomplete bodies, in bodies of the largest size


class IncomingBody:
    """One incomplete body of `owner`, the name of a key: its `size` in bytes so far, and when it last made progress, by
    `time.monotonic`.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
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
    """All incomplete bodies with their long heads, at most `most` bytes together.  Lives on the event loop thread.

    `room()` returns the free memory in bytes, a second limit; one body of the largest size is always within it.  The
    only body that has bytes is not aborted: its size is limited by itself.
    """

    def __init__(self, most: int = FULL_BODIES * (8 << 20), room: Callable[[], float] = lambda: math.inf) -> None:
        self.max_bytes, self.free_memory = most, room
        self._bytes = Counter[str]()  # by owner
        self.aborted_count = 0  # bodies that were aborted and whose requests are not answered yet
        self._bodies: dict[str, dict[IncomingBody, None]] = {}  # by owner: those that have some, the slowest first

    def __len__(self) -> int:
        return sum(map(len, self._bodies.values()))

    @property
    def held_bytes(self) -> int:
        """Bytes of all bodies together."""
        return self._bytes.total()

    @contextmanager
    def open_body(self, owner: str = "") -> Iterator[IncomingBody]:
        """A new body, counted until it is complete (`remove`) or its request ends."""
        body = IncomingBody(owner)
        self._bodies.setdefault(owner, {})[body] = None
        try:
            yield body
        finally:
            self.remove(body)
            self.aborted_count -= body.is_aborted

    def add_bytes(self, body: IncomingBody, count: int) -> None:
        """Add `count` received bytes.  Raises SlowBody if this body is aborted to make room."""
        body.check_aborted()
        body.size += count
        self._bytes[body.owner] += count
        if body.size - body.progress_size >= PROGRESS_BYTES:
            body.progress_size, body.progress_time = body.size, time.monotonic()
            of_owner = self._bodies[body.owner]
            del of_owner[body]
            of_owner[body] = None
        bound = min(self.max_bytes, max(self.free_memory(), self.max_bytes / FULL_BODIES))
        while self.held_bytes > max(bound, body.size):
            self._abort(self._slowest(self._bytes))
        body.check_aborted()

    def make_room(self, body: IncomingBody, size: float, *, own_only: bool = False) -> bool:
        """Abort bodies that are slower than `body` until `size` bytes are free: each time the slowest of the owner with
        most bytes, but none of an owner with less than that of `body`; with `own_only` none of another owner.

        Returns False, and aborts none, if they have fewer bytes together.
        """
        owners = [body.owner] if own_only else list(self._bodies)
        waiting = {owner: deque(self._slower(owner, body)) for owner in owners}
        sizes, chosen, found = Counter(self._bytes), list[IncomingBody](), 0
        while found < size:
            rivals = [owner for owner in owners if waiting[owner] and sizes[owner] >= sizes[body.owner]]
            if not rivals:
                return False
            owner = max(rivals, key=sizes.__getitem__)
            chosen.append(waiting[owner].popleft())
            sizes[owner] -= chosen[-1].size
            found += chosen[-1].size
        for each in chosen:
            self._abort(each)
        return True

    def _slower(self, owner: str, body: IncomingBody) -> Iterator[IncomingBody]:
        """The bodies of `owner` that have bytes and are slower than `body`, the slowest first."""
        for each in self._bodies[owner]:
            if each is body or each.progress_time > body.progress_time:
                return
            if each.size:
                yield each

    def remove(self, body: IncomingBody) -> None:
        """Stop counting a body that is complete or no longer needed."""
        of_owner = self._bodies.get(body.owner, {})
        if body not in of_owner:
            return
        del of_owner[body]
        self._bytes[body.owner] -= body.size
        if not of_owner:
            del self._bodies[body.owner], self._bytes[body.owner]

    @property
    def slowest_since(self) -> float:
        """When the body that `abort_slowest` aborts last made progress, by `time.monotonic`; infinity without one."""
        return self._slowest(self._counts()).progress_time if self._bodies else math.inf

    def abort_slowest(self) -> None:
        """Abort the slowest body of the owner with most bodies, since a connection is needed."""
        self._abort(self._slowest(self._counts()))

    def _counts(self) -> dict[str, int]:
        return {owner: len(bodies) for owner, bodies in self._bodies.items()}

    def _slowest(self, taken: Mapping[str, int]) -> IncomingBody:
        """The slowest body of the owner that has most of what is `taken`."""
        owner = max(self._bodies, key=taken.__getitem__)
        return next(iter(self._bodies[owner]))

    def _abort(self, body: IncomingBody) -> None:
        self.remove(body)
        self.aborted_count += 1
        body.abort()
