"""Truncation of texts and pairs to a number of tokens."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polyhead.service.core.text_limits import split_budget, truncate_rows


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 60))
def test_shares_fill_the_budget_and_take_from_the_longer(first: int, second: int, budget: int) -> None:
    one, two = split_budget(first, second, budget)
    assert one + two == min(first + second, budget)
    assert 0 <= one <= first
    assert 0 <= two <= second
    # the longer part keeps at least as many tokens as the other, except for an odd token
    assert one == first or one + 1 >= two
    assert two == second or two + 1 >= one


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 30), st.sampled_from(["left", "right"]), st.booleans())
def test_truncation_keeps_special_tokens_and_order(special: list[bool], limit: int, side: Any, pair: bool) -> None:
    kept = truncate_rows(special, limit, side=side, pair=pair)
    assert kept == sorted(set(kept))
    assert {row for row, is_special in enumerate(special) if is_special} <= set(kept)
    assert len(kept) == min(len(special), max(limit, sum(special)))
