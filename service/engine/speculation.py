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

from .draft_model import DraftCacheState, DraftModel, DraftQuery
from .prompt_lookup import PromptLookup
from .speculation_stats import HitRates, StepCosts

MIN_SPEEDUP = 1.1  # sequences must become faster by so much, in the (geometric) mean
MIN_CHANCE = 0.05  # of a token: less likely ones are not looked at
RUN_BOUNDS = (1, 2, 3, 5, 8, 15)  # how far two places agree, in kinds: up to so many tokens, or more
LOOKUP_PRIORS = (
    0.3,
    0.3,
    0.45,
    0.6,
    0.75,
    0.85,
    0.9,
)  # how often what was found is right, by these kinds, before it is measured
DRAFT_PRIORS = (0.7,)  # the same of a draft model
PREFILL_PAYBACK = 64  # tokens over which it is to pay that a draft model reads a prompt
PROBE_SHARE = 0.01  # of the time goes to drafts that do not pay, to see whether they would
REBUILD_TOKENS = 64  # tokens that are quicker read all at once


class DraftState:
    """What of a sequence was read so far, and how well it was foretold."""

    def __init__(self, tokens: Sequence[int], found: HitRates, drafted: HitRates) -> None:
        self.tokens, self.cache_state = tokens, DraftCacheState()
        self._lookup_rates, self._draft_rates = found, drafted
        self._lookup: PromptLookup | None = None  # made when it first talks
        self._proposed: Sequence[int] = ()  # what the draft model says comes,
        self._proposed_at = 0  # after so many tokens

    def read_new_tokens(self) -> None:
        """Take in what has come since."""
        for told, token in zip(self._proposed, self.tokens[self._proposed_at :], strict=False):
            self._draft_rates.record(0, told == token)
            if told != token:
                break
        self._proposed = ()
        if self._lookup is None or self._lookup.unread_count > REBUILD_TOKENS:
            self._lookup = PromptLookup(self.tokens)
        while self._lookup.unread_count:
            run = self._lookup.run
            right = self._lookup.read_token()
            if run:
                self._lookup_rates.record(run_kind(run), right)

    def lookup_chances(self, most: int) -> list[float]:
        """The chances that each of the next tokens is what was found, and all before it; those worth a look."""
        if self._lookup is None or not self._lookup.run:
            return []
        run = self._lookup.run
        each = (self._lookup_rates.rate(run_kind(length)) for length in range(run, run + most))
        return [chance for chance in accumulate(each, mul) if chance > MIN_CHANCE]

    def draft_chances(self, most: int) -> list[float]:
        """The same of what a draft model would say."""
        return [self._draft_rates.rate() ** length for length in range(1, most + 1)]

    def propose(self, count: int) -> list[int]:
        return self._lookup.propose(count) if self._lookup else []

    def record_proposal(self, tokens: Sequence[int]) -> None:
        """What the draft model says comes next."""
        self._proposed, self._proposed_at = tokens, len(self.tokens)


class DraftRequest(NamedTuple):
    """A sequence that talks, and how many more tokens can be tried with it at most, beside the one it is behind."""

    state: DraftState
    max_tokens: int
    blocks: Sequence[int]  # of the cache, that it holds


