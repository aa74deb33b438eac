"""A queue of work for a few threads, fair to its owners.

A free thread takes, alternately, the next work of the owner that has been served least (start-time fair queueing,
`service.concurrency.fair_share`) and the smallest work of all.  So one owner's work delays another owner's next work
little, and small work waits for little large work, even of the same owner.  The first rule starves nothing.
"""

from threading import Condition
from typing import Generic, TypeVar

from .fair_queue import FairQueue

T = TypeVar("T")


class WorkQueue(Generic[T]):
    """Waiting work, each in the queue once.  Any thread may call it."""

    def __init__(self) -> None:
        self._queue: FairQueue[T] = FairQueue()
        self._owner_and_size: dict[T, tuple[str, int]] = {}  # owner and size
        self._smallest_next = self._closed = False  # whether the next `get` takes the smallest
        self._changed = Condition()  # its lock protects all attributes

    def put(self, piece: T, owner: str, size: int) -> None:
        """Add work; `size`, at least 1, is what it costs its owner."""
        with self._changed:
            self._queue.add(piece, owner, 0)
            self._owner_and_size[piece] = owner, size
            self._changed.notify()

    def get(self) -> T | None:
        """The next work, once there is some; None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._owner_and_size or self._closed)
            piece = (
                min(self._owner_and_size, key=self._size)
                if self._smallest_next and self._owner_and_size
                else self._queue.peek()
            )
            if piece is None:  # it is closed
                return None
            self._smallest_next = not self._smallest_next
            owner, size = self._owner_and_size[piece]
            self._remove(piece)
            self._queue.charge(owner, size)
            return piece

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

    def _size(self, piece: T) -> int:
        return self._owner_and_size[piece][1]

    def _remove(self, piece: T) -> None:
        self._queue.remove(piece)
        del self._owner_and_size[piece]
