"""One token for each of some rows of logits, on a CPU, without sorting a row.

Knows rows and how each wants its token drawn.  The one idea: a token is drawn from all words, and kept if it is one of
those that may come; else it and those no better than it are left out, and another is drawn.  That is the distribution
over those that may come, for the price of a look at what is likelier than the word drawn; and mostly the sums of groups
of words, by which it was found, tell already.  A row's weights are not written to memory: they stay near the core.

Of equals at the edge of a cut all stay, as in transformers, save for top-p, where sorting decides there.
"""

import math
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.request import Sampling

DEPTH = 64  # words that are looked at as one first
WARM = 0.5  # from this temperature on, exponentials of what networks say seldom overflow
LN2 = math.log(2)
COLDEST = 1e-4  # temperatures below are taken for this one: logits divided by it stay finite
LEAST = 1e-20  # of a sum that has lost nothing
TINY = torch.finfo(torch.float32).tiny

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]


def draw(logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> list[int]:
    """A token for each row of [M, V], minus infinity where none may come, from a number in [0, 1) for each.

    -1 where none may come at all.
    """
    room, rows, tokens = Row(logits.size(1)), logits.unbind(), [-1] * len(samplings)
    holes: list[bool] = logits[:, :: room.groups | 1].amin(dim=1).isneginf().tolist()
    quick = [number for number, sampling in enumerate(samplings) if not (sampling.top_k or sampling.min_p)]
    if quick:
        first = First(room, [(rows[number], samplings[number], holes[number]) for number in quick])
        for number, token in zip(quick, first.draw([uniforms[number] for number in quick]), strict=True):
            tokens[number] = token
    for number, token in enumerate(tokens):
        if token < 0:
            tokens[number] = room.draw(rows[number], samplings[number], uniforms[number])
    return tokens


class First:
    """The first token drawn for each of some rows, together."""

    def __init__(self, room: "Row", asked: Sequence[tuple[Tensor, Sampling, bool]]) -> None:
        self._rows, self._samplings = [row.numpy() for row, *_ in asked], [sampling for _, sampling, _ in asked]
        self._groups, self._sums = room.groups, np.empty((len(asked), room.groups), np.float32)
        self._heats = []  # what is taken from logits, what they are multiplied by then, and the mean of that
        for (row, sampling, holes), out in zip(asked, torch.from_numpy(self._sums).unbind(), strict=True):
            heat = room.weigh(row, sampling.temperature, holes)
            room.add(out)
            self._heats.append((*heat, room.expected(row, *heat) if sampling.typical_p < 1 else math.inf))

    def draw(self, uniforms: Sequence[float]) -> list[int]:
        """-1 for a row of which the sums of groups do not tell whether it is one of those that may come."""
        with np.errstate(all="ignore"):  # of what has overflowed nothing can be told
            sums = np.add.accumulate(self._sums, axis=1, dtype=np.float64)
            total = sums[:, -1]
            found = [passed(row, share) for row, share in zip(sums, (uniforms * total).tolist(), strict=True)]
            group = np.array([group for group, _ in found])
            weights = self._weights(group)
            inside = np.add.accumulate(weights, axis=1, dtype=np.float64)
            place = np.array([passed(row, left)[0] for row, (_, left) in zip(inside, found, strict=True)])
            kept = self._kept(group, weights[np.arange(len(place)), place], total)
            told = np.where(kept & (total > LEAST) & (total < math.inf), group + self._groups * place, -1)
        tokens: list[int] = told.tolist()
        return tokens

    def _weights(self, group: Ints) -> Floats:
        """[M, DEPTH] of the words of a group of each row."""
        logits = np.full((len(group), DEPTH), -np.inf, np.float32)
        for row, first, out in zip(self._rows, group.tolist(), logits, strict=True):
            inside = row[first :: self._groups]
            out[: len(inside)] = inside
        heats = np.array(self._heats, np.float32)
        weights: Floats = np.exp((logits - heats[:, :1]) * heats[:, 1:2])
        return weights

    def _kept(self, group: Ints, weight: Floats, total: Doubles) -> NDArray[np.bool_]:
        """[M]: whether all that may come before the words of these weights is surely not yet enough.

        A group with a word above a weight has a sum above it.
        """
        share = np.array([share_of(sampling) for sampling in self._samplings])
        if not np.isfinite(share).any():
            return np.ones(len(share), np.bool_)
        centre = np.array([centre for *_, centre in self._heats])
        low = np.minimum(weight, np.exp(2 * centre - np.log(weight)))  # as far from the centre, on its other side
        above = np.where(self._sums > low[:, None], self._sums, 0).sum(axis=1)
        own = np.where(self._sums[np.arange(len(group)), group] > low, weight, 0)
        kept: NDArray[np.bool_] = above - own < share * total
        return kept


class Row:
    """Room for the weights of one row of at most `words`, and the way to a token from them."""

    def __init__(self, words: int) -> None:
        self._room = torch.empty(words)
        self._fit(words)

    def _fit(self, words: int) -> None:
        self.groups = -(-words // DEPTH)  # words at a distance of as many are a group
        whole = words // self.groups * self.groups
        self._weights = self._room[:words]
        self._array, self._body = self._weights.numpy(), self._weights[:whole].view(-1, self.groups)
        self._tail, self._sums = self._weights[whole:], torch.empty(self.groups)

    def weigh(self, logits: Tensor, temperature: float, holes: bool, least: float = WARM) -> tuple[float, float]:
        """Fill in the weights; what was taken from the logits, and what they were multiplied by then.

        With `holes`, or below the `least` temperature, there are words of no weight: exponentials can be 20 times as
        slow with these, powers of two are not.
        """
        most, heat = 0.0, 1 / max(temperature, COLDEST)
        if temperature < least:
            most = float(logits.amax())
            torch.sub(logits, most, out=self._weights).mul_(heat / LN2).exp2_()
        elif holes:
            torch.mul(logits, heat / LN2, out=self._weights).exp2_()
        elif temperature == 1:
            torch.exp(logits, out=self._weights)
        else:
            torch.mul(logits, heat, out=self._weights).exp_()
        return most, heat

    def add(self, out: Tensor) -> None:
        """The sum of each group."""
        torch.sum(self._body, 0, out=out)
        if len(self._tail):
            out[: len(self._tail)] += self._tail

    def expected(self, logits: Tensor, most: float, heat: float) -> float:
        """The mean of the logarithms of the weights, each as often as it is drawn."""
        return (float((self._weights * logits).sum() / self._weights.sum()) - most) * heat

    def draw(self, logits: Tensor, sampling: Sampling, uniform: float) -> int:
        """A token for `logits` [V], minus infinity where none may come, from a number in [0, 1); -1: none may."""
        if 0 < sampling.top_k < len(logits):
            words = survivors(logits.numpy(), sampling.top_k)
            self._fit(len(words))
            place = self._draw(logits[torch.from_numpy(words)], sampling, uniform)
            self._fit(len(logits))
            return int(words[place]) if place >= 0 else -1
        return self._draw(logits, sampling, uniform)

    def _draw(self, logits: Tensor, sampling: Sampling, uniform: float) -> int:
        total = self._weigh(logits, sampling.temperature)
        if not total:
            return -1
        if sampling.top_p < 1 and sampling.typical_p < 1:
            self._cut(self._least(sampling.top_p * total))
        if sampling.min_p:
            self._cut(sampling.min_p * float(self._weights.amax()))
        if sampling.typical_p < 1:
            most, centre = sampling.typical_p * self._add(), self._expected()
            return self._first(uniform, lambda place: self._nearest(place, centre) < most)
        if sampling.top_p < 1:
            return self._first(uniform, lambda place: self._likelier(place) < sampling.top_p * total)
        return self._pick(uniform)

    def _weigh(self, logits: Tensor, temperature: float) -> float:
        """Fill in the weights; their sum, or 0 if there are none."""
        self.weigh(logits, temperature, holes=True)
        if LEAST < (total := self._add()) < math.inf:
            return total
        most, _ = self.weigh(logits, temperature, holes=True, least=math.inf)
        return self._add() if most > -math.inf else 0.0

    def _add(self) -> float:
        self.add(self._sums)
        return float(self._sums.sum())

    def _first(self, uniform: float, kept: Callable[[int], bool]) -> int:
        """The first of the words drawn that is one of those that may come."""
        more, place = Random(uniform), self._pick(uniform)
        while not kept(place):
            place = self._pick(more.random())
        return place

    def _pick(self, uniform: float) -> int:
        """The word at which the weights, added up group by group, exceed that share of their sum."""
        sums = np.add.accumulate(self._sums.numpy(), dtype=np.float64)
        group, left = passed(sums, uniform * float(sums[-1]))
        inside = np.add.accumulate(self._array[group :: self.groups], dtype=np.float64)
        return group + self.groups * passed(inside, left)[0]

    def _cut(self, least: float) -> None:
        """Leave those of at least this weight."""
        torch.threshold_(self._weights, float(np.nextafter(np.float32(least), np.float32(0))), 0.0)
        self._add()

    def _least(self, most: float) -> float:
        """The least of the largest weights that make up `most`."""
        falling = np.sort(self._array)[::-1]
        before = np.add.accumulate(falling, dtype=np.float64) - falling
        return float(falling[max(int(before.searchsorted(most)) - 1, 0)])

    def _likelier(self, place: int) -> float:
        """What is likelier than the word adds up to; that alone is left, if it is anything."""
        torch.threshold_(self._weights, float(self._array[place]), 0.0)
        return self._add() or -1.0

    def _expected(self) -> float:
        """As `expected`, of those that are left."""
        logs = self._weights.clamp(min=TINY).log_()
        return float((logs * self._weights).sum() / self._weights.sum())

    def _nearest(self, place: int, centre: float) -> float:
        """What is nearer to the centre than the word adds up to; that alone is left, if it is anything."""
        weight = float(self._array[place])
        mirrored = 2 * centre - math.log(weight)
        other = math.exp(mirrored) if mirrored < 88 else math.inf
        low, high = min(weight, other), max(weight, other)
        torch.threshold_(self._weights, low, 0.0)
        if high <= float(self._weights.amax()):
            torch.threshold_(self._weights.neg_(), -high, 0.0).neg_()
        return self._add() or -1.0


def share_of(sampling: Sampling) -> float:
    """Of all words, how much those make up that may come; -1 where that is not a share of all."""
    if sampling.typical_p < 1:
        return sampling.typical_p if sampling.top_p >= 1 else -1.0
    return sampling.top_p if sampling.top_p < 1 else math.inf


def passed(cumulative: Doubles, target: float) -> tuple[int, float]:
    """The first place that exceeds `target`, never one of no weight; and what is left of it there."""
    place = int(cumulative.searchsorted(target, "right"))
    if place == len(cumulative):  # rounded up
        place = int(cumulative.searchsorted(cumulative[-1]))
    return place, target - float(cumulative[place - 1]) if place else target


def survivors(logits: Floats, count: int) -> Ints:
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
    chosen: Ints = places[among >= least]
    return chosen
