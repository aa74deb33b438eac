"""Which replica a request goes to.

Knows no network, no clock and no model: replicas are what a router was told of them and what it sent there itself.  The
one idea: work is counted in tokens, because requests differ a thousandfold; what a request waits for at a replica is
the tokens queued there and those of its own prompt that are not stored there, and that sum decides.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

from ..engine.block_allocator import BlockKey

RoutingReason = Literal["only", "load", "affinity"]
HALF_LIFE = 64  # answers after which one counts half for how long the next is expected to be


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A request as it is routed.  `tokens` of its prompt; so many are expected of its `answer`; `keys` are the names of
    the prompt's full blocks, of `block` tokens, from the first on (see service.engine.block_allocator)."""

    prompt_tokens: int
    expected_tokens: int = 0
    block_keys: tuple[BlockKey, ...] = ()
    block_tokens: int = 16


@dataclass(slots=True)
class RemainingTokens:
    """Tokens of a request that are still to be computed."""

    prompt: int
    answer: int

    @property
    def total(self) -> int:
        return self.prompt + self.answer


class Candidate:
    """A replica as one router sees it.  `kept` is how many blocks its cache holds: more are not remembered.

    `elsewhere` are the tokens that others have queued there, as it says itself.
    """

    def __init__(self, name: str, kept: int = 0) -> None:
        self.name, self.cache_blocks, self.queued_by_others = name, kept, 0
        self._queued_here = 0
        self._remaining: dict[Hashable, RemainingTokens] = {}
        self.block_keys: OrderedDict[BlockKey, None] = (
            OrderedDict()
        )  # names of blocks that were sent there, oldest first

    @property
    def queued_tokens(self) -> int:
        """Tokens to be computed before a request that came now could be all that is left."""
        return self._queued_here + self.queued_by_others

    @property
    def open_requests(self) -> int:
        """Requests sent there that are not answered."""
        return len(self._remaining)

    def stored_blocks(self, keys: Sequence[BlockKey]) -> int:
        """How many of the first blocks were sent there before, and may still be in its cache."""
        for count, key in enumerate(keys):
            if key not in self.block_keys:
                return count
        return len(keys)

    def cost(self, ask: RoutingRequest) -> int:
        """Tokens to be computed until it is answered, its own answer not counted."""
        return self.queued_tokens + ask.prompt_tokens - self.stored_blocks(ask.block_keys) * ask.block_tokens

    def add_request(self, id: Hashable, ask: RoutingRequest) -> int:
        """It was sent there; the tokens of its prompt that are to be computed."""
        left = RemainingTokens(
            ask.prompt_tokens - self.stored_blocks(ask.block_keys) * ask.block_tokens, max(ask.expected_tokens, 0)
        )
        self._remaining[id] = left
        self._queued_here += left.total
        for key in reversed(ask.block_keys):  # beginnings outlive their endings
            self.block_keys[key] = None
            self.block_keys.move_to_end(key)
        while len(self.block_keys) > self.cache_blocks:
            self.block_keys.popitem(last=False)
        return left.prompt

    def count_token(self, id: Hashable) -> None:
        """A token of its answer came: its prompt is computed, and one less is to come."""
        if (left := self._remaining.get(id)) is not None:
            before = left.total
            left.prompt, left.answer = 0, max(left.answer - 1, 1)  # one that goes on is never done
            self._queued_here += left.total - before

    def remove_request(self, id: Hashable) -> None:
        """It was answered, or is wanted no more."""
        if (left := self._remaining.pop(id, None)) is not None:
            self._queued_here -= left.total


class AnswerLengths:
    """How long answers were of late, for want of knowing how long the next will be."""

    def __init__(self, expected: float = 64) -> None:
        self._mean = expected

    def expected_tokens(self, most: int) -> int:
        return min(round(self._mean), most)

    def add(self, tokens: int) -> None:
        self._mean += (tokens - self._mean) * (1 - 0.5 ** (1 / HALF_LIFE))


class RoutingPolicy(Protocol):
    def choose(self, ask: RoutingRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, RoutingReason]:
        """One of `candidates`, of which there is at least one, and why it."""


CreatePolicy = Callable[[Random], RoutingPolicy]


class RandomChoice:
    """Any."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, ask: RoutingRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, RoutingReason]:  # noqa: ARG002
        return self._random.choice(candidates), "load"


class RoundRobin:
    """One after the other."""

    def __init__(self, random: Random) -> None:
        self._next = random.randrange(1 << 16)

    def choose(self, ask: RoutingRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, RoutingReason]:  # noqa: ARG002
        self._next += 1
        return candidates[self._next % len(candidates)], "load"


class ShortestQueue:
    """The one with the fewest tokens queued.  Where there are many routers all of them choose the same one."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, ask: RoutingRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, RoutingReason]:  # noqa: ARG002
        return min(candidates, key=lambda one: (one.queued_tokens, self._random.random())), "load"


class TwoChoices:
    """Of two at random the one with the fewer tokens queued (Mitzenmacher 2001, doi:10.1109/71.963420)."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, ask: RoutingRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, RoutingReason]:  # noqa: ARG002
        return min(self.sample_two(candidates), key=lambda one: one.queued_tokens), "load"

    def sample_two(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return self._random.sample(candidates, min(len(candidates), 2))


class PrefixAffinity(TwoChoices):
    """Of those two, and of those that have most of the prompt stored the one with the fewest tokens queued, where there
    is least to compute.

    So a stored prefix decides exactly where it saves more tokens than are queued before it.
    """

    def choose(self, ask: RoutingRequest, candidates: Sequence[Candidate]) -> tuple[Candidate, RoutingReason]:
        if len(candidates) == 1:
            return candidates[0], "only"
        two = self.sample_two(candidates)
        if holders := prefix_holders(ask.block_keys, candidates):
            two.append(min(holders, key=lambda one: one.queued_tokens))
        chosen = min(two, key=lambda one: one.cost(ask))
        return chosen, "affinity" if chosen.stored_blocks(ask.block_keys) else "load"


def prefix_holders(keys: Sequence[BlockKey], candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Who has most of the first blocks; nobody, if nobody has the very first.

    Block by block, among those who have all before it: what all have (the same beginning) and what one has (a
    conversation) are found without counting for each of a thousand.
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
