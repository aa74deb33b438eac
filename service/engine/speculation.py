"""How many tokens to foretell for each sequence before a step, so that several can be right at once.

Plain integers and seconds; nothing here draws or computes.  Whatever it says, answers stay as they are: what is
foretold is computed beside what is known, and kept as far as it is what was drawn (Leviathan et al. 2023,
arXiv:2211.17192).

    trail = speculation.follow(sequence.tokens)     when a sequence is taken in; what is appended there is read later
    speculation.draft([Wish(trail, most, blocks), ...], rows) -> list[list[int]]
                                                    before a step, for those that talk: `rows` it will have anyhow
    speculation.learn(rows, seconds)                after a step, with all the rows it had

The one idea: it pays where tokens a second become more, and both sides of that are measured.  What could have been
foretold is compared with what came whether it was computed or not, so it costs nothing to know while it does not pay.
What steps of so many rows take is the least they took: what disturbs a step only ever adds.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np

from service.engine.lookup import Lookup

GAIN = 1.05  # tokens a second must become more by so much
WORTH = 0.05  # of a token: less likely ones are not looked at
RUNS = (2, 3, 5, 8, 15)  # how far two places agree, in kinds: up to so many tokens, or more
FIRST = (0.3, 0.45, 0.6, 0.75, 0.85, 0.9)  # what is expected of each kind before anything is measured
DOUBT = 4.0  # for how many trials what is expected counts
MEMORY = 64.0  # trials after which those before count half
DRIFT = 1.002  # by which the least seconds grow whenever they are looked at, as contexts do
STALE = 512  # steps after which what was measured with more rows counts no more
BACKLOG = 64  # tokens that are quicker read all at once
ROWS = (*range(1, 17), *(round(16 * 2 ** (part / 4)) for part in range(1, 65)))  # a step's rows in kinds, up to each


class Odds:
    """How often what was foretold came, by kind; `wider` are those of more sequences, to begin with."""

    def __init__(self, wider: "Odds | None" = None) -> None:
        self._wider = wider
        self._right, self._tried = [0.0] * len(FIRST), [0.0] * len(FIRST)

    def of(self, kind: int) -> float:
        expected = self._wider.of(kind) if self._wider else FIRST[kind]
        return (self._right[kind] + DOUBT * expected) / (self._tried[kind] + DOUBT)

    def count(self, kind: int, right: bool) -> None:
        if self._wider:
            self._wider.count(kind, right)
        if self._tried[kind] >= MEMORY:
            self._right[kind] /= 2
            self._tried[kind] /= 2
        self._right[kind] += right
        self._tried[kind] += 1


class Costs:
    """What a step takes, by its rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by kind
        self._looked: dict[int, int] = {}  # in which step, by kind
        self._steps = 0

    def learn(self, rows: int, seconds: float) -> None:
        kind = bisect_left(ROWS, rows)
        self._steps += 1
        self._looked[kind] = self._steps
        self._seconds[kind] = min(seconds, self._seconds.get(kind, seconds) * DRIFT)

    def of(self, rows: int, more: int) -> list[float]:
        """Seconds of a step of `rows`, and of one with one more, and so on, up to `more`."""
        base = bisect_left(ROWS, rows)
        known = [kind for kind in sorted(self._seconds) if kind <= base or self._steps - self._looked[kind] < STALE]
        if not known:
            return [1.0] * (more + 1)
        at, seconds = [ROWS[kind] for kind in known], [self._seconds[kind] for kind in known]
        if len(known) > 1:
            slope = max(seconds[-1] - seconds[-2], 0.0) / (at[-1] - at[-2])
            at.append(at[-1] + rows + more)
            seconds.append(seconds[-1] + slope * (rows + more))
        curve: list[float] = np.interp(range(rows, rows + more + 1), at, seconds).tolist()
        return curve


class Trail:
    """What of a sequence was read so far, and how well it was foretold."""

    def __init__(self, tokens: Sequence[int], odds: Odds) -> None:
        self._tokens, self._odds = tokens, Odds(odds)
        self._lookup: Lookup | None = None  # made when it first talks

    def read(self) -> None:
        """Take in what has come since."""
        if self._lookup is None or self._lookup.unread > BACKLOG:
            self._lookup = Lookup(self._tokens)
        lookup = self._lookup
        while lookup.unread:
            run = lookup.run
            right = lookup.read()
            if run:
                self._odds.count(kind_of(run), right)

    def chances(self, most: int) -> list[float]:
        """Of the next tokens that each comes, and all before it; as many as are worth a look."""
        if self._lookup is None or not self._lookup.run:
            return []
        run = self._lookup.run
        each = (self._odds.of(kind_of(length)) for length in range(run, run + most))
        return [chance for chance in accumulate(each, mul) if chance > WORTH]

    def propose(self, count: int) -> list[int]:
        return self._lookup.propose(count) if self._lookup else []


class Wish(NamedTuple):
    """A sequence that talks, and how many more tokens can be tried with it at `most`, beside the one it is behind."""

    trail: Trail
    most: int
    blocks: Sequence[int]  # of the cache, that it holds


class Speculation:
    """Of one worker: at most `most` tokens for a sequence, and in a step with one for each no more than `limit`."""

    def __init__(self, most: int, limit: int) -> None:
        self._most, self._limit = most, limit
        self._odds, self._costs = Odds(), Costs()

    def follow(self, tokens: Sequence[int]) -> Trail:
        """A sequence, to whose tokens others are appended and from which none is ever taken."""
        return Trail(tokens, self._odds)

    def learn(self, rows: int, seconds: float) -> None:
        self._costs.learn(rows, seconds)

    def draft(self, wishes: Sequence[Wish], rows: int) -> list[list[int]]:
        """What may come next, for each; nothing where it does not pay."""
        chances: list[tuple[float, int]] = []
        if len(wishes) >= self._limit:
            return [[] for _ in wishes]
        for number, wish in enumerate(wishes):
            wish.trail.read()
            chances += ((chance, number) for chance in wish.trail.chances(min(wish.most, self._most)))
        counts = self._allot(sorted(chances, reverse=True), len(wishes), rows) if chances else {}
        return [wish.trail.propose(counts.get(number, 0)) for number, wish in enumerate(wishes)]

    def _allot(self, chances: Sequence[tuple[float, int]], talking: int, rows: int) -> Counter[int]:
        """The likeliest tokens, as many as make the most tokens a second, counted by sequence."""
        chances = chances[: max(self._limit - talking, 0)]
        tokens = accumulate((chance for chance, _ in chances), initial=float(talking))
        speeds = [came / taken for came, taken in zip(tokens, self._costs.of(rows, len(chances)), strict=True)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if speeds[best] < GAIN * speeds[0]:
            best = 0
        return Counter(number for _, number in chances[:best])


def kind_of(run: int) -> int:
    return bisect_left(RUNS, run)
