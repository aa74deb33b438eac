"""One HTTP request on its way: who asks, since when, how long it may take, and whether its end is counted.

Knows no route and no dialect.  The one idea: the gate makes a Visit before anything is read, and whoever handles the
request adds what it finds out, so that however the request ends there is one place that knows what to say of it.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from ...config.keys import ANONYMOUS, Key
from ...core.errors import BadRequest, Expired
from ...core.request import Terms
from ...engine.worker import RequestTiming
from ...resources.request_memory import UNBOUNDED_HEADROOM, MemoryClaim

MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 1e9  # seconds that a request may be given
SECONDS_PATTERN = re.compile(r"[0-9]{1,10}(\.[0-9]{1,9})?")
TIMEOUT_HEADER = "X-Request-Timeout"


@dataclass
class RequestContext:
    """Lives on the event loop thread.  `counted` says that its end is, or will be, counted: by the engine or here."""

    id: str
    arrived: float = field(default_factory=perf_counter)
    key: Key = ANONYMOUS  # that it shows, where one is asked for
    trace_id: str = ""  # its trace, if that is kept: 32 hex digits
    deadline: float = math.inf  # on `time.perf_counter`
    model: str = ""  # what it is about, and what that does, once they are known
    task: str = ""
    is_counted: bool = False
    admitted: float = 0.0  # when it was let in, by `time.perf_counter`; 0: it was not
    tokenise_times: list[tuple[float, float]] = field(default_factory=list)  # from when until when
    timings: list[RequestTiming] = field(default_factory=list)  # what the engine was asked for
    claim: MemoryClaim = field(default_factory=lambda: MemoryClaim(UNBOUNDED_HEADROOM))  # of the memory for requests
    outcome: str = ""  # how it ended, if that was with an error
    reason: str = ""  # the error's code

    @property
    def owner(self) -> str:
        """Of the key; empty where none is asked for."""
        return self.key.name

    @property
    def terms(self) -> Terms:
        """What the headers say; a body may say more (`dialect.terms`)."""
        return Terms(self.owner, 0, self.deadline, self.trace_id)

    def limit_time(self, seconds: float) -> None:
        """It may take so long, counted from its arrival, unless it is to be shorter already."""
        self.deadline = min(self.deadline, self.arrived + seconds)

    @contextmanager
    def time_tokenising(self) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self.tokenise_times.append((began, perf_counter()))

    def check_deadline(self) -> None:
        """Raises Expired once the deadline has passed."""
        if perf_counter() >= self.deadline:
            raise self.deadline_error()

    def deadline_error(self) -> Expired:
        allowed = self.deadline - self.arrived
        return Expired(f"the deadline has passed before the engine had the request: {allowed:g} s after it came")


def read_timeout(header: str) -> float:
    """What the header X-Request-Timeout says; BadRequest names it if that is no time."""
    if not SECONDS_PATTERN.fullmatch(header) or not MIN_TIMEOUT_S <= float(header) <= MAX_TIMEOUT_S:
        raise BadRequest(
            f"{TIMEOUT_HEADER}: must be a number of seconds from {MIN_TIMEOUT_S} to {MAX_TIMEOUT_S:.0f}, "
            f"got {header[:60]!r}",
            param=TIMEOUT_HEADER,
        )
    return float(header)
