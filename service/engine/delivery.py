"""Delivers the events of a step to their streams in slices, so that other tasks of the event loop run in between."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from ..concurrency.time_slices import SLICE_SIZE
from .worker import HandleEvent, Worker


class EventDelivery:
    """Events to be delivered.  Those of one worker arrive in the order in which they were added.

    Used on the event loop thread only.
    """

    def __init__(self) -> None:
        self._waiting: dict[Worker, deque[tuple[Iterator[HandleEvent], Callable[[], None]]]] = {}

    def add(self, worker: Worker, events: Sequence[HandleEvent], delivered: Callable[[], None] = lambda: None) -> None:
        """Deliver `events`, at most SLICE_SIZE in one iteration of the event loop; then call `delivered`.

        The first slice is delivered at once where no others of this worker are pending.
        """
        if worker in self._waiting:
            self._waiting[worker].append((iter(events), delivered))
        else:
            self._waiting[worker] = deque([(iter(events), delivered)])
            self._deliver_slice(worker)

    def _deliver_slice(self, worker: Worker) -> None:
        """Deliver the next slice.  Where a stream raises, the events behind it are delivered all the same."""
        waiting = self._waiting[worker]
        left = SLICE_SIZE
        try:
            while waiting and left:
                events, delivered = waiting[0]
                for handle, event in islice(events, left):
                    left -= 1
                    handle.receive(event)
                if left:
                    waiting.popleft()
                    delivered()
        finally:
            if waiting:
                asyncio.get_running_loop().call_soon(self._deliver_slice, worker)
            else:
                del self._waiting[worker]


def call_last(function: Callable[[], None], count: int) -> Callable[[], None]:
    """A function that calls `function` when it is called for the `count`th time.  Any thread may call it."""
    left = iter(range(count - 1, -1, -1))

    def call() -> None:
        if not next(left):
            function()

    return call
