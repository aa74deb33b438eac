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

RATE_SAMPLES = 64  # answers from which the rates are measured
MAX_WAIT_S = 60  # seconds


class TokenLoad(Protocol):
    """The tokens of prompts and texts that were submitted and not answered yet."""

    @property
    def tokens(self) -> int: ...

    def tokens_of(self, owner: str) -> int: ...


@dataclass(frozen=True)
class AdmissionLimits:
    """How much may be in flight; one owner's part is `share` of both."""

    requests: int
    tokens: int
    share: float = 1.0

    @property
    def per_owner(self) -> "AdmissionLimits":
        return AdmissionLimits(max(int(self.requests * self.share), 1), max(int(self.tokens * self.share), 1))


@dataclass(frozen=True)
class RateSample:
    """What had left by `at`."""

    time: float
    requests: int
    tokens: int


class InFlightCounter:
    """What is in flight under one pair of bounds, and what left lately.  `open_tokens` are those in flight now."""

    def __init__(
        self, bounds: AdmissionLimits, whose: str, open_tokens: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self.limits, self.owner_text, self.open_tokens, self.clock = bounds, whose, open_tokens, clock
        self.in_flight = 0
        self.reserved_tokens = 0  # tokens of calls that are being submitted
        self._finished_requests = 0  # requests, since the start
        self._submitted_tokens = 0  # tokens, since the start
        self._samples = deque([self._take_sample()], maxlen=RATE_SAMPLES + 1)

    def check_room(self) -> None:
        """Raises Overloaded if there is none for another request, whatever it asks."""
        if self.in_flight >= self.limits.requests:
            taken = f"{self.limits.requests} requests{self.owner_text} are in flight"
            message = f"{taken}, no more are taken until one is answered"
            raise Overloaded(message, retry_after=self.estimate_wait())
        if self.committed_tokens >= self.limits.tokens:
            raise self._token_error(f"no more are taken until some of the {self.limits.tokens} are answered")

    def check_tokens(self, tokens: int) -> None:
        """Raises Overloaded if there is no room for so many; with none in flight any number has room."""
        if self.committed_tokens and self.committed_tokens + tokens > self.limits.tokens:
            raise self._token_error(f"with {tokens} more they are over {self.limits.tokens}")

    def add_submitted(self, tokens: int) -> None:
        self._submitted_tokens += tokens

    @property
    def committed_tokens(self) -> int:
        """Tokens in flight, and those that will be in a moment."""
        return self.open_tokens() + self.reserved_tokens

    def add_request(self) -> None:
        if self.in_flight == 0:
            # what was measured before a pause says nothing of now
            self._samples.clear()
            self._samples.append(self._take_sample())
        self.in_flight += 1

    def remove_request(self) -> None:
        self.in_flight -= 1
        self._finished_requests += 1
        self._samples.append(self._take_sample())

    def estimate_wait(self) -> int:
        """Whole seconds in which the requests in flight now leave, at the rate of late; from 1 to LONGEST_WAIT."""
        since = self._samples[0]
        # nobody left yet: at best one in the time that has passed
        return self._wait_seconds(self.in_flight, max(self._finished_requests - since.requests, 1), since)

    def estimate_token_wait(self) -> int:
        """The same of the tokens in flight."""
        since, tokens = self._samples[0], self.open_tokens()
        gone = self._take_sample().tokens - since.tokens
        return self._wait_seconds(tokens, gone, since) if gone > 0 else self.estimate_wait()

    def _wait_seconds(self, amount: int, gone: int, since: RateSample) -> int:
        rate = gone / max(self.clock() - since.time, 1e-9)
        return min(max(math.ceil(amount / rate), 1), MAX_WAIT_S)

    def _take_sample(self) -> RateSample:
        return RateSample(self.clock(), self._finished_requests, self._submitted_tokens - self.open_tokens())

    def _token_error(self, why: str) -> Overloaded:
        message = f"{self.committed_tokens} tokens{self.owner_text} are in flight, {why}"
        return Overloaded(message, retry_after=self.estimate_token_wait())


class Permit:
    """Of a request that was let in to send its body.  It is in flight from `take` until it leaves."""

    def __init__(self, ledgers: Sequence[InFlightCounter]) -> None:
        self.counters = ledgers
        self.is_acquired = False
        self.check_room()

    def check_room(self) -> None:
        """Raises Overloaded if there is none."""
        for ledger in self.counters:
            ledger.check_room()

    def acquire(self) -> None:
        """The body is whole.  Raises Overloaded if there is no room for it any more."""
        self.check_room()
        for ledger in self.counters:
            ledger.add_request()
        self.is_acquired = True

    def release(self) -> None:
        for ledger in self.counters if self.is_acquired else ():
            ledger.remove_request()


class Admission:
    """Lets in what is within `bounds`.  Lives on the event loop thread.

    Where there are several `owners`, each has its share of them; who they are may change.
    """

    def __init__(
        self,
        bounds: AdmissionLimits,
        load: TokenLoad,
        owners: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._closed_at = clock, math.inf
        self._limits, self._load, self._owners = bounds, load, owners
        self._total = InFlightCounter(bounds, "", lambda: load.tokens, clock)
        self._by_owner: dict[str, InFlightCounter] = {}
        self._permits: set[Permit] = set()

    @property
    def in_flight(self) -> int:
        """HTTP requests whose bodies are whole."""
        return self._total.in_flight

    @property
    def unfinished(self) -> int:
        """HTTP requests that were let in and are not answered yet, those that still send their bodies included."""
        return len(self._permits)

    @property
    def is_draining(self) -> bool:
        return self._closed_at < math.inf

    def drain_elapsed_s(self) -> float:
        """Seconds since it was closed; 0 while it is open."""
        return max(self._clock() - self._closed_at, 0.0)

    def close(self) -> None:
        """Let nobody in any more; what is in flight goes on."""
        self._closed_at = min(self._closed_at, self._clock())

    @contextmanager
    def open_permit(self, owner: str = "") -> Iterator[Permit]:
        """A place that can be taken once the body is whole; it is left at the end, if it was taken.

        Raises Unavailable while draining, and Overloaded if there is no room now.
        """
        if self.is_draining:
            raise Unavailable("the server is shutting down", retry_after=self._total.estimate_wait())
        place = Permit(self._counters_of(owner))
        self._permits.add(place)
        try:
            yield place
        finally:
            self._permits.remove(place)
            place.release()

    @contextmanager
    def admit(self, owner: str = "") -> Iterator[None]:
        """The same of a request that is whole: its place is taken at once."""
        with self.open_permit(owner) as place:
            place.acquire()
            yield

    def check_tokens(self, owner: str, tokens: int) -> None:
        """Raises Overloaded if so many more are over a bound; of one call, before it is submitted."""
        for ledger in self._counters_of(owner):
            ledger.check_tokens(tokens)

    def add_submitted(self, owner: str, tokens: int) -> None:
        """So many were submitted."""
        for ledger in self._counters_of(owner):
            ledger.add_submitted(tokens)

    @contextmanager
    def reserve_tokens(self, owner: str, tokens: int) -> Iterator[Callable[[int], None]]:
        """Room for the tokens of a call while it is submitted: call the function with how many are.

        Raises Overloaded as `check_tokens` does.
        """
        self.check_tokens(owner, tokens)
        ledgers, left = self._counters_of(owner), tokens

        def submitted(some: int) -> None:
            nonlocal left
            left -= some
            for ledger in ledgers:
                ledger.reserved_tokens -= some

        submitted(-tokens)
        left = tokens
        try:
            yield submitted
        finally:
            submitted(left)

    def estimate_wait(self) -> int:
        """Whole seconds in which the requests in flight now leave."""
        return self._total.estimate_wait()

    def _counters_of(self, owner: str) -> list[InFlightCounter]:
        if owner not in self._owners or len(self._owners) < 2:
            return [self._total]
        if owner not in self._by_owner:
            open_tokens = partial(self._load.tokens_of, owner)
            self._by_owner[owner] = InFlightCounter(self._limits.per_owner, " for this key", open_tokens, self._clock)
        return [self._total, self._by_owner[owner]]
