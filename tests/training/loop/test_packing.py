"""Packing of items into batches of about equally many tokens."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhead.training.loop import packing
from polyhead.training.loop.errors import RecipeError
from polyhead.training.loop.packing import pack_items


@pytest.mark.parametrize("neighbours", [2, 3, 32])
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=60), most=st.integers(80, 200), seed=st.integers())
@settings(max_examples=60, deadline=None)
def test_batches_contain_every_item_once_within_the_limit(
    neighbours: int, sizes: list[int], most: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "NEIGHBOURS", neighbours)
        check_batches(sizes, most, seed)


def check_batches(sizes: list[int], max_tokens: int, seed: int) -> None:
    batches = pack_items(range(len(sizes)), sizes, max_tokens, random.Random(seed))
    assert sorted(itertools.chain(*batches)) == list(range(len(sizes)))
    tokens = [sum(sizes[row] for row in batch) for batch in batches]
    assert max(tokens) <= max_tokens
    assert min(tokens) > 0
    assert len(batches) == len(pack_items(range(len(sizes)), sizes, max_tokens, random.Random(seed + 1)))


@pytest.mark.parametrize("seed", range(20))
def test_the_last_item_of_a_batch_fits(seed: int) -> None:
    """Two batches of 70 tokens would suffice for 140 tokens only if every item had one token."""
    sizes = [19, 20, 20, 20, 20, 20, 21]
    batches = pack_items(list(range(7)), sizes, 84, random.Random(seed))
    assert max(sum(sizes[row] for row in batch) for batch in batches) <= 84


def test_items_of_similar_length_are_batched_in_random_order() -> None:
    sizes = [1 + row % 20 for row in range(2000)]
    batches = pack_items(list(range(2000)), sizes, 120, random.Random(0))
    spread = [max(sizes[row] for row in batch) - min(sizes[row] for row in batch) for batch in batches]
    assert sum(spread) / len(spread) < 3  # 17 in random order
    means = [sum(sizes[row] for row in batch) / len(batch) for batch in batches]
    assert means != sorted(means)


def test_too_small_a_batch_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"data\.tokens: 20 is too few for items of up to 10 tokens; take 40"):
        pack_items(["a"], [10], 20, random.Random(0))
