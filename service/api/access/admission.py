"""Admission control: limits on requests and tokens in flight, for all clients together and for each key.

The limit on requests limits memory; the limit on tokens limits time.  The `Retry-After` of a rejected request is
computed from the measured rate at which requests and tokens left.  Both limits are checked before a body is read; a
permit is acquired when the body is complete, and not counted while a part of the response is being sent: neither who
sends slowly nor who reads slowly takes capacity from others.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ...core.errors import Overloaded, Unavailable

RATE_SAMPLES = 64  # from which the rates are computed
MAX_WAIT_S = 60
NO_PARTS: "Mapping[str, InFlightCounter]" = {}


class TokenLoad(Protocol):
    """Tokens of the prompts and texts that were submitted and are not answered yet."""

    @property
    def tokens(self) -> int: ...

    def tokens_of(self, owner: str) -> int: ...


@dataclass(frozen=True)
class AdmissionLimits:
    """How much may be in flight; one owner may use the fraction `share` of both limits."""

    requests: int
    tokens: int
    share: float = 1.0

    @property
    def per_owner(self) -> "AdmissionLimits":
        return AdmissionLimits(max(int(self.requests * self.share), 1), max(int(self.tokens * self.share), 1))


@dataclass(frozen=True)
class RateSample:
    """How many requests had ended, and tokens had been answered, by `time`."""

    time: float
    requests: int
    tokens: int


class InFlightCounter:
    """Counts what is in flight under one pair of limits, and measures how fast it ends.

    `open_tokens` returns the tokens in flight now.  `parts` are the counters of owners within this one.  What an owner
    has beyond its own limits takes no room from others: requests that were not counted for a while may return, and a
    single call may have any number of tokens.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        open_tokens: Callable[[], int],
        clock: Callable[[], float],
        *,
        owner_text: str = "",
        parts: "Mapping[str, InFlightCounter]" = NO_PARTS,
    ) -> None:
        self.limits, self.owner_text, self.open_tokens, self.clock = limits, owner_text, open_tokens, clock
        self.parts = parts
        self.in_flight = 0
        self.reserved_tokens = 0  # tokens of calls that are being submitted in parts
        self._finished_requests = 0  # since the start
        self._submitted_tokens = 0  # since the start
        self._samples = deque([self._take_sample()], maxlen=RATE_SAMPLES + 1)

    def check_requests(self) -> None:
        """Raises Overloaded if there is no room for another request, whether or not it has tokens."""
        most = self.limits.requests
        if self.in_flight >= most and self.in_flight - self._excess_requests() >= most:
            taken = f"{self.limits.requests} requests{self.owner_text} are in flight"
            message = f"{taken}, no more are taken until one is answered"
            raise Overloaded(message, retry_after=self.estimate_wait())

    def check_room(self) -> None:
        """Raises Overloaded if there is no room for another request of any size."""
        self.check_requests()
        if self._are_over(self.committed_tokens + 1):
            raise self._token_error(f"no more are taken until some of the {self.limits.tokens} are answered")

    def check_tokens(self, tokens: int) -> None:
        """Raises Overloaded if there is no room for `tokens` more.  With no token in flight any number is accepted."""
        if self.committed_tokens and self._are_over(self.committed_tokens + tokens):
            raise self._token_error(f"with {tokens} more they are over {self.limits.tokens}")

    def _are_over(self, tokens: int) -> bool:
        return tokens > self.limits.tokens and tokens - self._excess_tokens() > self.limits.tokens

    def _excess_requests(self) -> int:
        return sum(max(part.in_flight - part.limits.requests, 0) for part in self.parts.values())

    def _excess_tokens(self) -> int:
        return sum(max(part.committed_tokens - part.limits.tokens, 0) for part in self.parts.values())

    def add_submitted(self, tokens: int) -> None:
        self._submitted_tokens += tokens

    @property
    def committed_tokens(self) -> int:
        """Tokens in flight, and reserved tokens that are about to be submitted."""
        return self.open_tokens() + self.reserved_tokens

    @property
    def answered_tokens(self) -> int:
        return self._submitted_tokens - self.open_tokens()

    def add_request(self) -> None:
        if self.in_flight == 0:
            # samples from before an idle period say nothing about the present rate
            self._samples.clear()
            self._samples.append(self._take_sample())
        self.in_flight += 1

    def remove_request(self) -> None:
        self.in_flight -= 1
        self._finished_requests += 1
        self._samples.append(self._take_sample())

    def estimate_wait(self) -> int:
        """Estimated seconds until the requests in flight have ended, from 1 to MAX_WAIT_S, at the recent rate."""
        since = self._samples[0]
        # no request has ended yet: assume one in the elapsed time
        return self._wait_seconds(self.in_flight, max(self._finished_requests - since.requests, 1), since)

    def estimate_token_wait(self) -> int:
        """The same for the tokens in flight."""
        since, tokens = self._samples[0], self.open_tokens()
        answered = self.answered_tokens - since.tokens
        return self._wait_seconds(tokens, answered, since) if answered > 0 else self.estimate_wait()

    def _wait_seconds(self, amount: int, ended: int, since: RateSample) -> int:
        rate = ended / max(self.clock() - since.time, 1e-9)
        return min(max(math.ceil(amount / rate), 1), MAX_WAIT_S)

    def _take_sample(self) -> RateSample:
        return RateSample(self.clock(), self._finished_requests, self.answered_tokens)

    def _token_error(self, reason: str) -> Overloaded:
        message = f"{self.committed_tokens} tokens{self.owner_text} are in flight, {reason}"
        return Overloaded(message, retry_after=self.estimate_token_wait())


