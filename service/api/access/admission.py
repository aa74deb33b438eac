"""How much is let in at once, for everybody and for each key, and how long the others are told to wait.

Knows nothing of what is asked.  The one idea: a bound on requests in flight is a bound on memory, and a bound on their
tokens is a bound on time; and the wait is computed from how fast both left lately, not guessed.  Both bounds are looked
at before a body is read, and a place is taken when the body is whole: who sends a body slowly keeps nobody else out.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ...core.errors import Overloaded, Unavailable

REMEMBERED = 64  # answers from which the rates are measured
LONGEST_WAIT = 60  # seconds


class Load(Protocol):
    """The tokens of prompts and texts that were submitted and not answered yet."""

    @property
    def tokens(self) -> int: ...

    def tokens_of(self, owner: str) -> int: ...


@dataclass(frozen=True)
class Bounds:
    """How much may be in flight; one owner's part is `share` of both."""

    requests: int
    tokens: int
    share: float = 1.0

    @property
    def shared(self) -> "Bounds":
        return Bounds(max(int(self.requests * self.share), 1), max(int(self.tokens * self.share), 1))


@dataclass(frozen=True)
class Mark:
    """What had left by `at`."""

    at: float
    requests: int
    tokens: int


class Ledger:
    """What is in flight under one pair of bounds, and what left lately.  `open_tokens` are those in flight now."""

    def __init__(self, bounds: Bounds, whose: str, open_tokens: Callable[[], int], clock: Callable[[], float]) -> None:
        self.bounds, self.whose, self.open_tokens, self.clock = bounds, whose, open_tokens, clock
        self.in_flight = 0
        self.reserved = 0  # tokens of calls that are being submitted
        self._left = 0  # requests, since the start
        self._taken = 0  # tokens, since the start
        self._marks = deque([self._mark()], maxlen=REMEMBERED + 1)

    def check_room(self) -> None:
        """Raises Overloaded if there is none for another request, whatever it asks."""
        if self.in_flight >= self.bounds.requests:
            message = (
                f"{self.bounds.requests} requests{self.whose} are in flight, no more are taken until one is answered"
            )
            raise Overloaded(message, retry_after=self.wait())
        if self.promised >= self.bounds.tokens:
            raise self._too_many_tokens(f"no more are taken until some of the {self.bounds.tokens} are answered")

    def check_tokens(self, tokens: int) -> None:
        """Raises Overloaded if there is no room for so many; with none in flight any number has room."""
        if self.promised and self.promised + tokens > self.bounds.tokens:
            raise self._too_many_tokens(f"with {tokens} more they are over {self.bounds.tokens}")

    def take(self, tokens: int) -> None:
        self._taken += tokens

    @property
    def promised(self) -> int:
        """Tokens in flight, and those that will be in a moment."""
        return self.open_tokens() + self.reserved

    def enter(self) -> None:
        if self.in_flight == 0:
            # what was measured before a pause says nothing of now
            self._marks.clear()
            self._marks.append(self._mark())
        self.in_flight += 1

    def leave(self) -> None:
        self.in_flight -= 1
        self._left += 1
        self._marks.append(self._mark())

    def wait(self) -> int:
        """Whole seconds in which the requests in flight now leave, at the rate of late; from 1 to LONGEST_WAIT."""
        since = self._marks[0]
        # nobody left yet: at best one in the time that has passed
        return self._seconds(self.in_flight, max(self._left - since.requests, 1), since)

    def wait_for_tokens(self) -> int:
        """The same of the tokens in flight."""
        since, tokens = self._marks[0], self.open_tokens()
        gone = self._mark().tokens - since.tokens
        return self._seconds(tokens, gone, since) if gone > 0 else self.wait()

    def _seconds(self, amount: int, gone: int, since: Mark) -> int:
        rate = gone / max(self.clock() - since.at, 1e-9)
        return min(max(math.ceil(amount / rate), 1), LONGEST_WAIT)

    def _mark(self) -> Mark:
        return Mark(self.clock(), self._left, self._taken - self.open_tokens())

    def _too_many_tokens(self, why: str) -> Overloaded:
        message = f"{self.promised} tokens{self.whose} are in flight, {why}"
        return Overloaded(message, retry_after=self.wait_for_tokens())


