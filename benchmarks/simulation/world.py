"""Simulated time: a queue of future events.

Events are in a heap, ordered by their times. Time advances by taking the first event out of the heap.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any


class World:
    """`now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._next: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()  # what has the same time happens in the order it was told

    def at(self, time: float, what: Callable[..., None], *about: Any) -> None:
        heappush(self._next, (time, next(self._order), what, about))

    def run(self) -> None:
        while self._next:
            self.now, _, what, about = heappop(self._next)
            what(*about)
