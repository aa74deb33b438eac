"""Whose turn it is, where several share one thing: models an engine thread, clients a model.

Knows nothing of what a turn does, only what it cost.  The one idea is virtual time (start-time fair queueing, Goyal et
al. 1996): every party has a clock of what it used, divided by its weight, and the one furthest behind goes.  One that
wanted nothing for a while rejoins at the time of those that had their turns, so that resting earns no credit.
"""

from collections.abc import Iterable
from typing import Generic, TypeVar

K = TypeVar("K")


class FairScheduler(Generic[K]):
    """Parties and what each has used: seconds or tokens, whatever is charged."""

    def __init__(self) -> None:
        self._used: dict[K, float] = {}
        self._weights: dict[K, float] = {}
        self._now = 0.0  # the latest clock at which a turn began

    def add(self, party: K, weight: float = 1.0) -> None:
        self._used[party], self._weights[party] = self._now, weight

    def remove(self, party: K) -> None:
        self._used.pop(party, None)
        self._weights.pop(party, None)

    def rejoin(self, party: K) -> None:
        """To be called when one that wanted nothing wants something; who is new has weight 1."""
        if party in self._used:
            self._used[party] = max(self._used[party], self._now)
        else:
            self.add(party)

    def charge(self, party: K, cost: float) -> None:
        """After a turn.  One that has left in the meantime pays nothing."""
        if party in self._used:
            self._now = max(self._now, self._used[party])
            self._used[party] += cost / self._weights[party]

    def next(self, wanting: Iterable[K]) -> K | None:
        """The one furthest behind among those who want a turn, the first of equals; None if nobody does."""
        return min(wanting, key=self._used.__getitem__, default=None)

    def parties(self) -> Iterable[K]:
        return self._used
