"""What the connections of a server share: its limits, which of them make room, and whose request begins next."""

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...core.errors import PolyheadError
from .body_limits import Receiving

READ = 1 << 16  # bytes that are read at once
MOST_HEADS = 16 << 20  # bytes of all heads that are not complete
AT_ONCE = 32  # requests that begin in one turn of the event loop


class Client(Protocol):
    """What the edge asks of a connection."""

    def drop(self) -> None:
        """Close it at once: its room is needed."""

    def resume(self) -> None:
        """Read on: its turn has come."""


class Heads:
    """Heads that are not complete, within `most` bytes together: beyond that the one that was begun first is dropped.

    Most clients send a head in one piece, and it is never counted here.
    """

    def __init__(self, most: int = MOST_HEADS) -> None:
        self.most, self.held = most, 0
        self._sizes: dict[Client, int] = {}  # the one begun first at the front

    def keep(self, client: Client, size: int) -> None:
        """So many bytes of the head of `client` have come."""
        self.held += size - self._sizes.get(client, 0)
        self._sizes[client] = size
        while self.held > self.most:
            first = next(iter(self._sizes))
            self.end(first)
            first.drop()

    def end(self, client: Client) -> None:
        """Its head is complete, or nothing more of it is wanted."""
        self.held -= self._sizes.pop(client, 0)


class Turns:
    """A queue of connections whose next request is complete up to its body.

    At most `most` requests begin in one turn of the event loop.  A request that takes a millisecond of the loop then
    delays other events, such as probes, by `most` milliseconds, however many connections have a request ready.
    """

    def __init__(self, most: int = AT_ONCE) -> None:
        self.most = most
        self._begun = 0  # in this turn of the loop
        self._scheduled = False
        self._waiting: dict[Client, None] = {}

    def __contains__(self, client: Client) -> bool:
        return client in self._waiting

    def enter(self, client: Client) -> bool:
        """Whether its request may begin now.  Otherwise it is queued, and `resume` is called when its turn comes."""
        self._schedule()
        if self._begun < self.most:
            self._begun += 1
            return True
        self._waiting[client] = None
        return False

    def leave(self, client: Client) -> None:
        self._waiting.pop(client, None)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled, self._begun = False, 0
        for client in list(self._waiting)[: self.most]:
            self.leave(client)
            client.resume()
        if self._waiting:
            self._schedule()


@dataclass(frozen=True)
class Edge:
    """`cut` is called for each client that is cut off because it does not read, `refused` with the status of each
    answer to what was no request; `words` is the body of the answer for an error."""

    header_seconds: float
    keep_alive_seconds: float
    write_seconds: float
    most: int  # connections
    words: Callable[[PolyheadError], Any]
    refused: Callable[[int], None]
    cut: Callable[[], None]
    receiving: Receiving = field(default_factory=Receiving)
    turns: Turns = field(default_factory=Turns)
    heads: Heads = field(default_factory=Heads)
    # Since when, by `time.monotonic`; the longest first.
    silent: dict[Client, float] = field(default_factory=dict)  # no request of theirs is under way
    writing: dict[Client, float] = field(default_factory=dict)  # bytes of an answer wait until the client reads
    lingering: dict[Client, None] = field(default_factory=dict)  # answered, they only have to read it
    # Filled and emptied without a turn in between.  A view: with TLS, asyncio fills it slice by slice.
    inbox: memoryview = field(default_factory=lambda: memoryview(bytearray(READ)))

    def make_room(self, connections: Collection[Any]) -> bool:
        """Whether there is room for one more beside `connections`.

        Connections that are answered and only linger are closed first.  Then the one that made progress longest ago is
        closed: a silent one, one that does not read its answer, or one that sends a body (which is answered 408).
        """
        while len(connections) - self.receiving.ending >= self.most:
            waiting = [next(iter(some.items())) for some in (self.silent, self.writing) if some]
            longest = min(waiting, key=lambda one: one[1], default=None)
            if self.lingering:
                next(iter(self.lingering)).drop()
            elif len(self.receiving) and (longest is None or self.receiving.slowest < longest[1]):
                self.receiving.give_up_slowest()
            elif longest is not None:
                longest[0].drop()
            else:
                return False
        return True

    def blocked(self, client: Client) -> None:
        """Bytes of its answer wait until it reads."""
        self.writing.pop(client, None)
        self.writing[client] = time.monotonic()
