"""Shapes that are known to give the same bits, and how to make do with them.

A library chooses a kernel by shape, and kernels differ in the order in which they add.  The one idea: try each shape of
a short list against one reference on this machine, and from then on compute in shapes that agreed, and in no others.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
from torch import Tensor

ROW_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CALL_COST = 12  # what one more product costs, in rows


def matching_sizes(candidates: Iterable[int], reference: Tensor, compute: Callable[[int], Tensor]) -> tuple[int, ...]:
    """The candidates for which `compute` gives `reference` to the bit, as far as it gives anything."""
    return tuple(size for size in candidates if is_prefix_of(compute(size), reference))


def is_prefix_of(some: Tensor, reference: Tensor) -> bool:
    """Whether `some` is the beginning of `reference`, in every dimension."""
    return torch.equal(some, reference[tuple(slice(length) for length in some.shape)])


@lru_cache(maxsize=4096)
def split_rows(count: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(start, size) of cheap pieces of `sizes` (ascending) that cover `count` rows; the last may reach beyond."""
    whole, rest = divmod(count, sizes[-1])
    pieces = [(index * sizes[-1], sizes[-1]) for index in range(whole)]
    start = whole * sizes[-1]
    for size in _cheapest_sizes(rest, sizes)[1]:
        pieces.append((start, size))
        start += size
    return tuple(pieces)


@lru_cache(maxsize=4096)
def _cheapest_sizes(count: int, sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """What `count` rows cost, fewer than the largest size, and in which pieces."""
    if not count:
        return 0, ()
    over = next(size for size in sizes if size >= count)
    best: tuple[int, tuple[int, ...]] = (CALL_COST + over, (over,))
    fitting = [size for size in sizes if size < count]
    if fitting:
        cost, rest = _cheapest_sizes(count - fitting[-1], sizes)
        best = min(best, (CALL_COST + fitting[-1] + cost, (fitting[-1], *rest)))
    return best
