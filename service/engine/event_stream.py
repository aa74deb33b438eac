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

from ..concurrency.time_slices import SLICE
from ..core.errors import Expired, PolyheadError
from ..core.request import Done, Duty, Event, Failed, Request, Token
from .worker import Course, Ended, Finish, Outcome, too_late

MOST_UNREAD = 256  # events that may wait for their reader before no more of them are made
AHEAD = 2  # steps that nobody has heard of: one is told of while another is computed
PATIENCE_S = 1.0  # after which a loop that hears of nothing is asked whether it is still there


class Lead:
    """How far the engine is ahead of the event loop.  Where it computed on and on, whatever else the loop has to do
    would wait behind all those answers, longer and longer."""

    def __init__(self) -> None:
        self._left = Semaphore(AHEAD)

    def take(self, loop: asyncio.AbstractEventLoop) -> None:
        """On the engine's thread, before a step: waits until the loop has heard of those before it, or is gone."""
        while not self._left.acquire(timeout=PATIENCE_S) and not loop.is_closed():
            pass

    def give(self) -> None:
        """A step was heard of, or there is nothing to hear."""
        self._left.release()


class Alarms:
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
        if deadline == math.inf or not stream.open:
            return
        self._streams.setdefault(deadline, {})[stream] = None
        if deadline not in self._timers:
            left = deadline - stream.submitted
            self._timers[deadline] = asyncio.get_running_loop().call_later(left, self._ring, deadline)

    def remove(self, stream: "Stream") -> None:
        deadline = stream.request.terms.deadline
        streams = self._streams.get(deadline, {})
        if streams.pop(stream, True) is None and not streams:
            del self._streams[deadline]
            self._timers.pop(deadline).cancel()

    def _ring(self, deadline: float) -> None:
        """Ending a stream removes it."""
        self._timers[deadline] = asyncio.get_running_loop().call_soon(self._ring, deadline)
        for stream in list(islice(self._streams[deadline], SLICE)):
            stream.abort(too_late(stream, perf_counter()))


@dataclass(frozen=True, eq=False, slots=True)
class Link:
    """What all streams of one worker share: where they came from, and whom to tell."""

    model: str
    task: Duty
    ended: Callable[["Stream", Ended], None]  # any end
    abort: Callable[["Stream"], None]  # an end before the answer's: what the request holds is to be freed
    hold: Callable[["Stream"], None]  # its reader is behind: what would come next can wait
    resume: Callable[["Stream"], None]  # and has caught up
    alarms: Alarms = field(default_factory=Alarms)


@dataclass(eq=False, slots=True)
class Stream:
    """An async iterator of events that ends after Done or Failed, or when it is closed."""

    request: Request
    link: Link
    course: Course = field(default_factory=Course)
    open: bool = True  # no end yet: neither arrived nor closed
    tokens: int = 0  # Token events so far
    held: bool = False
    _events: deque[Event] = field(default_factory=deque)
    _waiter: asyncio.Future[None] | None = None

    @property
    def submitted(self) -> float:
        return self.course.submitted

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if not self.open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        event = self._events.popleft()
        if self.held and len(self._events) <= MOST_UNREAD // 2:
            self.held = False
            self.link.resume(self)
        return event

    def start(self) -> None:
        """Watch the deadline."""
        self.link.alarms.add(self)

    def close(self, *, answered: bool = False) -> None:
        """Want no more: the request is aborted, queued or running, and what it holds is freed.

        `answered` says that what came is the whole answer (a stop string was found): it counts as done.  After the
        last event, or a second time, it does nothing.
        """
        if not self.open:
            return
        self._events.clear()
        if answered:
            self._end("done", self.tokens, finish="stop")
        elif perf_counter() < self.request.terms.deadline:
            self._end("aborted", self.tokens)
        else:  # another of its call was ended first
            self._end("expired", self.tokens, Expired.code)
        self.link.abort(self)

    def receive(self, event: Event) -> None:
        """From the engine.  What arrives after the end is dropped."""
        if not self.open:
            return
        self._events.append(event)
        match event:
            case Token(cached=cached):
                if not self.tokens:
                    self.course.first, self.course.cached = perf_counter(), cached
                self.tokens += 1
                self._wake()
                if len(self._events) >= MOST_UNREAD and not self.held:
                    self.held = True
                    self.link.hold(self)
            case Done(reason=finish, completion_tokens=tokens, cached_tokens=cached):
                self.course.cached = cached
                self._end("done", tokens, finish=finish)
            case Failed(error=error):
                self._end("expired" if isinstance(error, Expired) else "failed", self.tokens, error.code)
            case _:
                pass  # what was encoded comes with its Done

    def abort(self, error: PolyheadError) -> None:
        """End it from this side, with an error."""
        self.receive(Failed(error))
        self.link.abort(self)

    def _end(self, outcome: Outcome, tokens: int, reason: str = "", finish: Finish = "") -> None:
        self.open = False
        self.link.alarms.remove(self)
        self._wake()
        course, asked = self.course, self.request
        course.ended, course.outcome, course.reason = perf_counter(), outcome, reason
        course.prompt, course.tokens = asked.prompt_tokens, tokens
        whose = self.link.model, self.link.task, outcome
        seconds = course.ended - course.submitted
        self.link.ended(self, Ended(*whose, seconds, course.prompt, tokens, reason, asked.terms, finish))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