class Permit:
    """The permit of an admitted request to send its body.  The request is in flight from `acquire` to `release`.

    One that `has_tokens` needs room for them, too.
    """

    def __init__(self, counters: Sequence[InFlightCounter], has_tokens: bool = True) -> None:
        self.counters, self.has_tokens = counters, has_tokens
        self.is_acquired = False
        self._sends = 0  # that wait for the client at once
        self.check_room()

    def check_room(self) -> None:
        """Raises Overloaded if there is no room."""
        for counter in self.counters:
            (counter.check_room if self.has_tokens else counter.check_requests)()

    def acquire(self) -> None:
        """Count the request, whose body is complete now.  Raises Overloaded if there is no room any more."""
        self.check_room()
        for counter in self.counters:
            counter.add_request()
        self.is_acquired = True

    def release(self) -> None:
        for counter in self.counters if self.is_acquired else ():
            counter.remove_request()

    @contextmanager
    def leave_uncounted(self) -> Iterator[None]:
        """Do not count the request meanwhile.  It is counted again at the end, even if there is no room by then.

        Several may overlap: it is counted again when the last of them ends.
        """
        self._sends += 1
        if self._sends == 1:
            self._count(-1)
        try:
            yield
        finally:
            self._sends -= 1
            if not self._sends:
                self._count(1)

    def _count(self, change: int) -> None:
        for counter in self.counters if self.is_acquired else ():
            counter.in_flight += change


class Admission:
    """Admits requests within `limits`.  Lives on the event loop thread.

    If there are several `owners`, each may use its share of the limits; the collection may change.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        load: TokenLoad,
        owners: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._closed_at = clock, math.inf
        self._limits, self._load, self._owners = limits, load, owners
        self._by_owner: dict[str, InFlightCounter] = {}
        self._total = InFlightCounter(limits, lambda: load.tokens, clock, parts=self._by_owner)
        self._permits: set[Permit] = set()
        self._without_permit = 0  # requests that are answered without a permit

    @property
    def in_flight(self) -> int:
        """HTTP requests whose bodies are complete."""
        return self._total.in_flight

    @property
    def tokens_in_flight(self) -> int:
        """Tokens that the engine has, and tokens of calls that are being submitted."""
        return self._total.committed_tokens

    @property
    def answered_tokens(self) -> int:
        """Tokens that were submitted since the start, and are answered."""
        return self._total.answered_tokens

    @property
    def unfinished(self) -> int:
        """HTTP requests that were admitted and are not answered yet, with complete or incomplete bodies, or none."""
        return len(self._permits) + self._without_permit

    @property
    def is_draining(self) -> bool:
        return self._closed_at < math.inf

    def drain_elapsed_s(self) -> float:
        """Seconds since admission was closed; 0 while it is open."""
        return max(self._clock() - self._closed_at, 0.0)

    def close(self) -> None:
        """Admit no more requests; requests in flight go on."""
        self._closed_at = min(self._closed_at, self._clock())

    @contextmanager
    def open_permit(self, owner: str = "", has_tokens: bool = True) -> Iterator[Permit]:
        """A permit that can be acquired once the body is complete.  It is released at the end.

        Raises Unavailable while draining, and Overloaded if there is no room now.
        """
        if self.is_draining:
            raise Unavailable("the server is shutting down", retry_after=self._total.estimate_wait())
        permit = Permit(self._counters_of(owner), has_tokens)
        self._permits.add(permit)
        try:
            yield permit
        finally:
            self._permits.remove(permit)
            permit.release()

    @contextmanager
    def count_unfinished(self) -> Iterator[None]:
        """Count a request that needs no permit as unfinished, so that a drain waits until its answer is sent."""
        self._without_permit += 1
        try:
            yield
        finally:
            self._without_permit -= 1

    @contextmanager
    def admit(self, owner: str = "", has_tokens: bool = True) -> Iterator[None]:
        """Admit a request that is complete: its permit is acquired at once."""
        with self.open_permit(owner, has_tokens) as permit:
            permit.acquire()
            yield

    def check_tokens(self, owner: str, tokens: int) -> None:
        """Raises Overloaded if `tokens` more exceed a limit.  Called before a call is submitted."""
        for counter in self._counters_of(owner):
            counter.check_tokens(tokens)

    def add_submitted(self, owner: str, tokens: int) -> None:
        """Count `tokens` that were submitted."""
        for counter in self._counters_of(owner):
            counter.add_submitted(tokens)

    @contextmanager
    def reserve_tokens(self, owner: str, tokens: int) -> Iterator[Callable[[int], None]]:
        """Reserve room for the tokens of a call while it is submitted in parts.

        Yields a function to be called with the number of tokens of each part that was submitted.  Raises Overloaded as
        `check_tokens` does.
        """
        self.check_tokens(owner, tokens)
        counters, left = self._counters_of(owner), tokens

        def count_submitted(count: int) -> None:
            nonlocal left
            left -= count
            for counter in counters:
                counter.reserved_tokens -= count

        count_submitted(-tokens)
        left = tokens
        try:
            yield count_submitted
        finally:
            count_submitted(left)

    def estimate_wait(self) -> int:
        """Estimated seconds until the requests in flight have ended."""
        return self._total.estimate_wait()

    def _counters_of(self, owner: str) -> list[InFlightCounter]:
        if owner not in self._owners or len(self._owners) < 2:
            return [self._total]
        if owner not in self._by_owner:
            open_tokens = partial(self._load.tokens_of, owner)
            self._by_owner[owner] = InFlightCounter(
                self._limits.per_owner, open_tokens, self._clock, owner_text=" for this key"
            )
        return [self._total, self._by_owner[owner]]
