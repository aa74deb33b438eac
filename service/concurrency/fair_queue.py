"""A queue that is fair to the owners of its entries, and the deadlines of entries.

Entries wait in lines, one for each owner and priority.  The highest priority goes first; among its lines the owner that
has been served least (in tokens, by virtual time); within a line the entry that came first.  So an owner with a
thousand entries delays the single entry of another owner by one turn.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from .fair_share import FairScheduler
from .time_slices import SLICE_SIZE

T = TypeVar("T")
LineKey = tuple[int, str]  # priority and owner


class FairQueue(Generic[T]):
    """Waiting entries, each in the queue once."""

    def __init__(self) -> None:
        self._lines: dict[LineKey, OrderedDict[T, None]] = {}
        self._line_of: dict[T, LineKey] = {}
        self._owner_shares: FairScheduler[str] = FairScheduler()  # of owners, in tokens

    def __len__(self) -> int:
        return len(self._line_of)

    def __iter__(self) -> Iterator[T]:
        return iter(self._line_of)

    def __contains__(self, entry: T) -> bool:
        return entry in self._line_of

    def add(self, entry: T, owner: str, priority: int) -> None:
        """Add an entry at the end of its line."""
        if not any(waiting == owner for _, waiting in self._lines):
            self._owner_shares.rejoin(owner)
        self._lines.setdefault((priority, owner), OrderedDict())[entry] = None
        self._line_of[entry] = priority, owner

    def put_back(self, entry: T, owner: str, priority: int) -> None:
        """Add an entry at the head of its line, because it was preempted."""
        self.add(entry, owner, priority)
        self._lines[priority, owner].move_to_end(entry, last=False)

    def remove(self, entry: T) -> None:
        line = self._line_of.pop(entry)
        del self._lines[line][entry]
        if not self._lines[line]:
            del self._lines[line]

    def peek(self, without: Collection[str] = ()) -> T | None:
        """The next entry, without those of the owners `without`; it stays until it is removed."""
        lines = [line for line in self._lines if line[1] not in without]
        if not lines:
            return None
        highest = max(priority for priority, _ in lines)
        owner = self.next_owner(owner for priority, owner in lines if priority == highest)
        return next(iter(self._lines[highest, owner]))

    def next_owner(self, owners: Iterable[str]) -> str:
        """The one of `owners` that has been served least; all of them must have had entries."""
        owner = self._owner_shares.next(owners)
        assert owner is not None
        return owner

    def charge(self, owner: str, cost: float, *, in_turn: bool = True) -> None:
        """Count what an owner's entries cost: tokens, or any unit that all entries of this queue have.

        `in_turn`: see FairScheduler.charge.
        """
        self._owner_shares.charge(owner, cost, in_turn=in_turn)


class Deadlines(Generic[T]):
    """The deadlines of entries, in seconds of any one clock.  They are searched only when the earliest has passed."""

    def __init__(self) -> None:
        self._deadlines: dict[T, float] = {}
        self._earliest = math.inf  # a lower bound of all deadlines

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, entry: T, deadline: float) -> None:
        if deadline < math.inf:
            self._deadlines[entry] = deadline
            self._earliest = min(self._earliest, deadline)

    def remove(self, entry: T) -> None:
        self._deadlines.pop(entry, None)

    def expired(self, now: float) -> list[T]:
        """Entries whose deadline has passed, SLICE_SIZE of them at most.  They stay until they are removed."""
        if now < self._earliest:
            return []
        self._earliest = min(self._deadlines.values(), default=math.inf)
        return list(islice((entry for entry, deadline in self._deadlines.items() if deadline <= now), SLICE_SIZE))
