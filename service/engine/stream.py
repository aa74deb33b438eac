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
from threading import Semaphore
from time import perf_counter

from service.engine.worker import Course, Ended, Finish, Outcome, too_late
from service.errors import Expired, PolyheadError
from service.request import Done, Duty, Event, Failed, Request, Token

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


@dataclass(frozen=True, eq=False, slots=True)
class Link:
    """What all streams of one worker share: where they came from, and whom to tell."""

    model: str
    task: Duty
    ended: Callable[["Stream", Ended], None]  # any end
    abort: Callable[["Stream"], None]  # an end before the answer's: what the request holds is to be freed
    hold: Callable[["Stream"], None]  # its reader is behind: what would come next can wait
    resume: Callable[["Stream"], None]  # and has caught up


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
    _timer: asyncio.TimerHandle | None = None  # of its deadline

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
        """Watch the deadline: its client is told in time, whatever the engine is doing."""
        left = self.request.terms.deadline - self.submitted
        if left < math.inf:
            self._timer = asyncio.get_running_loop().call_later(left, self._expire)

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
        else:
            self._end("aborted", self.tokens)
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

    def _expire(self) -> None:
        self.abort(too_late(self, perf_counter()))

    def abort(self, error: PolyheadError) -> None:
        """End it from this side, with an error."""
        self.receive(Failed(error))
        self.link.abort(self)

    def _end(self, outcome: Outcome, tokens: int, reason: str = "", finish: Finish = "") -> None:
        self.open = False
        if self._timer is not None:
            self._timer.cancel()
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
