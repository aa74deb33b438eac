"""A queue of work for a few threads, fair to its owners.

A free thread takes, alternately, the next work of the owner that has been served least (start-time fair queueing,
`service.concurrency.fair_share`) and the smallest work of all.  So one owner's work delays another owner's next work
little, and small work waits for little large work, even of the same owner.  The first rule starves nothing.

Work of which it is unknown how long it takes, as that of a disk, can be limited by `per_owner`: an owner with as much
work under way is passed over until some of it ends.
"""

import math
from collections import Counter
from threading import Condition
from typing import Generic, TypeVar

from .fair_queue import FairQueue

T = TypeVar("T")


class WorkQueue(Generic[T]):
    """Waiting work, each in the queue once.  Any thread may call it.  Work that `get` returned is under way until `end`
    is called.
    """

    def __init__(self, per_owner: float = math.inf) -> None:
        self._queue: FairQueue[T] = FairQueue()
        self._owner_and_size: dict[T, tuple[str, int]] = {}  # owner and size
        self._per_owner, self._under_way = per_owner, Counter[str]()  # work of each owner, at most and now
        self._smallest_next = self._closed = False  # whether the next `get` takes the smallest
        self._changed = Condition()  # its lock protects all attributes

    def put(self, piece: T, owner: str, size: int) -> None:
        """Add work; `size`, at least 1, is what it costs its owner."""
        with self._changed:
            self._queue.add(piece, owner, 0)
            self._owner_and_size[piece] = owner, size
            self._changed.notify()

    def get(self) -> T | None:
        """The next work, once there is some that may begin; None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._choose() is not None)
            piece = self._choose()
            if piece is None:  # it is closed
                return None
            self._smallest_next = not self._smallest_next
            owner, size = self._owner_and_size[piece]
            self._remove(piece)
            self._queue.charge(owner, size)
            self._under_way[owner] += 1
            return piece

    def end(self, owner: str) -> None:
        """Work of an owner that `get` returned has ended."""
        with self._changed:
            self._under_way[owner] -= 1
            if not self._under_way[owner]:
                del self._under_way[owner]
            self._changed.notify()

    def discard(self, piece: T) -> None:
        """Remove work that is not needed any more; an unknown one is no error."""
        with self._changed:
            if piece in self._owner_and_size:
                self._remove(piece)

    def close(self) -> list[T]:
        """Return what has waited; each `get` returns None from now on."""
        with self._changed:
            self._closed, left = True, list(self._owner_and_size)
            for piece in left:
                self._remove(piece)
            self._changed.notify_all()
            return left

    def _choose(self) -> T | None:
        full = {owner for owner, count in self._under_way.items() if count >= self._per_owner}
        if not self._smallest_next:
            return self._queue.peek(full)
        allowed = (piece for piece, (owner, _) in self._owner_and_size.items() if owner not in full)
        return min(allowed, key=self._size, default=None)

    def _size(self, piece: T) -> int:
        return self._owner_and_size[piece][1]

    def _remove(self, piece: T) -> None:
        self._queue.remove(piece)
        del self._owner_and_size[piece]
