"""Decides how many draft tokens each sequence gets in a step (speculative decoding).

Answers never change: draft tokens are computed together with known ones and kept as far as they equal the sampled
tokens (Leviathan et al. 2023, arXiv:2211.17192).

    state = speculation.track(sequence.tokens)      when decoding starts; tokens appended later are read from the list
    speculation.draft([DraftRequest(state, max_tokens, blocks), ...], rows) -> list[list[int]]
                                                    before a step, for decoding sequences that may have drafts;
                                                    all decoding sequences together have `rows` rows, one each
    speculation.record_step(rows, seconds)          after a step without prompts: the network's time

Drafts are used where they make sequences faster, which is measured.  What a prompt lookup proposes is compared with the
tokens that came, whether it was computed or not, so measuring it is free.  A draft model that does not pay is tried now
and then, for one hundredth of the time.

More rows make one sequence faster and the step longer for all.  The product of the speeds of all sequences is maximised
(proportional fairness, Kelly 1997).
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

MIN_SPEEDUP = 1.1  # least speedup, geometric mean over the sequences
MIN_CHANCE = 0.05  # of a draft token: less likely ones are not considered
RUN_BOUNDS = (1, 2, 3, 5, 8, 15)  # bounds of the kinds of match lengths, in tokens
LOOKUP_PRIORS = (
    0.3,
    0.3,
    0.45,
    0.6,
    0.75,
    0.85,
    0.9,
)  # how often a lookup is right, by kind, before it is measured
DRAFT_PRIORS = (0.7,)  # the same of a draft model
PREFILL_PAYBACK = 64  # tokens within which reading a prompt by the draft model must pay
PROBE_SHARE = 0.01  # of the time goes to a draft model that does not pay, to measure it again
REBUILD_TOKENS = 64  # from so many unread tokens on, the lookup is built anew, which is faster


class DraftState:
    """What was read of one sequence, and how often its drafts were right."""

    def __init__(self, tokens: Sequence[int], lookup_rates: HitRates, draft_rates: HitRates) -> None:
        self.tokens, self.cache_state = tokens, DraftCacheState()
        self._lookup_rates, self._draft_rates = lookup_rates, draft_rates
        self._lookup: PromptLookup | None = None  # created when decoding starts
        self._proposed: Sequence[int] = ()  # the draft model's last draft,
        self._proposed_at = 0  # which follows so many tokens

    def read_new_tokens(self) -> None:
        """Read the tokens that were appended since the last call, and count which drafts were right."""
        for proposed, token in zip(self._proposed, self.tokens[self._proposed_at :], strict=False):
            self._draft_rates.record(0, proposed == token)
            if proposed != token:
                break
        self._proposed = ()
        if self._lookup is None or self._lookup.unread_count > REBUILD_TOKENS:
            self._lookup = PromptLookup(self.tokens)
        while self._lookup.unread_count:
            run = self._lookup.run
            hit = self._lookup.read_token()
            if run:
                self._lookup_rates.record(run_kind(run), hit)

    def lookup_chances(self, most: int) -> list[float]:
        """The chances that the first 1, 2, ... `most` tokens of the lookup's draft are right, down to MIN_CHANCE."""
        if self._lookup is None or not self._lookup.run:
            return []
        run = self._lookup.run
        each = (self._lookup_rates.rate(run_kind(length)) for length in range(run, run + most))
        return [chance for chance in accumulate(each, mul) if chance > MIN_CHANCE]

    def draft_chances(self, most: int) -> list[float]:
        """The same of the draft model's draft."""
        return [self._draft_rates.rate() ** length for length in range(1, most + 1)]

    def propose(self, count: int) -> list[int]:
        return self._lookup.propose(count) if self._lookup else []

    def record_proposal(self, tokens: Sequence[int]) -> None:
        """Note the draft model's draft, to be compared with what comes."""
        self._proposed, self._proposed_at = tokens, len(self.tokens)


class DraftRequest(NamedTuple):
    """A decoding sequence, and how many draft tokens it may have beside its one uncomputed token."""

    state: DraftState
    max_tokens: int
    blocks: Sequence[int]  # of the cache, that it holds


