"""The way back: one request's events, from the engine to whoever asked.

A Stream knows neither threads nor models.  It lives on the event loop thread; workers only carry it about, to say whose
an event is.  The one idea: it ends exactly once, whoever ends it, and says how to `ended`.  A reader
who falls behind costs a buffer, not the engine's time: the request is held until it has caught up.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from threading import Semaphore
from time import perf_counter

from ..concurrency.time_slices import SLICE_SIZE
from ..core.errors import Expired, PolyheadError
from ..core.request import Done, Event, Failed, GeneratedToken, Request, WorkerTask
from .worker import FinishReason, RequestEnd, RequestOutcome, RequestTiming, deadline_error

MAX_UNREAD_EVENTS = 256  # events that may wait for their reader before no more of them are made
MAX_STEPS_AHEAD = 2  # steps that nobody has heard of: one is told of while another is computed
LOOP_CHECK_S = 1.0  # after which a loop that hears of nothing is asked whether it is still there


class StepCredits:
    """How far the engine is ahead of the event loop.  Where it computed on and on, whatever else the loop has to do
    would wait behind all those answers, longer and longer."""

    def __init__(self) -> None:
        self._left = Semaphore(MAX_STEPS_AHEAD)

    def acquire(self, loop: asyncio.AbstractEventLoop) -> None:
        """On the engine's thread, before a step: waits until the loop has heard of those before it, or is gone."""
        while not self._left.acquire(timeout=LOOP_CHECK_S) and not loop.is_closed():
            pass

    def release(self) -> None:
        """A step was heard of, or there is nothing to hear."""
        self._left.release()


class DeadlineTimers:
    """Ends streams at their deadlines, whatever the engine is doing: their clients hear of it in time.

    All requests of one call have the same deadline, so there is one timer a deadline, and at most SLICE streams are
    ended in one turn of the event loop.
    """

    def __init__(self) -> None:
        self._streams: dict[float, dict[Stream, None]] = {}  # by their deadline
        self._timers: dict[float, asyncio.Handle] = {}

    def __len__(self) -> int:
        """Deadlines that are watched."""
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
        """Ending a stream removes it."""
        self._timers[deadline] = asyncio.get_running_loop().call_soon(self._expire, deadline)
        for stream in list(islice(self._streams[deadline], SLICE_SIZE)):
            stream.abort(deadline_error(stream, perf_counter()))


@dataclass(frozen=True, eq=False, slots=True)
class StreamContext:
    """What all streams of one worker share: where they came from, and whom to tell."""

    model: str
    task: WorkerTask
    on_end: Callable[["Stream", RequestEnd], None]  # any end
    abort: Callable[["Stream"], None]  # an end before the answer's: what the request holds is to be freed
    pause: Callable[["Stream"], None]  # its reader is behind: what would come next can wait
    resume: Callable[["Stream"], None]  # and has caught up
    timers: DeadlineTimers = field(default_factory=DeadlineTimers)


@dataclass(eq=False, slots=True)
class Stream:
    """An async iterator of events that ends after Done or Failed, or when it is closed."""

    request: Request
    context: StreamContext
    timing: RequestTiming = field(default_factory=RequestTiming)
    is_open: bool = True  # no end yet: neither arrived nor closed
    tokens: int = 0  # Token events so far
    is_paused: bool = False
    _events: deque[Event] = field(default_factory=deque)
    _waiter: asyncio.Future[None] | None = None

    @property
    def submitted(self) -> float:
        return self.timing.submitted

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if not self.is_open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        event = self._events.popleft()
        if self.is_paused and len(self._events) <= MAX_UNREAD_EVENTS // 2:
            self.is_paused = False
            self.context.resume(self)
        return event

    def start(self) -> None:
        """Watch the deadline."""
        self.context.timers.add(self)

    def close(self, *, answered: bool = False) -> None:
        """Want no more: the request is aborted, queued or running, and what it holds is freed.

        `answered` says that what came is the whole answer (a stop string was found): it counts as done.  After the
        last event, or a second time, it does nothing.
        """
        if not self.is_open:
            return
        self._events.clear()
        if answered:
            self._end("done", self.tokens, finish="stop")
        elif perf_counter() < self.request.terms.deadline:
            self._end("aborted", self.tokens)
        else:  # another of its call was ended first
            self._end("expired", self.tokens, Expired.code)
        self.context.abort(self)

    def receive(self, event: Event) -> None:
        """From the engine.  What arrives after the end is dropped."""
        if not self.is_open:
            return
        self._events.append(event)
        match event:
            case GeneratedToken(cached_tokens=cached):
                if not self.tokens:
                    self.timing.first_token, self.timing.cached_tokens = perf_counter(), cached
                self.tokens += 1
                self._wake()
                if len(self._events) >= MAX_UNREAD_EVENTS and not self.is_paused:
                    self.is_paused = True
                    self.context.pause(self)
            case Done(reason=finish, completion_tokens=tokens, cached_tokens=cached):
                self.timing.cached_tokens = cached
                self._end("done", tokens, finish=finish)
            case Failed(error=error):
                self._end("expired" if isinstance(error, Expired) else "failed", self.tokens, error.code)
            case _:
                pass  # what was encoded comes with its Done

    def abort(self, error: PolyheadError) -> None:
        """End it from this side, with an error."""
        self.receive(Failed(error))
        self.context.abort(self)

    def _end(self, outcome: RequestOutcome, tokens: int, reason: str = "", finish: FinishReason = "") -> None:
        self.is_open = False
        self.context.timers.remove(self)
        self._wake()
        course, asked = self.timing, self.request
        course.ended, course.outcome, course.reason = perf_counter(), outcome, reason
        course.prompt_tokens, course.generated_tokens = asked.prompt_tokens, tokens
        whose = self.context.model, self.context.task, outcome
        seconds = course.ended - course.submitted
        self.context.on_end(
            self, RequestEnd(*whose, seconds, course.prompt_tokens, tokens, reason, asked.terms, finish)
        )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
