"""Finds the request that makes a step fail, by computing the step again in halves.

A step that raised has changed no state, so its requests can be tried again.  A temporary fault does not come back.  A
request that raises every time is alone after about log2(n) splits, and only that request fails.
"""

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class FaultBisector(Generic[T]):
    """Batches to be tried before new requests are started."""

    def __init__(self) -> None:
        self._batches: deque[list[T]] = deque()

    def __bool__(self) -> bool:
        return bool(self._batches)

    def next_batch(self) -> list[T]:
        return self._batches.popleft()

    def split(self, batch: Sequence[T]) -> list[T]:
        """The request to blame if `batch` is one; otherwise none, and the halves are tried next."""
        if len(batch) <= 1:
            return list(batch)
        middle = len(batch) // 2
        self._batches.extendleft((list(batch[middle:]), list(batch[:middle])))
        return []
