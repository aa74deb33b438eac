"""Requests with the shape of published traces: lengths, bursts, turns of conversations.

Independent of replicas. Three traces were read for it; the constants below are their quantiles and shares:

- Azure LLM inference 2023, `conv` and `code` (Patel et al. 2024, Splitwise, arXiv:2311.18677): tokens of prompts and
  answers, gaps between requests within a minute, and the variation between minutes.
- Mooncake, `conversation` (Qin et al. 2024, arXiv:2407.00079), whose requests name their blocks: how often a
  conversation continues, the length of pauses, the new part of the next turn, and the shared prefix.
- Gaps have a gamma distribution, as in BurstGPT (Wang et al. 2024, arXiv:2401.17644).

A replica here is one core, not a GPU. So lengths are `scale` times those of the trace, pauses and minutes `pace` times
shorter. A conversation is a growing range of numbers, so its tokens are determined by the first number.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from math import exp, log
from random import Random

SHARES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
MINUTE = 60.0
APART = 1 << 24  # numbers between two conversations, or two beginnings
UNSAID = 1 << 56  # answers whose tokens do not come back are numbered from here

Spread = Sequence[float]  # its values at SHARES


@dataclass(frozen=True)
class Shape:
    """What one trace says.  Lengths in its tokens, times in its seconds."""

    name: str
    prompt: Spread  # of a conversation's first turn
    answer: Spread
    gap_cv: float  # of the gaps within a minute
    minute_cv: float  # of the requests a minute
    more: Sequence[float]  # the chance of a second turn, of a third after it, ...; then the last again
    new: Spread = ()  # tokens that a next turn adds to all before
    pause: Spread = ()  # between two turns
    beginning: int = 512  # tokens that all who have the same beginning share
    beginnings: int = 1  # how many there are, the first the most popular (Zipf)
    context: int = 8192  # longest prompt
    scale: float = 0.25
    pace: float = 20.0


CONVERSATION = Shape(
    name="conversation",
    prompt=(2, 29, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 6179, 14050),
    answer=(7, 16, 41, 54, 85, 129, 395, 424, 451, 601, 954, 1000),
    gap_cv=1.02,
    minute_cv=0.22,
    more=(0.252, 0.393, 0.497, 0.549, 0.606, 0.652, 0.733, 0.746),
    new=(4, 4, 4, 4, 9, 26, 384, 4362, 7237, 16805, 38890, 91467),
    pause=(5, 12, 29, 41, 66, 125, 272, 480, 612, 1470, 2667, 3030),
)
CODE = Shape(
    name="code",
    prompt=(3, 17, 75, 147, 578, 1469, 2744, 5187, 7303, 7436, 7437, 7437),
    answer=(6, 6, 6, 7, 9, 13, 24, 55, 90, 251, 825, 1899),
    gap_cv=3.2,
    minute_cv=1.04,
    more=(0.0,),
)


@dataclass(frozen=True)
class Turn:
    """A request.  Its tokens are `shared` of beginning `beginning` and `own` of the conversation's."""

    conversation: int
    number: int
    beginning: int
    shared: int
    own: int
    answer: int
    pause: float  # after its answer, until the next turn
    kept: bool = True  # whether the answer's tokens come back in the next turn's prompt

    @property
    def id(self) -> str:
        return f"{self.conversation}.{self.number}"

    @property
    def prompt(self) -> int:
        return self.shared + self.own

    def tokens(self) -> list[int]:
        first, begins = (self.conversation + 1) * APART, -(self.beginning + 1) * APART
        return [*range(begins, begins + self.shared), *range(first, first + self.own)]

    def said(self, place: int) -> int:
        """The token at a place of its answer."""
        return (self.conversation + 1) * APART + self.own + place + (0 if self.kept else UNSAID)


@dataclass(frozen=True)
class Traffic:
    """`rate` requests a second, next turns included, for `seconds`; the same for the same seed."""

    shape: Shape
    rate: float
    seconds: float
    seed: int = 0
    kept: bool = True
    _weights: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._weights.extend(accumulate(1 / rank for rank in range(1, self.shape.beginnings + 1)))

    def arrivals(self) -> Iterator[tuple[float, list[Turn]]]:
        """When each conversation begins, and all its turns."""
        random = Random(self.seed)
        shape = 1 / self.shape.gap_cv**2
        mean = turns_expected(self.shape) / self.rate
        now, until, speed = 0.0, 0.0, 1.0
        for number in count():
            gap = random.gammavariate(shape, mean / shape)
            while now + gap / speed > until:  # the rest of it at the next minute's speed
                gap -= (until - now) * speed
                now, until = until, until + MINUTE / self.shape.pace
                speed = uneven(random, self.shape.minute_cv)
            now += gap / speed
            if now >= self.seconds:
                return
            yield now, self.conversation(number)

    def conversation(self, number: int) -> list[Turn]:
        random, shape = Random(f"{self.seed} {number}"), self.shape
        beginning = bisect_right(self._weights, random.random() * self._weights[-1])
        most, turns = round(shape.context * shape.scale), list[Turn]()
        shared = round(shape.beginning * shape.scale)
        own = self._length(random, shape.prompt)
        for place in count():
            if shared + own > most:
                own = most - shared if not turns else 0
            if not own:
                break
            answer, pause = self._length(random, shape.answer), drawn(random, shape.pause) / shape.pace
            turns.append(Turn(number, place, beginning, shared, own, answer, pause, self.kept))
            if random.random() >= shape.more[min(place, len(shape.more) - 1)]:
                break
            own += answer + self._length(random, shape.new)
        return turns

    def _length(self, random: Random, spread: Spread) -> int:
        return max(round(drawn(random, spread) * self.shape.scale), 1)


def drawn(random: Random, spread: Spread) -> float:
    """A value whose quantiles at SHARES are these."""
    if not spread:
        return 0.0
    share = random.random()
    place = min(bisect_right(SHARES, share), len(SHARES) - 1)
    left, right = SHARES[place - 1], SHARES[place]
    return spread[place - 1] + (spread[place] - spread[place - 1]) * (share - left) / (right - left)


def uneven(random: Random, cv: float) -> float:
    """About 1, lognormal."""
    variance = log(1 + cv * cv)
    return exp(random.gauss(-variance / 2, variance**0.5))


def turns_expected(shape: Shape) -> float:
    """Of a conversation, whose context does not end it."""
    chances = [*shape.more, *[shape.more[-1]] * 64]
    return 1 + sum(accumulate(chances, lambda before, chance: before * chance))


def many(shape: Shape, beginnings: int, beginning: int) -> Shape:
    """As many applications on one fleet, each with a prompt of its own before its users'."""
    return replace(shape, name=f"{shape.name}, {beginnings} beginnings", beginnings=beginnings, beginning=beginning)