class Speculation:
    """Of one worker: at most `most` tokens for a sequence, and in a step with one for each no more than `limit`."""

    def __init__(self, most: int, limit: int, drafter: DraftModel | None = None) -> None:
        self._max_tokens, self._row_limit, self._draft_model = most, limit, drafter
        self._costs, self._lookup_rates, self._draft_rates = (
            StepCosts(),
            HitRates(LOOKUP_PRIORS),
            HitRates(DRAFT_PRIORS),
        )
        self._probe_seconds = 0.0  # seconds, for drafts that do not pay

    def track(self, tokens: Sequence[int]) -> DraftState:
        """A sequence, to whose tokens others are appended and from which none is ever taken."""
        return DraftState(tokens, self._lookup_rates.child(), self._draft_rates.child())

    def record_step(self, rows: int, seconds: float) -> None:
        self._costs.record(rows, seconds)
        self._probe_seconds += PROBE_SHARE * seconds

    def draft(self, wishes: Sequence[DraftRequest], rows: int) -> list[list[int]]:
        """What may come next, for each; nothing where it does not pay."""
        room = self._row_limit - rows
        if room <= 0 or not self._max_tokens or not self._costs.has_data:
            return [[] for _ in wishes]
        for wish in wishes:
            wish.state.read_new_tokens()
        found = [wish.state.lookup_chances(min(wish.max_tokens, self._max_tokens)) for wish in wishes]
        drafts = self._ask_draft_model(self._draft_model, wishes, found, rows) if self._draft_model else {}
        drafted = sum(map(len, drafts.values()))
        gains = [(gain, n) for n, each in enumerate(found) if n not in drafts for gain in log_gains(each)]
        counts = self._allot(sorted(gains, reverse=True)[: room - drafted], rows, drafted)
        return [drafts.get(n) or wish.state.propose(counts[n]) for n, wish in enumerate(wishes)]

    def _allot(self, gains: Sequence[tuple[float, int]], rows: int, drafted: int) -> Counter[int]:
        """The tokens that gain most, as many as are best, counted by sequence."""
        if not gains:
            return Counter()
        gained = list(accumulate((gain for gain, _ in gains), initial=0.0))
        best = best_option(gained, self._costs.estimate(rows + drafted, len(gains)), rows)
        return Counter(number for _, number in gains[:best])

    def _ask_draft_model(
        self, drafter: DraftModel, wishes: Sequence[DraftRequest], found: Sequence[Sequence[float]], rows: int
    ) -> dict[int, list[int]]:
        """What the draft model says, for those for whom it is likelier right than what was found, if anything was."""
        asked: dict[int, DraftQuery] = {}
        for number, (trail, most, blocks) in enumerate(wishes):
            if most > 0 and (not found[number] or found[number][0] < trail.draft_chances(1)[0]):
                asked[number] = DraftQuery(trail.cache_state, trail.tokens, blocks, min(most, self._max_tokens))
        behind = {number: missing for number, each in asked.items() if (missing := drafter.uncomputed_tokens(each))}
        trails = {number: wishes[number].state for number in behind}
        count = self._best_depth(drafter, list(trails.values()), list(behind.values()), rows) if behind else 0
        if behind and not count:
            cheapest = min(behind, key=behind.__getitem__)
            count, trails = self._probe(drafter, behind[cheapest]), {cheapest: trails[cheapest]}
        if not count:
            return {}
        told = drafter.propose(
            [asked[number]._replace(max_tokens=min(count, asked[number].max_tokens)) for number in trails]
        )
        for trail, tokens in zip(trails.values(), told, strict=True):
            trail.record_proposal(tokens)
        return {number: tokens for number, tokens in zip(trails, told, strict=True) if tokens}

    def _best_depth(self, drafter: DraftModel, trails: Sequence[DraftState], behind: Sequence[int], rows: int) -> int:
        """How many tokens the draft model is best asked for, of all of these."""
        group = len(trails)
        most = min(self._max_tokens, (self._row_limit - rows) // group)
        [once] = drafter.costs.estimate(group, 0)
        ahead = sum(drafter.costs.estimate(missing, 0)[0] for missing in behind if missing > 1) / PREFILL_PAYBACK
        steps = self._costs.estimate(rows, most * group)[::group]
        seconds = [steps[0], *(step + count * once + ahead for count, step in enumerate(steps[1:], 1))]
        each = zip(*(log_gains(trail.draft_chances(most)) for trail in trails), strict=True)
        return best_option(list(accumulate(map(sum, each), initial=0.0)), seconds, rows)

    def _probe(self, drafter: DraftModel, missing: int) -> int:
        """A token, if what was saved for it is enough; else none."""
        [cost] = drafter.costs.estimate(missing, 0)
        if self._probe_seconds < 2 * cost:  # and for the row in the step
            return 0
        self._probe_seconds -= 2 * cost
        return 1


def log_gains(chances: Sequence[float]) -> list[float]:
    """By how much each token more makes a sequence faster, on a scale on which this adds up (the logarithm)."""
    return [log(after / before) for before, after in pairwise(accumulate(chances, initial=1.0))]


def best_option(gained: Sequence[float], seconds: Sequence[float], talking: int) -> int:
    """Which of some ways is the best for `talking` sequences, by what they gain together and a step takes.

    The first, which is to go on as ever, unless another one is worth it.
    """
    worth = [gain / talking - log(taken / seconds[0]) for gain, taken in zip(gained, seconds, strict=True)]
    best = max(range(len(worth)), key=worth.__getitem__)
    return best if worth[best] > log(MIN_SPEEDUP) else 0


def run_kind(run: int) -> int:
    return bisect_left(RUN_BOUNDS, run)
