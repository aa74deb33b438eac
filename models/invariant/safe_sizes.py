"""Sizes of products that give the same bits, and how to split rows into them.

A library chooses a kernel by shape, and kernels add in different orders. So each size of a short list is compared with
a reference on this machine, and later only sizes that agreed are used.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
from torch import Tensor

ROW_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CALL_COST = 12  # the cost of one more product, in rows


def matching_sizes(candidates: Iterable[int], reference: Tensor, compute: Callable[[int], Tensor]) -> tuple[int, ...]:
    """The candidates for which `compute` returns a prefix of `reference`, bit by bit."""
    return tuple(size for size in candidates if is_prefix_of(compute(size), reference))


def is_prefix_of(some: Tensor, reference: Tensor) -> bool:
    """Whether `some` equals the beginning of `reference` in every dimension."""
    return torch.equal(some, reference[tuple(slice(length) for length in some.shape)])


@lru_cache(maxsize=4096)
def split_rows(count: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(start, size) of pieces with `sizes` (ascending) that cover `count` rows at the lowest cost; the last may reach
    beyond."""
    whole, rest = divmod(count, sizes[-1])
    pieces = [(index * sizes[-1], sizes[-1]) for index in range(whole)]
    start = whole * sizes[-1]
    for size in _cheapest_sizes(rest, sizes)[1]:
        pieces.append((start, size))
        start += size
    return tuple(pieces)


@lru_cache(maxsize=4096)
def _cheapest_sizes(count: int, sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """The cost of `count` rows, fewer than the largest size, and the sizes of their pieces."""
    if not count:
        return 0, ()
    over = next(size for size in sizes if size >= count)
    best: tuple[int, tuple[int, ...]] = (CALL_COST + over, (over,))
    fitting = [size for size in sizes if size < count]
    if fitting:
        cost, rest = _cheapest_sizes(count - fitting[-1], sizes)
        best = min(best, (CALL_COST + fitting[-1] + cost, (fitting[-1], *rest)))
    return best
