"""The block allocator: which sequences hold a block, which contents are found again, which blocks are evicted first."""

import pytest

from polyhead.service.engine.block_allocator import ROOT_KEY, BlockAllocator, child_key


def names(tokens: list[int], size: int) -> list[bytes]:
    keys: list[bytes] = []
    for start in range(0, len(tokens) // size * size, size):
        keys.append(child_key(keys[-1] if keys else ROOT_KEY, tokens[start : start + size]))
    return keys


def stored(blocks: BlockAllocator, tokens: list[int]) -> list[int]:
    """Blocks that hold `tokens` and are published; the caller holds references to them."""
    held: list[int] = []
    assert blocks.allocate(held, len(tokens))
    for block, key in zip(held, names(tokens, blocks.size), strict=False):
        blocks.publish(block, key)
    return held


def test_the_hash_of_a_block_depends_on_every_token_before() -> None:
    assert names([1, 2, 3, 4], 2)[1] != names([9, 2, 3, 4], 2)[1]
    assert names([1, 2, 3, 4], 2)[1] != names([3, 4], 2)[0]
    assert names([1, 23], 2) != names([12, 3], 2)
    assert names([1, 2, 3, 4], 2) == names([1, 2, 3, 4, 5], 2)


@pytest.mark.parametrize(("length", "count"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (12, 3)])
def test_grow_allocates_exactly_the_needed_blocks(length: int, count: int) -> None:
    blocks = BlockAllocator(3, 4)
    held: list[int] = []
    assert blocks.allocate(held, length)
    assert len(set(held)) == count == blocks.used_count
    blocks.check([held])


def test_grow_changes_nothing_without_enough_free_blocks() -> None:
    blocks = BlockAllocator(3, 4)
    held: list[int] = []
    assert blocks.allocate(held, 4)
    assert not blocks.allocate(held, 16)
    assert not blocks.allocate(held, 12, spare=1)
    assert len(held) == blocks.used_count == 1
    assert blocks.allocate(held, 8, spare=1)
    assert blocks.allocate(held, 5, spare=99), "no block is missing, so nothing has to be kept free"


def test_share_finds_the_longest_cached_prefix() -> None:
    blocks = BlockAllocator(8, 2)
    first = stored(blocks, [1, 2, 3, 4, 5, 6])
    second: list[int] = []
    assert blocks.share_cached(second, names([1, 2, 3, 4, 9, 9], 2), 0) == 2
    assert second == first[:2]
    assert [blocks.reference_counts[block] for block in first] == [2, 2, 1]
    blocks.check([first, second])


def test_share_frees_the_blocks_that_it_replaces() -> None:
    blocks = BlockAllocator(8, 2)
    late: list[int] = []
    assert blocks.allocate(late, 6)
    first = stored(blocks, [1, 2, 3, 4, 5, 6])
    assert blocks.share_cached(late, names([1, 2, 3, 4, 5, 6], 2)[1:], 1) == 2
    assert late[1:] == first[1:]
    assert late[0] != first[0]
    blocks.check([late, first])
    assert blocks.used_count == 4


def test_contents_stay_cached_until_their_blocks_are_needed() -> None:
    blocks = BlockAllocator(4, 2)
    old = stored(blocks, [1, 2, 3, 4])
    ids = list(old)
    blocks.release(old)
    assert blocks.used_count == 0
    other: list[int] = []
    assert blocks.allocate(other, 4)
    assert not set(other) & set(ids), "blocks without contents are used first"
    again: list[int] = []
    assert blocks.share_cached(again, names([1, 2, 3, 4], 2), 0) == 2
    blocks.release(again)
    more: list[int] = []
    assert blocks.allocate(more, 2)
    assert more == [ids[1]], "the end of a prefix is evicted before its beginning"
    assert blocks.share_cached(again, names([1, 2, 3, 4], 2), 0) == 1
    blocks.check([other, more, again])


def test_the_first_of_equal_blocks_keeps_the_hash() -> None:
    blocks = BlockAllocator(4, 2)
    first, second = stored(blocks, [1, 2]), stored(blocks, [1, 2])
    found: list[int] = []
    blocks.share_cached(found, names([1, 2], 2), 0)
    assert found == first != second
    blocks.check([first, second, found])


def test_evicted_blocks_are_not_found() -> None:
    blocks = BlockAllocator(4, 2)
    first = stored(blocks, [1, 2, 3, 4])
    blocks.unpublish(first)
    assert blocks.share_cached([], names([1, 2, 3, 4], 2), 0) == 0
    blocks.check([first])


def test_check_finds_a_leak_and_a_block_with_two_owners() -> None:
    blocks = BlockAllocator(4, 2)
    held: list[int] = []
    blocks.allocate(held, 4)
    with pytest.raises(AssertionError, match="reference count"):
        blocks.check([])
    with pytest.raises(AssertionError, match="reference count"):
        blocks.check([held, held])
    blocks.free_blocks[held[0]] = None
    with pytest.raises(AssertionError, match="neither free nor referenced"):
        blocks.check([held])
