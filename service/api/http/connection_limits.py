"""State that the connections of a server share: limits, who is closed to make room, and the order of request starts."""

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from ...core.errors import PolyheadError
from .body_limits import IncomingBodies

READ_BYTES = 1 << 16  # bytes that are read in one call
SHORT_READ_BYTES = 8 << 10  # the same of a head, and of what comes behind a request
MAX_BUFFERED_BYTES = 16 << 20  # bytes of all input that waits, of which most are incomplete heads
MAX_UNSENT_BYTES = 128 << 20  # bytes of all answers that wait for their clients, where the settings state no other
MAX_STARTS = 32  # requests that start in one turn of the event loop
MAX_START_BYTES = 32 << 10  # bytes of their heads together, unless it is one: some cost a millisecond for 3 KiB
MAX_HANDSHAKES = 4  # of TLS, in one turn: a signature by RSA with 4,096 bits takes five milliseconds
HANDSHAKE_PART = 4  # handshakes that are begun and not complete are at most one in so many connections


class LimitedConnection(Protocol):
    """What `ConnectionLimits` needs of a connection."""

    def drop(self) -> None:
        """Close it at once: its room is needed."""

    def continue_reading(self) -> None:
        """Process its input: its request may start."""


class AnsweringConnection(LimitedConnection, Protocol):
    """What `UnsentAnswers` needs of a connection."""

    def has_read(self) -> bool:
        """Whether its client has read some of its answer since the last call."""


Client = TypeVar("Client", bound=LimitedConnection)


class WaitingBytes(Generic[Client]):
    """Bytes of connections that wait for their clients, at most `most` together; beyond that the connection is dropped
    whose bytes wait longest, but never the only one.
    """

    def __init__(self, most: int) -> None:
        self.max_bytes, self.held_bytes = most, 0
        self._sizes: dict[Client, int] = {}  # the oldest first

    def set_size(self, client: Client, size: int) -> None:
        """`size` bytes of `client` wait now."""
        if not size:
            self.remove(client)
            return
        self.held_bytes += size - self._sizes.get(client, 0)
        self._sizes[client] = size
        while self.held_bytes > self.max_bytes and len(self._sizes) > 1:
            longest = self.find_longest()
            self.remove(longest)
            longest.drop()

    def find_longest(self) -> Client:
        """The connection whose bytes wait longest."""
        return next(iter(self._sizes))

    def remove(self, client: Client) -> None:
        """No bytes of `client` wait any more."""
        self.held_bytes -= self._sizes.pop(client, 0)


class BufferedInput(WaitingBytes[LimitedConnection]):
    """Input of incomplete heads, and what a client sends behind a request before it has read the answer.  A head that
    comes in one piece, as most do, is never counted here.
    """

    def __init__(self, most: int = MAX_BUFFERED_BYTES) -> None:
        super().__init__(most)


class UnsentAnswers(WaitingBytes[AnsweringConnection]):
    """What connections hold whose clients do not read their answers: unsent bytes, and the request.

    A client that has read some of its answer counts as new again, so that those who read slowly are not dropped for
    those who do not read.
    """

    def __init__(self, most: int = MAX_UNSENT_BYTES) -> None:
        super().__init__(most)

    def find_longest(self) -> AnsweringConnection:
        while (first := super().find_longest()).has_read():
            self._sizes[first] = self._sizes.pop(first)
        return first


