"""The stream of one request's events, from the engine to the client.

A stream is used on the event loop thread; workers only keep it, as the handle of a request.  It ends exactly once and
reports its end with `on_end`.  Where its reader falls behind, the request is paused until the reader has caught up.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from threading import Semaphore
from time import perf_counter
from typing import Literal

from ..concurrency.time_slices import SLICE_SIZE
from ..core.errors import Expired, PolyheadError
from ..core.request import Done, Event, Failed, FinishReason, GeneratedToken, Request, WorkerTask
from .worker import RequestEnd, RequestOutcome, RequestTiming, deadline_error

MAX_UNREAD_EVENTS = 256  # that may wait for their reader before the request is paused; each alternative counts as one
MAX_STEPS_AHEAD = 2  # steps not yet delivered: one is delivered while another is computed
LOOP_CHECK_S = 1.0  # how often the engine checks whether a loop that does not answer is closed


class StepCredits:
    """Bounds how many steps the engine is ahead of the event loop.

    Without a bound the loop's other tasks would wait behind ever more answers.
    """

    def __init__(self) -> None:
        self._left = Semaphore(MAX_STEPS_AHEAD)

    def acquire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Engine thread, before a step: wait until the loop has processed the steps before it, or is closed."""
        while not self._left.acquire(timeout=LOOP_CHECK_S) and not loop.is_closed():
            pass

    def release(self) -> None:
        """A step was delivered, or there is nothing to deliver."""
        self._left.release()


class DeadlineTimers:
    """Ends streams at their deadlines, whatever the engine is doing.

    All requests of one call have the same deadline, so there is one timer for each deadline.  At most SLICE_SIZE
    streams are ended in one iteration of the event loop.
    """

    def __init__(self) -> None:
        self._streams: dict[float, dict[Stream, None]] = {}  # by their deadline
        self._timers: dict[float, asyncio.Handle] = {}

    def __len__(self) -> int:
        """The number of deadlines with a timer."""
        return len(self._timers)

    def add(self, stream: "Stream") -> None:
        deadline = stream.request.terms.deadline
        if deadline == math.inf or not stream.is_open:
            return
        self._streams.setdefault(deadline, {})[stream] = None
        if deadline not in self._timers:
            left = deadline - stream.submitted
            self._timers[deadline] = asyncio.get_running_loop().call_later(left, self._expire, deadline)

    def remove(self, stream: "Stream") -> None:
        deadline = stream.request.terms.deadline
        streams = self._streams.get(deadline, {})
        if streams.pop(stream, True) is None and not streams:
            del self._streams[deadline]
            self._timers.pop(deadline).cancel()

    def _expire(self, deadline: float) -> None:
        """End the streams with this deadline, a slice of them; ending a stream removes it."""
        self._timers[deadline] = asyncio.get_running_loop().call_soon(self._expire, deadline)
        for stream in list(islice(self._streams[deadline], SLICE_SIZE)):
            stream.abort(deadline_error(stream, perf_counter()))


class OpenTokens:
    """Counts the prompt tokens of open streams, by owner.  Those of a paused stream do not count."""

    def __init__(self) -> None:
        self._by_owner: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._by_owner.total()

    def of(self, owner: str) -> int:
        return self._by_owner[owner]

    def add(self, stream: "Stream") -> None:
        """A stream was opened, or is resumed."""
        self._by_owner[stream.request.terms.owner] += stream.request.prompt_tokens

    def subtract(self, stream: "Stream") -> None:
        """A stream has ended that was not paused, or is paused."""
        owner = stream.request.terms.owner
        self._by_owner[owner] -= stream.request.prompt_tokens
        if not self._by_owner[owner]:
            del self._by_owner[owner]


@dataclass(frozen=True, eq=False, slots=True)
class StreamContext:
    """What all streams of one model share: its name and task, and the functions that are called for a stream."""

    model: str
    task: WorkerTask
    on_end: Callable[["Stream", RequestEnd], None]  # called at any end
    abort: Callable[["Stream"], None]  # called at an end before the answer's: frees what the request holds
    pause: Callable[["Stream"], None]  # its reader is behind: stop computing
    resume: Callable[["Stream"], None]  # its reader has caught up
    timers: DeadlineTimers = field(default_factory=DeadlineTimers)


