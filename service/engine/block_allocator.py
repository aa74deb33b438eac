"""Allocates cache blocks, counts their references, and finds cached blocks again by the tokens they hold.

A full block has a key: the hash of its tokens and of its parent's key, so of all tokens before it.  Sequences with
equal prefixes share blocks by these keys.  A block without references keeps its contents and its key until it is
allocated again.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import takewhile

BlockKey = bytes
ROOT_KEY: BlockKey = b""
BlockCopy = tuple[int, int]  # source and destination of a copy of a whole block


def root_key(adapter: int, salt: str = "") -> BlockKey:
    """The parent key of a sequence's first block.  Sequences of different adapters, or with different `salt`, share
    nothing.
    """
    return array("q", (adapter,)).tobytes() + salt.encode() if adapter or salt else ROOT_KEY


def child_key(parent: BlockKey, tokens: Sequence[int]) -> BlockKey:
    """The key of a full block that follows the block with the key `parent` and holds `tokens`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def block_keys(parent: BlockKey, tokens: Sequence[int], size: int) -> list[BlockKey]:
    """The keys of the full blocks of `size` tokens that follow the block with the key `parent` and hold `tokens`."""
    keys = list[BlockKey]()
    data, width = array("q", tokens[: len(tokens) // size * size]).tobytes(), size * array("q").itemsize
    for start in range(0, len(data), width):
        parent = blake2b(parent + data[start : start + width], digest_size=16).digest()
        keys.append(parent)
    return keys


class BlockAllocator:
    """A pool of `count` blocks of `size` tokens with reference counts.

    Free blocks are allocated least recently used first: those without cached contents, then passed ones, then all
    others.
    """

    def __init__(self, count: int, size: int) -> None:
        assert count > 0
        assert size > 0
        self.count, self.size = count, size
        self.reference_counts = [0] * count
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self.passed_blocks: OrderedDict[int, None] = OrderedDict()  # free blocks that go before others with contents
        self.key_of: dict[int, BlockKey] = {}
        self.block_of: dict[BlockKey, int] = {}

    @property
    def used_count(self) -> int:
        """Blocks with at least one reference."""
        return self.count - len(self.free_blocks)

    def allocate(self, held: list[int], length: int, spare: int = 0) -> bool:
        """Extend `held` to enough blocks for `length` tokens if `spare` blocks stay free; otherwise change nothing,
        return False.
        """
        missing = -(-length // self.size) - len(held)
        if missing <= 0:
            return True
        if missing + spare > len(self.free_blocks):
            return False
        held += (self._take_free() for _ in range(missing))
        return True

    def has_room(self, held: Sequence[int], length: int, spare: int, without: Iterable[Sequence[int]]) -> bool:
        """Whether `held` could be extended to `length` tokens, and `spare` blocks stayed free, if the tables `without`
        were released.
        """
        missing = -(-length // self.size) - len(held)
        released = Counter(block for table in without for block in table)
        freed = sum(self.reference_counts[block] == count for block, count in released.items())
        return missing + spare <= len(self.free_blocks) + freed

    def count_cached(self, keys: Iterable[BlockKey]) -> int:
        """How many of the leading keys belong to cached blocks."""
        return sum(1 for _ in takewhile(self.block_of.__contains__, keys))

    def share_cached(self, held: list[int], keys: Iterable[BlockKey], first: int) -> int:
        """Put cached blocks with the keys `keys` into `held` from index `first` on; return how many were found.

        Blocks of `held` at these indexes are released: the caller has written nothing to them.
        """
        shared = 0
        for index, key in enumerate(keys, first):
            block = self.block_of.get(key)
            if block is None:
                break
            self._add_reference(block)
            if index < len(held):
                self._drop_reference(held[index])
                held[index] = block
            else:
                held.append(block)
            shared += 1
        return shared

    def fork(self, held: Sequence[int]) -> list[int]:
        """Add a reference to each block of `held`.  A block with several references is replaced before it is written
        to.
        """
        for block in held:
            self._add_reference(block)
        return list(held)

    def is_shared(self, held: Sequence[int], index: int) -> bool:
        """Whether the block at `index`, if there is one, has other references."""
        return index < len(held) and self.reference_counts[held[index]] > 1

    def replace_shared(self, held: list[int], index: int) -> BlockCopy:
        """Put a free block in place of the shared one at `index`.  The caller must copy the contents; one block must be
        free.
        """
        shared = held[index]
        held[index] = self._take_free()
        self._drop_reference(shared)
        return shared, held[index]

    def publish(self, block: int, key: BlockKey) -> None:
        """Make a full, computed block findable by its key.  Of equal blocks the first keeps the key."""
        if key not in self.block_of:
            self.block_of[key], self.key_of[block] = block, key

    def unpublish(self, held: Iterable[int]) -> None:
        """Remove the keys of these blocks, because their contents are not valid or no longer wanted."""
        for block in held:
            self._remove_key(block)
            if block in self.free_blocks:
                self.free_blocks.move_to_end(block, last=False)

    def release(self, held: list[int]) -> None:
        """Drop the references to all blocks of `held`, the last first, so that prefixes stay cached longest."""
        while held:
            self._drop_reference(held.pop())

    def release_one(self, block: int, is_passed: bool) -> None:
        """Drop a reference.  `is_passed`: its contents are cached only until no block without contents is free."""
        self._drop_reference(block)
        if is_passed and block in self.free_blocks:
            self.passed_blocks[block] = None

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that reference counts equal the occurrences in `tables`, and that a block is free iff it has none."""
        held = [0] * self.count
        for table in tables:
            for block in table:
                held[block] += 1
        assert held == self.reference_counts, "the reference count of a block differs from the sequences that list it"
        assert len(self.free_blocks) == held.count(0), "a block is neither free nor referenced"
        assert not any(held[block] for block in self.free_blocks), "a block is both free and referenced"
        assert len(self.key_of) == len(self.block_of), "a block has two keys, or a key two blocks"
        assert self.passed_blocks.keys() <= self.free_blocks.keys(), "a passed block is not free"

    def _take_free(self) -> int:
        block = next(iter(self.free_blocks))
        if block in self.key_of and self.passed_blocks:
            block = next(iter(self.passed_blocks))
        del self.free_blocks[block]
        self.passed_blocks.pop(block, None)
        self._remove_key(block)
        self.reference_counts[block] = 1
        return block

    def _add_reference(self, block: int) -> None:
        self.free_blocks.pop(block, None)
        self.passed_blocks.pop(block, None)
        self.reference_counts[block] += 1

    def _drop_reference(self, block: int) -> None:
        self.reference_counts[block] -= 1
        if not self.reference_counts[block]:
            self.free_blocks[block] = None
            if block not in self.key_of:
                self.free_blocks.move_to_end(block, last=False)

    def _remove_key(self, block: int) -> None:
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.block_of[key]