class Speculation:
    """Drafts for one worker: at most `most` tokens for a sequence, and at most `limit` rows in a step."""

    def __init__(self, most: int, limit: int, drafter: DraftModel | None = None) -> None:
        self._max_tokens, self._row_limit, self._draft_model = most, limit, drafter
        self._costs, self._lookup_rates, self._draft_rates = (
            StepCosts(),
            HitRates(LOOKUP_PRIORS),
            HitRates(DRAFT_PRIORS),
        )
        self._probe_seconds = 0.0  # saved for drafts that do not pay

    def track(self, tokens: Sequence[int]) -> DraftState:
        """The draft state of a sequence, to whose tokens others are only appended."""
        return DraftState(tokens, self._lookup_rates.child(), self._draft_rates.child())

    def record_step(self, rows: int, seconds: float) -> None:
        self._costs.record(rows, seconds)
        self._probe_seconds += PROBE_SHARE * seconds

    def draft(self, requests: Sequence[DraftRequest], rows: int) -> list[list[int]]:
        """A draft for each of `requests`; empty where it does not pay."""
        room = self._row_limit - rows
        if room <= 0 or not self._max_tokens or not self._costs.has_data:
            return [[] for _ in requests]
        for request in requests:
            request.state.read_new_tokens()
        chances = [request.state.lookup_chances(min(request.max_tokens, self._max_tokens)) for request in requests]
        drafts = self._ask_draft_model(self._draft_model, requests, chances, rows) if self._draft_model else {}
        drafted = sum(map(len, drafts.values()))
        gains = [(gain, n) for n, each in enumerate(chances) if n not in drafts for gain in log_gains(each)]
        counts = self._allot(sorted(gains, reverse=True)[: room - drafted], rows, drafted)
        return [drafts.get(n) or request.state.propose(counts[n]) for n, request in enumerate(requests)]

    def _allot(self, gains: Sequence[tuple[float, int]], rows: int, drafted: int) -> Counter[int]:
        """The tokens with the highest gains, as many as are best, counted by sequence."""
        if not gains:
            return Counter()
        gained = list(accumulate((gain for gain, _ in gains), initial=0.0))
        best = best_option(gained, self._costs.estimate(rows + drafted, len(gains)), rows)
        return Counter(number for _, number in gains[:best])

    def _ask_draft_model(
        self, draft_model: DraftModel, requests: Sequence[DraftRequest], chances: Sequence[Sequence[float]], rows: int
    ) -> dict[int, list[int]]:
        """Drafts of the draft model, for sequences where it is likelier right than the lookup."""
        queries: dict[int, DraftQuery] = {}
        for number, (state, most, blocks) in enumerate(requests):
            if most > 0 and (not chances[number] or chances[number][0] < state.draft_chances(1)[0]):
                queries[number] = DraftQuery(state.cache_state, state.tokens, blocks, min(most, self._max_tokens))
        uncomputed = {
            number: missing for number, each in queries.items() if (missing := draft_model.uncomputed_tokens(each))
        }
        states = {number: requests[number].state for number in uncomputed}
        count = (
            self._best_depth(draft_model, list(states.values()), list(uncomputed.values()), rows) if uncomputed else 0
        )
        if uncomputed and not count:
            cheapest = min(uncomputed, key=uncomputed.__getitem__)
            count, states = self._probe(draft_model, uncomputed[cheapest]), {cheapest: states[cheapest]}
        if not count:
            return {}
        proposals = draft_model.propose(
            [queries[number]._replace(max_tokens=min(count, queries[number].max_tokens)) for number in states]
        )
        for state, tokens in zip(states.values(), proposals, strict=True):
            state.record_proposal(tokens)
        return {number: tokens for number, tokens in zip(states, proposals, strict=True) if tokens}

    def _best_depth(
        self, draft_model: DraftModel, states: Sequence[DraftState], uncomputed: Sequence[int], rows: int
    ) -> int:
        """How many tokens the draft model should propose for each of these sequences."""
        group = len(states)
        max_tokens = min(self._max_tokens, (self._row_limit - rows) // group)
        [draft_step] = draft_model.costs.estimate(group, 0)
        prefill = (
            sum(draft_model.costs.estimate(missing, 0)[0] for missing in uncomputed if missing > 1) / PREFILL_PAYBACK
        )
        steps = self._costs.estimate(rows, max_tokens * group)[::group]
        seconds = [steps[0], *(step + count * draft_step + prefill for count, step in enumerate(steps[1:], 1))]
        each = zip(*(log_gains(state.draft_chances(max_tokens)) for state in states), strict=True)
        return best_option(list(accumulate(map(sum, each), initial=0.0)), seconds, rows)

    def _probe(self, draft_model: DraftModel, uncomputed: int) -> int:
        """1 if the time saved for probing pays for a draft of one token; otherwise 0."""
        [cost] = draft_model.costs.estimate(uncomputed, 0)
        if self._probe_seconds < 2 * cost:  # twice, because the step has one more row
            return 0
        self._probe_seconds -= 2 * cost
        return 1


def log_gains(chances: Sequence[float]) -> list[float]:
    """The logarithm of the speedup by each further draft token."""
    return [log(after / before) for before, after in pairwise(accumulate(chances, initial=1.0))]


def best_option(gains: Sequence[float], seconds: Sequence[float], count: int) -> int:
    """The index of the best option for `count` sequences, by its gain and the seconds of its step.

    Option 0 is no draft; it is chosen unless another one is better by MIN_SPEEDUP.
    """
    values = [gain / count - log(taken / seconds[0]) for gain, taken in zip(gains, seconds, strict=True)]
    best = max(range(len(values)), key=values.__getitem__)
    return best if values[best] > log(MIN_SPEEDUP) else 0


def run_kind(run: int) -> int:
    return bisect_left(RUN_BOUNDS, run)
