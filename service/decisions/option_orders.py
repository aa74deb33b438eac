"""Orders in which the options of a question are read: models prefer some places to others."""

import itertools
import math
import random
from functools import lru_cache

Order = tuple[int, ...]  # the option at each place


def count_different(count: int, permutations: int) -> int:
    """How many orders of `count` options there are, at most `permutations`."""
    return min(permutations, math.factorial(min(count, 8)))


@lru_cache(maxsize=64)  # the questions of a call have few different numbers of options
def choose_orders(count: int, permutations: int) -> tuple[Order, ...]:
    """So many different orders of `count` options, or all there are: as given, reversed, then others that depend on
    nothing else.
    """
    given = tuple(range(count))
    wanted = count_different(count, permutations)
    orders = dict.fromkeys((given, given[::-1]))
    if wanted > len(orders) and count <= 4:
        orders |= dict.fromkeys(itertools.permutations(given))
    shuffled, source = list(given), random.Random(count)
    while len(orders) < wanted:
        source.shuffle(shuffled)
        orders[tuple(shuffled)] = None
    return tuple(orders)[:wanted]
