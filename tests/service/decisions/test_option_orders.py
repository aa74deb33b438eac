"""Orders of options."""

import math

import pytest

from polyhead.service.decisions.option_orders import choose_orders


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 30, 255])
@pytest.mark.parametrize("permutations", [1, 2, 3, 24])
def test_orders_are_different_and_the_same_at_each_call(count: int, permutations: int) -> None:
    orders = choose_orders(count, permutations)
    assert len(orders) == len(set(orders)) == min(permutations, math.factorial(count))
    assert orders[0] == tuple(range(count))
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert orders == choose_orders(count, permutations)
    if len(orders) > 1:
        assert orders[1] == orders[0][::-1]
