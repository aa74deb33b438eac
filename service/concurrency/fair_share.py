"""Fair sharing of one resource among parties: of the engine thread among models, of a model among clients.

Start-time fair queueing (Goyal et al. 1996): each party has a virtual clock of what it used, divided by its weight, and
the party with the lowest clock is next.  A party that was idle rejoins at the current virtual time, so that idleness
earns no credit.
"""

from collections.abc import Iterable
from typing import Generic, TypeVar

K = TypeVar("K")


class FairScheduler(Generic[K]):
    """The parties and what each has used: seconds or tokens."""

    def __init__(self) -> None:
        self._used: dict[K, float] = {}
        self._weights: dict[K, float] = {}
        self._now = 0.0  # virtual time: the latest clock at which a turn began

    def add(self, party: K, weight: float = 1.0) -> None:
        self._used[party], self._weights[party] = self._now, weight

    def remove(self, party: K) -> None:
        self._used.pop(party, None)
        self._weights.pop(party, None)

    def rejoin(self, party: K) -> None:
        """Call it when an idle party has work again; a new party gets weight 1."""
        if party in self._used:
            self._used[party] = max(self._used[party], self._now)
        else:
            self.add(party)

    def charge(self, party: K, cost: float, *, in_turn: bool = True) -> None:
        """Count what a turn cost.  A party that was removed meanwhile is ignored.

        Where the party was not the next one (`in_turn` is false), the virtual time stays: else one that rejoins would
        wait until those that are next have used as much as it.
        """
        if party in self._used:
            if in_turn:
                self._now = max(self._now, self._used[party])
            self._used[party] += cost / self._weights[party]

    def next(self, wanting: Iterable[K]) -> K | None:
        """The party of `wanting` with the lowest clock, the first of equals; None if there is none."""
        return min(wanting, key=self._used.__getitem__, default=None)

    def next_ones(self, wanting: Iterable[K], within: float) -> list[K]:
        """The party that `next` returns, and behind it, by their clocks, those whose clocks are at most `within` later.

        A party that has turns with the first one is never further ahead of it, so shares stay those of the weights.
        """
        ordered = sorted(wanting, key=self._used.__getitem__)
        return [party for party in ordered if self._used[party] <= self._used[ordered[0]] + within]

    def parties(self) -> Iterable[K]:
        return self._used
