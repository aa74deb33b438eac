"""The events of submitted requests, as the text room reads them: of one request, or of all requests of a call."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

from ..concurrency.time_slices import SLICE_SIZE, TakeTurn, yield_turn
from ..core.request import Event, Request
from ..engine.worker import RequestTiming


class EventSource(Protocol):
    """The events of a submitted request; Done or Failed is the last. Closing it early aborts the request.

    `answered` means that the request counts as done, since the answer is complete. A source is read by iterating over
    it, or with `take` when the function given to `on_ready` is called.
    """

    @property
    def timing(self) -> RequestTiming: ...

    @property
    def is_open(self) -> bool:
        """Whether more events may arrive."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def take(self) -> Event | None:
        """The next event that has arrived; None if there is none."""

    def on_ready(self, function: Callable[[], None]) -> None:
        """Call `function` whenever an event has arrived, and when the source is closed."""

    def close(self, *, answered: bool = False) -> None: ...


Submit = Callable[[Sequence[Request]], Sequence[EventSource]]
SubmitCall = Callable[[Sequence[Request]], Awaitable[Sequence[EventSource]]]


class EventReader:
    """Reads the events of several sources as they arrive; where several have some, one of each in turn.

    Other tasks run (`take_turn`) after every SLICE_SIZE times that a source was looked at, even if all events are there
    already.
    """

    def __init__(self, sources: Sequence[EventSource], take_turn: TakeTurn = yield_turn) -> None:
        self.sources, self.take_turn = sources, take_turn
        self._unfinished = set(range(len(sources)))
        self._ready = deque(range(len(sources)))  # sources that may have an event, each at most once
        self._is_ready = [True] * len(sources)
        self._watched = 0  # the sources before it report their events
        self._looks = 0
        self._waiter: asyncio.Future[None] | None = None

    async def read(self) -> tuple[int, Event]:
        """The next event, with the index of its source. Raises StopAsyncIteration when all sources have ended."""
        while self._unfinished:
            while self._ready:
                self._looks += 1
                if not self._looks % SLICE_SIZE:
                    await self.take_turn()
                index = self._ready.popleft()
                if index == self._watched:  # at first they are looked at in order
                    self.sources[index].on_ready(partial(self._mark_ready, index))
                    self._watched += 1
                if index not in self._unfinished:
                    continue
                if (event := self.sources[index].take()) is not None:
                    self._ready.append(index)
                    return index, event
                self._is_ready[index] = False
                if not self.sources[index].is_open:
                    self._unfinished.discard(index)
            if self._unfinished:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        raise StopAsyncIteration

    def leave(self, index: int) -> None:
        """Read no more of a source."""
        self._unfinished.discard(index)

    def _mark_ready(self, index: int) -> None:
        if not self._is_ready[index]:
            self._is_ready[index] = True
            self._ready.append(index)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