@dataclass(eq=False, slots=True)
class Stream:
    """An async iterator of events that ends after Done or Failed, or when it is closed."""

    request: Request
    context: StreamContext
    timing: RequestTiming = field(default_factory=RequestTiming)
    is_open: bool = True  # neither ended nor closed
    tokens: int = 0  # Token events so far
    is_paused: bool = False
    _events: deque[Event] = field(default_factory=deque)
    _unread: int = 0  # events and alternatives that wait for the reader
    _waiter: asyncio.Future[None] | None = None
    _on_ready: Callable[[], None] = lambda: None

    @property
    def submitted(self) -> float:
        return self.timing.submitted

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Event:
        while (event := self.take()) is None:
            if not self.is_open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return event

    def take(self) -> Event | None:
        """The next event that has arrived; None if there is none."""
        if not self._events:
            return None
        event = self._events.popleft()
        self._unread -= event_weight(event)
        if self.is_paused and self.is_open and self._unread <= MAX_UNREAD_EVENTS // 2:
            self.is_paused = False
            self.context.resume(self)
        return event

    def on_ready(self, function: Callable[[], None]) -> None:
        """Call `function` whenever an event has arrived, and when the stream ends."""
        self._on_ready = function

    def start(self) -> None:
        """Watch the deadline."""
        self.context.timers.add(self)

    def close(self, *, answered: bool = False) -> None:
        """Stop reading: the request is aborted, waiting or running, and what it holds is freed.

        `answered` says that the events so far are the whole answer (a stop string was found): it counts as done.  After
        the last event, or a second time, it does nothing.
        """
        if not self.is_open:
            return
        self._events.clear()
        self._unread = 0
        if answered:
            self._end("done", self.tokens, finish="stop")
        elif perf_counter() < self.request.terms.deadline:
            self._end("aborted", self.tokens)
        else:  # another request of the same call was ended first
            self._end("expired", self.tokens, Expired.code)
        self.context.abort(self)

    def receive(self, event: Event) -> None:
        """Take an event of the engine.  Events after the end are dropped."""
        if not self.is_open:
            return
        self._events.append(event)
        self._unread += event_weight(event)
        match event:
            case GeneratedToken(cached_tokens=cached):
                if not self.tokens:
                    self.timing.first_token, self.timing.cached_tokens = perf_counter(), cached
                self.tokens += 1
                self._wake()
                if self._unread >= MAX_UNREAD_EVENTS and not self.is_paused:
                    self.is_paused = True
                    self.context.pause(self)
            case Done(reason=finish, completion_tokens=tokens, cached_tokens=cached):
                self.timing.cached_tokens = cached
                self._end("done", tokens, finish=finish)
            case Failed(error=error):
                self._end("expired" if isinstance(error, Expired) else "failed", self.tokens, error.code)
            case _:
                self._wake()

    def abort(self, error: PolyheadError) -> None:
        """End the request with an error."""
        self.receive(Failed(error))
        self.context.abort(self)

    def _end(
        self, outcome: RequestOutcome, tokens: int, reason: str = "", finish: FinishReason | Literal[""] = ""
    ) -> None:
        self.is_open = False
        self.context.timers.remove(self)
        self._wake()
        timing, request = self.timing, self.request
        timing.ended, timing.outcome, timing.reason = perf_counter(), outcome, reason
        timing.prompt_tokens, timing.generated_tokens = request.prompt_tokens, tokens
        labels = self.context.model, self.context.task, outcome
        seconds = timing.ended - timing.submitted
        self.context.on_end(
            self, RequestEnd(*labels, seconds, timing.prompt_tokens, tokens, reason, request.terms, finish)
        )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._on_ready()


def event_weight(event: Event) -> int:
    """The memory that an event takes while it is unread: 1 for itself, and 1 for each alternative of a token."""
    return 1 + len(event.top) if isinstance(event, GeneratedToken) else 1