class Place:
    """Of a request that was let in to send its body.  It is in flight from `take` until it leaves."""

    def __init__(self, ledgers: Sequence[Ledger]) -> None:
        self.ledgers = ledgers
        self.taken = False
        self.check_room()

    def check_room(self) -> None:
        """Raises Overloaded if there is none."""
        for ledger in self.ledgers:
            ledger.check_room()

    def take(self) -> None:
        """The body is whole.  Raises Overloaded if there is no room for it any more."""
        self.check_room()
        for ledger in self.ledgers:
            ledger.enter()
        self.taken = True

    def leave(self) -> None:
        for ledger in self.ledgers if self.taken else ():
            ledger.leave()


class Admission:
    """Lets in what is within `bounds`.  Lives on the event loop thread.

    Where there are several `owners`, each has its share of them; who they are may change.
    """

    def __init__(
        self,
        bounds: Bounds,
        load: Load,
        owners: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._closed = clock, math.inf
        self._bounds, self._load, self._owners = bounds, load, owners
        self._all = Ledger(bounds, "", lambda: load.tokens, clock)
        self._owned: dict[str, Ledger] = {}
        self._places: set[Place] = set()

    @property
    def in_flight(self) -> int:
        """HTTP requests whose bodies are whole."""
        return self._all.in_flight

    @property
    def unfinished(self) -> int:
        """HTTP requests that were let in and are not answered yet, those that still send their bodies included."""
        return len(self._places)

    @property
    def draining(self) -> bool:
        return self._closed < math.inf

    def drained_s(self) -> float:
        """Seconds since it was closed; 0 while it is open."""
        return max(self._clock() - self._closed, 0.0)

    def close(self) -> None:
        """Let nobody in any more; what is in flight goes on."""
        self._closed = min(self._closed, self._clock())

    @contextmanager
    def arriving(self, owner: str = "") -> Iterator[Place]:
        """A place that can be taken once the body is whole; it is left at the end, if it was taken.

        Raises Unavailable while draining, and Overloaded if there is no room now.
        """
        if self.draining:
            raise Unavailable("the server is shutting down", retry_after=self._all.wait())
        place = Place(self._ledgers(owner))
        self._places.add(place)
        try:
            yield place
        finally:
            self._places.remove(place)
            place.leave()

    @contextmanager
    def admitted(self, owner: str = "") -> Iterator[None]:
        """The same of a request that is whole: its place is taken at once."""
        with self.arriving(owner) as place:
            place.take()
            yield

    def check_tokens(self, owner: str, tokens: int) -> None:
        """Raises Overloaded if so many more are over a bound; of one call, before it is submitted."""
        for ledger in self._ledgers(owner):
            ledger.check_tokens(tokens)

    def take(self, owner: str, tokens: int) -> None:
        """So many were submitted."""
        for ledger in self._ledgers(owner):
            ledger.take(tokens)

    @contextmanager
    def reserved(self, owner: str, tokens: int) -> Iterator[Callable[[int], None]]:
        """Room for the tokens of a call while it is submitted: call the function with how many are.

        Raises Overloaded as `check_tokens` does.
        """
        self.check_tokens(owner, tokens)
        ledgers, left = self._ledgers(owner), tokens

        def submitted(some: int) -> None:
            nonlocal left
            left -= some
            for ledger in ledgers:
                ledger.reserved -= some

        submitted(-tokens)
        left = tokens
        try:
            yield submitted
        finally:
            submitted(left)

    def wait(self) -> int:
        """Whole seconds in which the requests in flight now leave."""
        return self._all.wait()

    def _ledgers(self, owner: str) -> list[Ledger]:
        if owner not in self._owners or len(self._owners) < 2:
            return [self._all]
        if owner not in self._owned:
            open_tokens = partial(self._load.tokens_of, owner)
            self._owned[owner] = Ledger(self._bounds.shared, " for this key", open_tokens, self._clock)
        return [self._all, self._owned[owner]]
