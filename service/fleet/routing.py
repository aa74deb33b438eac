"""Routing policies: which replica a request is sent to.

A request's cost at a replica is the tokens queued there plus the tokens of its own prompt that are not in the replica's
cache.  Work is counted in tokens because requests differ a thousandfold.  A router knows only what replicas report and
what it sent itself; there is no clock in it.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

from ..engine.block_allocator import BlockKey

RoutingReason = Literal["only", "load", "affinity"]
HALF_LIFE = 64  # answers after which one has half its weight in the expected length


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A request, as far as routing needs it.

    `prompt_tokens` are to be read and about `expected_tokens` to be generated.  `block_keys` are the keys of the
    prompt's full blocks from the first on, of `block_tokens` tokens each (see service.engine.block_allocator).
    """

    prompt_tokens: int
    expected_tokens: int = 0
    block_keys: tuple[BlockKey, ...] = ()
    block_tokens: int = 16


@dataclass(slots=True)
class RemainingTokens:
    """The tokens of a request that are still to be computed."""

    prompt: int
    answer: int

    @property
    def total(self) -> int:
        return self.prompt + self.answer


class Candidate:
    """A replica, as one router sees it.

    `cache_blocks` is the size of its cache; no more block keys are remembered.  `queued_by_others` are the tokens that
    other routers have queued there, as the replica reports.
    """

    def __init__(self, name: str, cache_blocks: int = 0) -> None:
        self.name, self.cache_blocks, self.queued_by_others = name, cache_blocks, 0
        self._queued_here = 0
        self._remaining: dict[Hashable, RemainingTokens] = {}
        # Keys of the blocks that were sent there, oldest first.
        self.block_keys: OrderedDict[BlockKey, None] = OrderedDict()

    @property
    def queued_tokens(self) -> int:
        """The tokens queued there, of all routers."""
        return self._queued_here + self.queued_by_others

    @property
    def open_requests(self) -> int:
        """The number of requests sent there that are not answered."""
        return len(self._remaining)

    def stored_blocks(self, keys: Sequence[BlockKey]) -> int:
        """Return how many of the first blocks were sent there before and may still be in its cache."""
        for count, key in enumerate(keys):
            if key not in self.block_keys:
                return count
        return len(keys)

    def stored_tokens(self, request: RoutingRequest) -> int:
        """Return how many tokens of the prompt were sent there before and may still be in its cache."""
        return self.stored_blocks(request.block_keys) * request.block_tokens

    def cost(self, request: RoutingRequest) -> int:
        """Return the tokens to compute before the request's first token: the queue and the uncached part of its
        prompt.
        """
        return self.queued_tokens + request.prompt_tokens - self.stored_tokens(request)

    def add_request(self, id: Hashable, request: RoutingRequest) -> int:
        """Count a request that is sent there, and return the tokens of its prompt that are to be computed."""
        remaining = RemainingTokens(
            request.prompt_tokens - self.stored_tokens(request),
            max(request.expected_tokens, 0),
        )
        self._remaining[id] = remaining
        self._queued_here += remaining.total
        for key in reversed(request.block_keys):  # the first blocks are evicted last
            self.block_keys[key] = None
            self.block_keys.move_to_end(key)
        while len(self.block_keys) > self.cache_blocks:
            self.block_keys.popitem(last=False)
        return remaining.prompt

    def count_token(self, id: Hashable) -> None:
        """Count a generated token: the prompt is computed, and one token less is expected."""
        if (remaining := self._remaining.get(id)) is not None:
            before = remaining.total
            remaining.prompt, remaining.answer = 0, max(remaining.answer - 1, 1)  # at least one while it is open
            self._queued_here += remaining.total - before

    def remove_request(self, id: Hashable) -> None:
        """Remove a request that is answered or dropped."""
        if (remaining := self._remaining.pop(id, None)) is not None:
            self._queued_here -= remaining.total


class AnswerLengths:
    """A running mean of answer lengths in tokens, the estimate for the next answer."""

    def __init__(self, expected: float = 64) -> None:
        self._mean = expected

    def expected_tokens(self, limit: int) -> int:
        return min(round(self._mean), limit)

    def add(self, tokens: int) -> None:
        self._mean += (tokens - self._mean) * (1 - 0.5 ** (1 / HALF_LIFE))


class RoutingPolicy(Protocol):
    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, RoutingReason]:
        """Return one of `candidates`, which are not empty, and the reason."""


CreatePolicy = Callable[[Random], RoutingPolicy]


class RandomChoice:
    """A random replica."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, RoutingReason]:  # noqa: ARG002
        return self._random.choice(candidates), "load"


class RoundRobin:
    """Replicas in turn."""

    def __init__(self, random: Random) -> None:
        self._next = random.randrange(1 << 16)

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, RoutingReason]:  # noqa: ARG002
        self._next += 1
        return candidates[self._next % len(candidates)], "load"


class ShortestQueue:
    """The replica with the fewest queued tokens.  Several routers choose the same one at the same time."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, RoutingReason]:  # noqa: ARG002
        return min(candidates, key=lambda one: (one.queued_tokens, self._random.random())), "load"


class TwoChoices:
    """The better of two random replicas, by queued tokens (Mitzenmacher 2001, doi:10.1109/71.963420)."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, RoutingReason]:  # noqa: ARG002
        return min(self.sample_two(candidates), key=lambda one: one.queued_tokens), "load"

    def sample_two(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return self._random.sample(candidates, min(len(candidates), 2))


class PrefixAffinity(TwoChoices):
    """The cheapest of three: two random replicas, and the least loaded of those with the longest cached prefix.

    So a cached prefix decides exactly if it saves more tokens than are queued in front of it.
    """

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, RoutingReason]:
        if len(candidates) == 1:
            return candidates[0], "only"
        two = self.sample_two(candidates)
        if holders := prefix_holders(request.block_keys, candidates):
            two.append(min(holders, key=lambda one: one.queued_tokens))
        chosen = min(two, key=lambda one: one.cost(request))
        return chosen, "affinity" if chosen.stored_blocks(request.block_keys) else "load"


def prefix_holders(keys: Sequence[BlockKey], candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Return the replicas with the longest cached prefix; empty if none has the first block.

    It goes block by block over the replicas that have all blocks before, so a prefix that all share and one that a
    single replica has are both found without counting for every replica.
    """
    holders: Sequence[Candidate] = ()
    among = candidates
    for key in keys:
        if not (among := [one for one in among if key in one.block_keys]):
            break
        holders = among
    return holders


POLICIES: Mapping[str, CreatePolicy] = {
    "random": RandomChoice,
    "round-robin": RoundRobin,
    "shortest": ShortestQueue,
    "two-choices": TwoChoices,
    "affinity": PrefixAffinity,
}
