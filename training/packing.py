"""Items of many lengths to batches of about as many tokens each.

It doesn't know what an item is.  The one idea: all items of an epoch, shuffled, are one row of tokens, and the row is
cut in equal parts.  So lengths are mixed, no batch is a small rest, and every epoch has equally many.
"""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

from training.errors import RecipeError

Item = TypeVar("Item")


def packed(items: Sequence[Item], sizes: Sequence[int], most: int, draw: random.Random) -> list[list[Item]]:
    """Batches of at most `most` tokens, in an order that `draw` decides; RecipeError if items are too long for that.

    An item belongs to the part in which its first token lies, so no part is empty if none is shorter than an item, and
    none overflows if parts are shorter than `most` by one.
    """
    total, longest = sum(sizes), max(sizes, default=0)
    if most < 3 * longest:
        raise RecipeError(f"data.tokens: {most} is too few for items of up to {longest} tokens; take {3 * longest}")
    count = -(-total // (most - longest)) if longest else 0
    order = list(range(len(items)))
    draw.shuffle(order)
    batches: list[list[Item]] = [[] for _ in range(count)]
    starts = accumulate((sizes[row] for row in order), initial=0)
    for row, start in zip(order, starts, strict=False):
        batches[start * count // total].append(items[row])
    return batches