class StartQueue:
    """A queue of connections whose next request is complete up to its body, or whose handshake can go on.

    At most `most` requests start in one turn of the event loop, with heads of `most_bytes` together, unless it is one
    request.  A request that takes a millisecond of the loop then delays other events, such as probes, by `most`
    milliseconds, however many connections have a request ready; long heads take longer, and fewer of them start.
    """

    def __init__(self, most: int, most_bytes: int = MAX_START_BYTES) -> None:
        self.max_starts, self.max_bytes = most, most_bytes
        self._started = self._started_bytes = 0  # in this turn of the event loop
        self._scheduled = False
        self._waiting: dict[LimitedConnection, int] = {}  # with the bytes of their heads

    def __contains__(self, client: LimitedConnection) -> bool:
        return client in self._waiting

    def try_start(self, client: LimitedConnection, size: int = 0) -> bool:
        """Whether its request, with a head of `size` bytes, may start now.  Otherwise it is queued, and
        `continue_reading` is called when it may.
        """
        self._schedule()
        if self._has_room(size):
            self._started += 1
            self._started_bytes += size
            return True
        self._waiting[client] = size
        return False

    def _has_room(self, size: int) -> bool:
        fits = not self._started or self._started_bytes + size <= self.max_bytes
        return fits and self._started < self.max_starts

    def remove(self, client: LimitedConnection) -> None:
        self._waiting.pop(client, None)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run_turn)

    def _run_turn(self) -> None:
        self._scheduled, self._started, self._started_bytes = False, 0, 0
        if self._waiting:  # the next turn, before anything may raise
            self._schedule()
        for client, size in list(islice(self._waiting.items(), self.max_starts)):
            if not self._has_room(size):  # nor for those behind it, else it would wait for ever
                break
            self.remove(client)
            client.continue_reading()


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits and shared state of all connections.

    `count_cut_off` is called for each client that is disconnected because it does not read, `count_refused` with the
    status of each answer to invalid requests; `write_error` returns the JSON body for an error.
    """

    header_seconds: float
    keep_alive_seconds: float
    write_seconds: float
    max_connections: int
    write_error: Callable[[PolyheadError], Any]
    count_refused: Callable[[int], None]
    count_cut_off: Callable[[], None]
    incoming_bodies: IncomingBodies = field(default_factory=IncomingBodies)
    start_queue: StartQueue = field(default_factory=lambda: StartQueue(MAX_STARTS))
    handshake_queue: StartQueue = field(default_factory=lambda: StartQueue(MAX_HANDSHAKES))
    buffered_input: BufferedInput = field(default_factory=BufferedInput)
    unsent_answers: UnsentAnswers = field(default_factory=UnsentAnswers)
    # The values are times of `time.monotonic`; the oldest first.
    silent_since: dict[LimitedConnection, float] = field(default_factory=dict)  # no request is under way
    blocked_since: dict[LimitedConnection, float] = field(default_factory=dict)  # the client does not read its answer
    lingering: dict[LimitedConnection, None] = field(default_factory=dict)  # answered; further input is discarded
    handshakes: dict[LimitedConnection, None] = field(default_factory=dict)  # of TLS, begun and not complete
    # Shared: it is filled and emptied in one turn of the event loop.  A view: with TLS, asyncio fills it by slices.
    read_buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BYTES)))

    @property
    def max_handshakes(self) -> int:
        """How many handshakes of TLS may be begun and not complete: each takes more than an idle connection."""
        return max(self.max_connections // HANDSHAKE_PART, MAX_HANDSHAKES)

    def add_handshake(self, client: LimitedConnection) -> None:
        """Its first bytes came: it counts as new again, and the handshake that was begun first makes room for it."""
        self.silent_since.pop(client, None)
        self.silent_since[client] = time.monotonic()
        self.handshakes[client] = None
        while len(self.handshakes) > self.max_handshakes:
            next(iter(self.handshakes)).drop()

    def make_room(self, connections: Collection[Any]) -> bool:
        """Whether there is room for all of `connections`, the last of which is new; closes others if needed.

        Connections that are answered and only linger are closed first.  Then the one that made progress longest ago is
        closed: a silent one, one that does not read its answer, or one that sends a body (which is answered 408).
        """
        while len(connections) - self.incoming_bodies.aborted_count > self.max_connections:
            waiting = [next(iter(some.items())) for some in (self.silent_since, self.blocked_since) if some]
            longest = min(waiting, key=lambda one: one[1], default=None)
            if self.lingering:
                next(iter(self.lingering)).drop()
            elif len(self.incoming_bodies) and (longest is None or self.incoming_bodies.slowest_since < longest[1]):
                self.incoming_bodies.abort_slowest()
            elif longest is not None:
                longest[0].drop()
            else:
                return False
        return True

    def mark_blocked(self, client: LimitedConnection) -> None:
        """Note that bytes of an answer wait until the client reads."""
        self.blocked_since.pop(client, None)
        self.blocked_since[client] = time.monotonic()
