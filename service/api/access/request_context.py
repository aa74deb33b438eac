"""The context of one HTTP request: key, deadline, timings, and how it ended.

The middleware creates a `RequestContext` before anything is read, and the handlers add what they learn.  So there is
one place with all data for the log line and the metrics, however the request ends.
"""

import asyncio
import math
import re
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TypeVar
from urllib.parse import quote

from ...config.keys import ANONYMOUS, MAX_PRIORITY, Key
from ...core.errors import BadRequest, Expired
from ...core.request import Terms
from ...engine.worker import RequestTiming
from ...resources.request_memory import UNBOUNDED_HEADROOM, MemoryClaim
from .auth import Access

T = TypeVar("T")

MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 1e9  # limits of a request's timeout
SECONDS_PATTERN = re.compile(r"[0-9]{1,10}(\.[0-9]{1,9})?")
TIMEOUT_HEADER = "X-Request-Timeout"
IGNORED_HEADER = "X-Polyhead-Ignored"  # of a response: fields of the body that have no effect on this model
IGNORED_HEADER_CHARS = 1024  # at most, since clients and proxies refuse responses with long headers
OUTCOMES_BY_SEVERITY = ("done", "aborted", "expired", "failed")  # the worst of several engine requests counts for all


@dataclass
class RequestContext:
    """Lives on the event loop thread.  `is_counted`: its end is counted already, or the engine will count it."""

    id: str
    arrived: float = field(default_factory=perf_counter)
    access: Access = "inference"  # the rule of its path
    key: Key = ANONYMOUS  # the client's key, where one is required
    priority: int = 0  # of its engine requests, unless the body has one
    max_priority: int = MAX_PRIORITY  # that the body may ask for
    trace_id: str = ""  # 32 hex digits; empty if the request is not traced
    deadline: float = math.inf  # on `time.perf_counter`
    model: str = ""  # the name and the task of the model, once they are known
    task: str = ""
    is_counted: bool = False
    admitted: float = 0.0  # when it was admitted, by `time.perf_counter`; 0: it was not
    tokenise_times: list[tuple[float, float]] = field(default_factory=list)  # (start, end) of each tokenisation
    timings: list[RequestTiming] = field(default_factory=list)  # of its engine requests
    cleanup: ExitStack = field(default_factory=ExitStack)  # closed when the response has been sent, or is lost
    claim: MemoryClaim = field(default_factory=lambda: MemoryClaim(UNBOUNDED_HEADROOM))  # on request memory
    ignored: list[str] = field(default_factory=list)  # fields of the body that have no effect on this model
    outcome: str = ""  # empty unless it ended with an error
    reason: str = ""  # the error's code

    @property
    def owner(self) -> str:
        """The key's name; empty if no key is required."""
        return self.key.name

    @property
    def terms(self) -> Terms:
        """The request terms that the headers give; a body may add more (`dialect.read_terms`)."""
        return Terms(self.owner, self.priority, self.deadline, self.trace_id)

    def limit_time(self, seconds: float) -> None:
        """Limit the time of the request to `seconds` from its arrival; a shorter limit stays."""
        self.deadline = min(self.deadline, self.arrived + seconds)

    @contextmanager
    def time_tokenising(self) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self.tokenise_times.append((began, perf_counter()))

    def open_part(self) -> "RequestContext":
        """The context of a part of the request that is answered by itself: with a claim, a cleanup and timings of its
        own.
        """
        lists: dict[str, Any] = {"tokenise_times": [], "timings": [], "ignored": []}
        return replace(self, claim=self.claim.open_part(), cleanup=ExitStack(), **lists)

    def add_part(self, part: "RequestContext") -> None:
        """Count a part that has ended. It leaves one timing for all of its engine requests."""
        self.is_counted |= part.is_counted
        self.timings += [join_timings(part.timings)] if part.timings else []
        self.ignored += [name for name in part.ignored if name not in self.ignored]

    def check_deadline(self) -> None:
        """Raises Expired if the deadline has passed."""
        if perf_counter() >= self.deadline:
            raise self.deadline_error()

    async def wait(self, work: Awaitable[T]) -> T:
        """The result of `work`.  Raises Expired if the deadline passes before, and cancels `work`."""
        try:
            async with asyncio.timeout(
                None if self.deadline == math.inf else self.deadline - perf_counter()
            ) as timeout:
                return await work
        except TimeoutError:
            if timeout.expired():
                raise self.deadline_error() from None
            raise

    def deadline_error(self) -> Expired:
        allowed = self.deadline - self.arrived
        return Expired(f"the deadline has passed before the engine had the request: {allowed:g} s after it came")


def join_timings(timings: Sequence[RequestTiming]) -> RequestTiming:
    """One timing for several engine requests (at least one) that have ended."""
    return RequestTiming(
        submitted=min(timing.submitted for timing in timings),
        started=min((timing.started for timing in timings if timing.started), default=0.0),
        first_token=min((timing.first_token for timing in timings if timing.first_token), default=0.0),
        last_text=max(timing.last_text for timing in timings),
        text_seconds=sum(timing.text_seconds for timing in timings),
        ended=max(timing.ended or perf_counter() for timing in timings),
        prompt_tokens=sum(timing.prompt_tokens for timing in timings),
        generated_tokens=sum(timing.generated_tokens for timing in timings),
        cached_tokens=sum(timing.cached_tokens for timing in timings),
        outcome=max((timing.outcome for timing in timings), key=OUTCOMES_BY_SEVERITY.index),
        reason=next((timing.reason for timing in timings if timing.reason), ""),
    )


def read_timeout(header: str) -> float:
    """The seconds in the header X-Request-Timeout.  Raises BadRequest if it is not valid."""
    if not SECONDS_PATTERN.fullmatch(header) or not MIN_TIMEOUT_S <= float(header) <= MAX_TIMEOUT_S:
        raise BadRequest(
            f"{TIMEOUT_HEADER}: must be a number of seconds from {MIN_TIMEOUT_S} to {MAX_TIMEOUT_S:.0f}, "
            f"got {header[:60]!r}",
            param=TIMEOUT_HEADER,
        )
    return float(header)


def write_ignored(names: Sequence[str]) -> str:
    """The value of IGNORED_HEADER.  Parts of names are a client's: what no header can hold is percent-encoded."""
    shown, size = list[str](), 0
    for name in names:
        written = quote(name[:IGNORED_HEADER_CHARS], safe="!#$&'()*+-./:;<=>?@[]^_`{|}~ ")
        size += len(written) + 2
        if size > IGNORED_HEADER_CHARS:
            return ", ".join((*shown, f"and {len(names) - len(shown)} more"))
        shown.append(written)
    return ", ".join(shown)
