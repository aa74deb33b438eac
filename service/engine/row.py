"""One token of one row of logits, on a CPU, without sorting the row.

Knows one row and how it wants its token drawn.  The one idea: a token is drawn from all words and kept if it is one of
those that may come; else it and those no better than it are left out, and another is drawn.  That is the distribution
over those that may come, for the price of a look at what is likelier than the word drawn, and mostly not even that.  A
row's numbers stay in the core's cache from the first pass to the last.

Of equals at the edge of a cut all stay, as in transformers, save for top-p, where sorting decides there.
"""

import math
from collections.abc import Iterator
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.request import Sampling

DEPTH = 64  # words that are looked at as one first
WARM = 0.5  # from this temperature on, exponentials of what networks say seldom overflow
COLDEST = 1e-4  # temperatures below are taken for this one: logits divided by it stay finite
LEAST = 1e-20  # of a sum that has lost nothing
TINY = torch.finfo(torch.float32).tiny

Floats = NDArray[np.float32]


class Row:
    """Room for the weights of one row of at most `words`, and the way to a token from them."""

    def __init__(self, words: int) -> None:
        self._room = torch.empty(words)
        self._weights, self._array = self._room, self._room.numpy()
        self._groups, self._sums = 0, np.empty(0, np.float32)

    def draw(self, logits: Tensor, sampling: Sampling, uniform: float) -> int:
        """A token for `logits` [V], minus infinity where none may come, from a number in [0, 1); -1: none may."""
        if 0 < sampling.top_k < len(logits):
            words = survivors(logits.numpy(), sampling.top_k)
            place = self._draw(logits[torch.from_numpy(words)], sampling, uniform)
            return int(words[place]) if place >= 0 else -1
        return self._draw(logits, sampling, uniform)

    def _draw(self, logits: Tensor, sampling: Sampling, uniform: float) -> int:
        total = self._weigh(logits, max(sampling.temperature, COLDEST))
        if not total:
            return -1
        if sampling.typical_p < 1:
            return self._typical(sampling, total, uniform)
        if sampling.min_p:
            self._cut(sampling.min_p * float(self._weights.max()))
        numbers = drawing(uniform)
        place = self._pick(next(numbers))
        while sampling.top_p < 1 and not self._within(place, sampling.top_p * total):
            place = self._pick(next(numbers))
        return place

    def _weigh(self, logits: Tensor, temperature: float) -> float:
        """Fill in the weights, in no unit; returns their sum, 0 if there are none."""
        self._weights = self._room[: len(logits)]
        self._array = self._weights.numpy()
        self._groups = -(-len(logits) // DEPTH)
        if temperature >= WARM:
            if temperature == 1:
                torch.exp(logits, out=self._weights)
            else:
                torch.mul(logits, 1 / temperature, out=self._weights).exp_()
            if LEAST < (total := self._add()) < math.inf:
                return total
        most = float(logits.max())
        if most == -math.inf:
            return 0.0
        torch.sub(logits, most, out=self._weights).mul_(1 / temperature).exp_()
        return self._add()

    def _add(self) -> float:
        """Words at a distance of `_groups` are a group; its sum, and that of all."""
        whole = len(self._array) // self._groups * self._groups
        self._sums = self._weights[:whole].view(-1, self._groups).sum(0).numpy()
        if whole < len(self._array):
            self._sums[: len(self._array) - whole] += self._array[whole:]
        return float(self._sums.sum())

    def _pick(self, uniform: float) -> int:
        """The word at which the weights, added up group by group, exceed that share of their sum."""
        sums = np.add.accumulate(self._sums, dtype=np.float64)
        group, before = passed(sums, uniform * sums[-1])
        inside = np.add.accumulate(self._array[group :: self._groups], dtype=np.float64)
        return group + self._groups * passed(inside, uniform * sums[-1] - before)[0]

    def _within(self, place: int, most: float) -> bool:
        """Whether what is likelier than the word adds up to less than `most`; else that alone is left.

        A group with a likelier word has a larger sum, which often says it already.
        """
        weight = float(self._array[place])
        own = float(self._sums[place % self._groups])
        if float(self._sums[self._sums > weight].sum()) - (weight if own > weight else 0) < most:
            return True
        torch.threshold_(self._weights, weight, 0.0)
        above = self._add()
        return above < most or not above

    def _cut(self, least: float) -> None:
        """Leave those of at least this weight."""
        torch.threshold_(self._weights, below(least), 0.0)
        self._add()

    def _typical(self, sampling: Sampling, total: float, uniform: float) -> int:
        """Meister et al. 2022, arXiv:2202.00666: those first whose surprise is nearest to what is expected of it."""
        if sampling.top_p < 1:
            self._cut(self._least(sampling.top_p * total))
        if sampling.min_p:
            self._cut(sampling.min_p * float(self._weights.max()))
        most = sampling.typical_p * float(self._sums.sum())
        centre = self._expected()
        numbers = drawing(uniform)
        place = self._pick(next(numbers))
        while not self._nearest(place, centre, most):
            place = self._pick(next(numbers))
        return place

    def _least(self, most: float) -> float:
        """The least of the largest weights that make up `most`."""
        falling = np.sort(self._array)[::-1]
        before = np.add.accumulate(falling, dtype=np.float64) - falling
        return float(falling[max(int(before.searchsorted(most)) - 1, 0)])

    def _expected(self) -> float:
        """The mean of the logarithms of the weights, each as often as it is drawn."""
        logs = self._weights.clamp(min=TINY).log_()
        return float(logs.mul_(self._weights).sum()) / float(self._sums.sum())

    def _nearest(self, place: int, centre: float, most: float) -> bool:
        """Whether what is nearer to the centre than the word adds up to less than `most`; else that alone is left."""
        weight = float(self._array[place])
        mirrored = 2 * centre - math.log(weight)
        other = math.exp(mirrored) if mirrored < 88 else math.inf
        low, high = min(weight, other), max(weight, other)
        torch.threshold_(self._weights, low, 0.0)
        if high <= float(self._weights.max()):
            torch.threshold_(self._weights.neg_(), -high, 0.0).neg_()
        inside = self._add()
        return inside < most or not inside


def survivors(logits: Floats, count: int) -> NDArray[np.int64]:
    """The `count` largest, ascending; those as large as the last of them stay."""
    groups = len(logits) // DEPTH
    places = np.arange(len(logits))
    if count < groups // 4:  # they are in the groups of the largest maxima
        whole = logits[: groups * DEPTH].reshape(DEPTH, groups)
        maxima = whole.max(axis=0)
        least = np.partition(maxima, groups - count)[groups - count]
        inside = np.flatnonzero(maxima >= least)
        places = (inside + groups * np.arange(DEPTH)[:, None]).ravel()
        places = np.concatenate([places, np.arange(groups * DEPTH, len(logits))])
    among = logits[places]
    least = np.partition(among, len(among) - count)[len(among) - count]
    chosen: NDArray[np.int64] = places[among >= least]
    return chosen


def drawing(uniform: float) -> Iterator[float]:
    """As many numbers in [0, 1) as it takes, all from the first."""
    yield uniform
    more = Random(uniform)
    while True:
        yield more.random()


def passed(cumulative: NDArray[np.float64], target: float) -> tuple[int, float]:
    """The first place whose sum exceeds `target`, never one of no weight; and the sum before it."""
    place = int(cumulative.searchsorted(min(target, np.nextafter(cumulative[-1], 0)), "right"))
    return place, float(cumulative[place - 1]) if place else 0.0


def below(weight: float) -> float:
    """The next smaller number of those that weights are."""
    return float(np.nextafter(np.float32(weight), np.float32(0)))
