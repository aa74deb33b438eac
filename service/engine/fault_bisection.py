"""Who spoiled a step: found by computing it again in halves.

Knows nothing of what is computed.  The one idea: a step that raised has changed nothing that is booked, so its members
can be tried again.  Whatever passed by itself (a hiccup) is forgotten; one that raises whenever it takes part stands
alone after about log2(n) tries a side, and it alone fails.
"""

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class FaultBisector(Generic[T]):
    """Batches to be tried before anything new is begun."""

    def __init__(self) -> None:
        self._batches: deque[list[T]] = deque()

    def __bool__(self) -> bool:
        return bool(self._batches)

    def next_batch(self) -> list[T]:
        return self._batches.popleft()

    def split(self, batch: Sequence[T]) -> list[T]:
        """Who is to blame: the one member; or nobody yet, and the halves are next."""
        if len(batch) <= 1:
            return list(batch)
        middle = len(batch) // 2
        self._batches.extendleft((list(batch[middle:]), list(batch[:middle])))
        return []
