"""How many tokens to foretell for each sequence before a step, so that several can be right at once.

Plain integers and seconds; nothing here draws or computes.  Whatever it says, answers stay as they are: what is
foretold is computed beside what is known, and kept as far as it is what was drawn (Leviathan et al. 2023,
arXiv:2211.17192).

    trail = speculation.follow(sequence.tokens)     when a sequence is taken in; what is appended there is read later
    speculation.draft([Wish(trail, most, blocks), ...], rows) -> list[list[int]]
                                                    before a step, for those that talk and may have drafts;
                                                    all that talk have `rows`, one each
    speculation.learn(rows, seconds)                after a step, what the network took; not where prompts are in it

The one idea: it pays where sequences become faster, and both sides of that are measured.  What a lookup could have
foretold is compared with what came whether it was computed or not, so it costs nothing to know while it does not pay.
A draft model that does not pay is asked now and then, for one hundredth of the time.

Rows that make one sequence faster make the step longer for all.  What is looked for is the highest product of all
their speeds (proportional fairness, Kelly 1997): nobody is made slower for what gives others less.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import log
from operator import mul
from typing import NamedTuple

from .draft_model import Asked, Depth, Drafter
from .prompt_lookup import Lookup
from .speculation_stats import Costs, Odds

GAIN = 1.1  # sequences must become faster by so much, in the (geometric) mean
WORTH = 0.05  # of a token: less likely ones are not looked at
RUNS = (1, 2, 3, 5, 8, 15)  # how far two places agree, in kinds: up to so many tokens, or more
FOUND = (
    0.3,
    0.3,
    0.45,
    0.6,
    0.75,
    0.85,
    0.9,
)  # how often what was found is right, by these kinds, before it is measured
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
        room = self._limit - rows
        if room <= 0 or not self._most or not self._costs.known:
            return [[] for _ in wishes]
        for wish in wishes:
            wish.trail.read()
        found = [wish.trail.found(min(wish.most, self._most)) for wish in wishes]
        drafts = self._ask(self._drafter, wishes, found, rows) if self._drafter else {}
        drafted = sum(map(len, drafts.values()))
        gains = [(gain, n) for n, each in enumerate(found) if n not in drafts for gain in gains_of(each)]
        counts = self._allot(sorted(gains, reverse=True)[: room - drafted], rows, drafted)
        return [drafts.get(n) or wish.trail.propose(counts[n]) for n, wish in enumerate(wishes)]

    def _allot(self, gains: Sequence[tuple[float, int]], rows: int, drafted: int) -> Counter[int]:
        """The tokens that gain most, as many as are best, counted by sequence."""
        if not gains:
            return Counter()
        gained = list(accumulate((gain for gain, _ in gains), initial=0.0))
        best = best_of(gained, self._costs.of(rows + drafted, len(gains)), rows)
        return Counter(number for _, number in gains[:best])

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
        count = self._depth(drafter, list(trails.values()), list(behind.values()), rows) if behind else 0
        if behind and not count:
            cheapest = min(behind, key=behind.__getitem__)
            count, trails = self._probe(drafter, behind[cheapest]), {cheapest: trails[cheapest]}
        if not count:
            return {}
        told = drafter.propose([asked[number]._replace(most=min(count, asked[number].most)) for number in trails])
        for trail, tokens in zip(trails.values(), told, strict=True):
            trail.told(tokens)
        return {number: tokens for number, tokens in zip(trails, told, strict=True) if tokens}

    def _depth(self, drafter: Drafter, trails: Sequence[Trail], behind: Sequence[int], rows: int) -> int:
        """How many tokens the draft model is best asked for, of all of these."""
        group = len(trails)
        most = min(self._most, (self._limit - rows) // group)
        [once] = drafter.costs.of(group, 0)
        ahead = sum(drafter.costs.of(missing, 0)[0] for missing in behind if missing > 1) / AHEAD
        steps = self._costs.of(rows, most * group)[::group]
        seconds = [steps[0], *(step + count * once + ahead for count, step in enumerate(steps[1:], 1))]
        each = zip(*(gains_of(trail.drafted(most)) for trail in trails), strict=True)
        return best_of(list(accumulate(map(sum, each), initial=0.0)), seconds, rows)

    def _probe(self, drafter: Drafter, missing: int) -> int:
        """A token, if what was saved for it is enough; else none."""
        [cost] = drafter.costs.of(missing, 0)
        if self._credit < 2 * cost:  # and for the row in the step
            return 0
        self._credit -= 2 * cost
        return 1


def gains_of(chances: Sequence[float]) -> list[float]:
    """By how much each token more makes a sequence faster, on a scale on which this adds up (the logarithm)."""
    return [log(after / before) for before, after in pairwise(accumulate(chances, initial=1.0))]


def best_of(gained: Sequence[float], seconds: Sequence[float], talking: int) -> int:
    """Which of some ways is the best for `talking` sequences, by what they gain together and a step takes.

    The first, which is to go on as ever, unless another one is worth it.
    """
    worth = [gain / talking - log(taken / seconds[0]) for gain, taken in zip(gained, seconds, strict=True)]
    best = max(range(len(worth)), key=worth.__getitem__)
    return best if worth[best] > log(GAIN) else 0


def kind_of(run: int) -> int:
    return bisect_left(RUNS, run)
