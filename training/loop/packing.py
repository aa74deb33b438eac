"""Packs items of different lengths into batches of about equally many tokens.

The shuffled items of an epoch are one row of tokens, cut into equal parts, so no batch is a small rest and all epochs
have equally many batches.  Within some neighbouring batches, items are sorted by length first: equal lengths are
cheaper to compute together.
"""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

from .errors import RecipeError

Item = TypeVar("Item")
NEIGHBOURS = 32  # batches whose items are sorted together


def pack_items(items: Sequence[Item], sizes: Sequence[int], max_tokens: int, rng: random.Random) -> list[list[Item]]:
    """Return batches of at most `max_tokens` tokens, shuffled by `rng`.  Raises RecipeError if items are too long for
    that.

    An item belongs to the part with its first token.  So no part is empty if each is longer than an item, and none is
    too long if parts are shorter than `max_tokens` by one item.  A group of neighbours may hold one item more
    than its part.
    """
    total, longest = sum(sizes), max(sizes, default=0)
    if max_tokens < 4 * longest:
        raise RecipeError(
            f"data.tokens: {max_tokens} is too few for items of up to {longest} tokens; take {4 * longest}"
        )
    count = -(-total // (max_tokens - longest - -(-longest // NEIGHBOURS))) if longest else 0
    order = list(range(len(items)))
    rng.shuffle(order)
    batches: list[list[int]] = []
    parts_by_chance, groups = cut_evenly(order, sizes, count), max(1, count // NEIGHBOURS)
    for group in range(groups):
        parts = parts_by_chance[group * count // groups : (group + 1) * count // groups]
        near = sorted((row for part in parts for row in part), key=sizes.__getitem__)
        batches += cut_evenly(near, sizes, len(parts))
    rng.shuffle(batches)
    return [[items[row] for row in batch] for batch in batches]


def cut_evenly(rows: Sequence[int], sizes: Sequence[int], count: int) -> list[list[int]]:
    """Cut rows into `count` parts, in order and of as equal size as possible."""
    total = sum(sizes[row] for row in rows)
    parts: list[list[int]] = [[] for _ in range(count)]
    starts = accumulate((sizes[row] for row in rows), initial=0)
    for row, start in zip(rows, starts, strict=False):
        parts[start * count // total].append(row)
    return parts
