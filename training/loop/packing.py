"""Items of many lengths to batches of about as many tokens each.

It doesn't know what an item is.  The one idea: all items of an epoch, shuffled, are one row of tokens, and the row is
cut in equal parts.  So no batch is a small rest, and every epoch has equally many.  Of some neighbouring batches the
items are sorted by length before they are cut: what is alike is computed side by side at the least cost.
"""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

from .errors import RecipeError

Item = TypeVar("Item")
NEIGHBOURS = 32  # batches whose items are sorted


def pack_items(items: Sequence[Item], sizes: Sequence[int], most: int, draw: random.Random) -> list[list[Item]]:
    """Batches of at most `most` tokens, in an order that `draw` decides; RecipeError if items are too long for that.

    An item belongs to the part in which its first token lies, so no part is empty if none is shorter than an item, and
    none overflows if parts are shorter than `most` by one.  Neighbours may share one item more than their part.
    """
    total, longest = sum(sizes), max(sizes, default=0)
    if most < 4 * longest:
        raise RecipeError(f"data.tokens: {most} is too few for items of up to {longest} tokens; take {4 * longest}")
    count = -(-total // (most - longest - -(-longest // NEIGHBOURS))) if longest else 0
    order = list(range(len(items)))
    draw.shuffle(order)
    batches: list[list[int]] = []
    apart, groups = cut_evenly(order, sizes, count), max(1, count // NEIGHBOURS)
    for group in range(groups):
        parts = apart[group * count // groups : (group + 1) * count // groups]
        near = sorted((row for part in parts for row in part), key=sizes.__getitem__)
        batches += cut_evenly(near, sizes, len(parts))
    draw.shuffle(batches)
    return [[items[row] for row in batch] for batch in batches]


def cut_evenly(rows: Sequence[int], sizes: Sequence[int], count: int) -> list[list[int]]:
    """So many parts of the rows in their order, as equal as their sizes let them be."""
    total = sum(sizes[row] for row in rows)
    parts: list[list[int]] = [[] for _ in range(count)]
    starts = accumulate((sizes[row] for row in rows), initial=0)
    for row, start in zip(rows, starts, strict=False):
        parts[start * count // total].append(row)
    return parts
