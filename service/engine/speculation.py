"""How many tokens to foretell for each sequence before a step, so that several can be right at once.

Plain integers and seconds; nothing here draws or computes.  Whatever it says, answers stay as they are: what is
foretold is computed beside what is known, and kept as far as it is what was drawn (Leviathan et al. 2023,
arXiv:2211.17192).

    trail = speculation.follow(sequence.tokens)     when a sequence is taken in; what is appended there is read later
    speculation.draft([Wish(trail, most, blocks), ...], rows) -> list[list[int]]
                                                    before a step, for those that talk: `rows` it will have anyhow
    speculation.learn(rows, seconds)                after a step, with all the rows it had; drafting is not in `seconds`

The one idea: it pays where tokens a second become more, and both sides of that are measured.  What a lookup could have
foretold is compared with what came whether it was computed or not, so it costs nothing to know while it does not pay.
A draft model that does not pay is asked now and then, for one hundredth of the time.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from service.engine.drafting import Asked, Depth, Drafter
from service.engine.lookup import Lookup
from service.engine.measured import Costs, Odds

GAIN = 1.05  # tokens a second must become more by so much
WORTH = 0.05  # of a token: less likely ones are not looked at
RUNS = (2, 3, 5, 8, 15)  # how far two places agree, in kinds: up to so many tokens, or more
FOUND = (0.3, 0.45, 0.6, 0.75, 0.85, 0.9)  # how often what was found is right, by these kinds, before it is measured
DRAFTED = (0.7,)  # the same of a draft model
AHEAD = 64  # tokens over which it is to pay that a draft model reads a prompt
PROBING = 0.01  # of the time goes to drafts that do not pay, to see whether they would
BACKLOG = 64  # tokens that are quicker read all at once


class Trail:
    """What of a sequence was read so far, and how well it was foretold."""

    def __init__(self, tokens: Sequence[int], found: Odds, drafted: Odds) -> None:
        self.tokens, self.depth = tokens, Depth()
        self._found, self._drafted = found, drafted
        self._lookup: Lookup | None = None  # made when it first talks
        self._told: Sequence[int] = ()  # what the draft model says comes,
        self._since = 0  # after so many tokens

    def read(self) -> None:
        """Take in what has come since."""
        for told, token in zip(self._told, self.tokens[self._since :], strict=False):
            self._drafted.count(0, told == token)
            if told != token:
                break
        self._told = ()
        if self._lookup is None or self._lookup.unread > BACKLOG:
            self._lookup = Lookup(self.tokens)
        while self._lookup.unread:
            run = self._lookup.run
            right = self._lookup.read()
            if run:
                self._found.count(kind_of(run), right)

    def found(self, most: int) -> list[float]:
        """The chances that each of the next tokens is what was found, and all before it; those worth a look."""
        if self._lookup is None or not self._lookup.run:
            return []
        run = self._lookup.run
        each = (self._found.of(kind_of(length)) for length in range(run, run + most))
        return [chance for chance in accumulate(each, mul) if chance > WORTH]

    def drafted(self, most: int) -> list[float]:
        """The same of what a draft model would say."""
        return [self._drafted.of() ** length for length in range(1, most + 1)]

    def propose(self, count: int) -> list[int]:
        return self._lookup.propose(count) if self._lookup else []

    def told(self, tokens: Sequence[int]) -> None:
        """What the draft model says comes next."""
        self._told, self._since = tokens, len(self.tokens)


class Wish(NamedTuple):
    """A sequence that talks, and how many more tokens can be tried with it at most, beside the one it is behind."""

    trail: Trail
    most: int
    blocks: Sequence[int]  # of the cache, that it holds


class Speculation:
    """Of one worker: at most `most` tokens for a sequence, and in a step with one for each no more than `limit`."""

    def __init__(self, most: int, limit: int, drafter: Drafter | None = None) -> None:
        self._most, self._limit, self._drafter = most, limit, drafter
        self._costs, self._found, self._drafted = Costs(), Odds(FOUND), Odds(DRAFTED)
        self._credit = 0.0  # seconds, for drafts that do not pay

    def follow(self, tokens: Sequence[int]) -> Trail:
        """A sequence, to whose tokens others are appended and from which none is ever taken."""
        return Trail(tokens, self._found.narrower(), self._drafted.narrower())

    def learn(self, rows: int, seconds: float) -> None:
        self._costs.learn(rows, seconds)
        self._credit += PROBING * seconds

    def draft(self, wishes: Sequence[Wish], rows: int) -> list[list[int]]:
        """What may come next, for each; nothing where it does not pay."""
        room = self._limit - len(wishes)
        if room <= 0 or not self._most or not self._costs.known:
            return [[] for _ in wishes]
        for wish in wishes:
            wish.trail.read()
        found = [wish.trail.found(min(wish.most, self._most)) for wish in wishes]
        drafts = self._ask(self._drafter, wishes, found, rows) if self._drafter else {}
        drafted = sum(map(len, drafts.values()))
        chances = sorted(
            ((chance, n) for n, each in enumerate(found) if n not in drafts for chance in each), reverse=True
        )
        counts = self._allot(chances[: room - drafted], len(wishes), rows + drafted) if chances else Counter()
        return [drafts.get(n) or wish.trail.propose(counts[n]) for n, wish in enumerate(wishes)]

    def _allot(self, chances: Sequence[tuple[float, int]], talking: int, rows: int) -> Counter[int]:
        """The likeliest tokens, as many as make the most tokens a second, counted by sequence."""
        tokens = accumulate((chance for chance, _ in chances), initial=float(talking))
        speeds = [came / taken for came, taken in zip(tokens, self._costs.of(rows, len(chances)), strict=True)]
        return Counter(number for _, number in chances[: best_of(speeds)])

    def _ask(
        self, drafter: Drafter, wishes: Sequence[Wish], found: Sequence[Sequence[float]], rows: int
    ) -> dict[int, list[int]]:
        """What the draft model says, for those for whom it is likelier right than what was found, if anything was."""
        asked: dict[int, Asked] = {}
        for number, (trail, most, blocks) in enumerate(wishes):
            if most > 0 and (not found[number] or found[number][0] < trail.drafted(1)[0]):
                asked[number] = Asked(trail.depth, trail.tokens, blocks, min(most, self._most))
        behind = {number: missing for number, each in asked.items() if (missing := drafter.behind(each))}
        trails = {number: wishes[number].trail for number in behind}
        if not behind:
            return {}
        count = self._depth(drafter, wishes, behind, rows)
        if not count:
            cheapest = min(behind, key=behind.__getitem__)
            count, trails = self._probe(drafter, behind[cheapest]), {cheapest: trails[cheapest]}
        if not count:
            return {}
        told = drafter.propose([asked[number]._replace(most=min(count, asked[number].most)) for number in trails])
        for trail, tokens in zip(trails.values(), told, strict=True):
            trail.told(tokens)
        return {number: tokens for number, tokens in zip(trails, told, strict=True) if tokens}

    def _depth(self, drafter: Drafter, wishes: Sequence[Wish], behind: Mapping[int, int], rows: int) -> int:
        """How many tokens the draft model is best asked for, of all of these."""
        group, room = len(behind), self._limit - len(wishes)
        most = min(self._most, room // group)
        [once] = drafter.costs.of(group, 0)
        ahead = sum(drafter.costs.of(missing, 0)[0] for missing in behind.values() if missing > 1) / AHEAD
        steps = self._costs.of(rows, most * group)
        each = zip(*(wishes[number].trail.drafted(most) for number in behind), strict=True)
        tokens = accumulate(map(sum, each), initial=float(len(wishes)))
        speeds = [
            came / (steps[count * group] + (count * once + ahead if count else 0.0))
            for count, came in enumerate(tokens)
        ]
        return best_of(speeds)

    def _probe(self, drafter: Drafter, missing: int) -> int:
        """A token, if what was saved for it is enough; else none."""
        [cost] = drafter.costs.of(missing, 0)
        if self._credit < 2 * cost:  # and for the row in the step
            return 0
        self._credit -= 2 * cost
        return 1


def best_of(speeds: Sequence[float]) -> int:
    """Which is the best; the first, which is to go on as ever, unless that is worth it."""
    best = max(range(len(speeds)), key=speeds.__getitem__)
    return best if speeds[best] > GAIN * speeds[0] else 0


def kind_of(run: int) -> int:
    return bisect_left(RUNS, run)
