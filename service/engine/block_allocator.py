"""Who holds which cache block.

Plain integers: nothing here knows tensors, sequences or time.  The one idea: a full block is named by a hash of its
tokens and, through its parent's name, of all tokens before them, so that equal prefixes find each other's blocks.  A
block that nobody holds keeps its contents, and its name, until the room is needed.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

BlockKey = bytes
ROOT_KEY: BlockKey = b""
BlockCopy = tuple[int, int]  # the contents of a block, to another


def root_key(adapter: int, salt: str = "") -> BlockKey:
    """What the first block of a sequence follows: what different adapters compute of the same tokens differs, and who
    gives a `salt` shares with nobody who doesn't know it."""
    return array("q", (adapter,)).tobytes() + salt.encode() if adapter or salt else ROOT_KEY


def child_key(parent: BlockKey, tokens: Sequence[int]) -> BlockKey:
    """The name of a full block that follows `parent` and holds `tokens`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockAllocator:
    """A pool of `count` blocks of `size` tokens, each counted by its holders.

    Free blocks are taken least recently used first; those without stored contents before all others.
    """

    def __init__(self, count: int, size: int) -> None:
        assert count > 0
        assert size > 0
        self.count, self.size = count, size
        self.reference_counts = [0] * count
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self.key_of: dict[int, BlockKey] = {}
        self.block_of: dict[BlockKey, int] = {}

    @property
    def used_count(self) -> int:
        """Blocks that somebody holds."""
        return self.count - len(self.free_blocks)

    def allocate(self, held: list[int], length: int, spare: int = 0) -> bool:
        """Hold enough blocks for `length` tokens and leave `spare` free, or change nothing and say no."""
        missing = -(-length // self.size) - len(held)
        if missing <= 0:
            return True
        if missing + spare > len(self.free_blocks):
            return False
        held += (self._take_free() for _ in range(missing))
        return True

    def share_cached(self, held: list[int], keys: Iterable[BlockKey], first: int) -> int:
        """Hold stored blocks named `keys` at `first` and after, in place of what is held there; return how many.

        Whoever calls has written nothing to the blocks at `first` and after.
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
        """Hold the same blocks once more.  Who wants to write to one of them makes it its own first."""
        for block in held:
            self._add_reference(block)
        return list(held)

    def is_shared(self, held: Sequence[int], index: int) -> bool:
        """Whether others hold the block at `index`, if there is one."""
        return index < len(held) and self.reference_counts[held[index]] > 1

    def replace_shared(self, held: list[int], index: int) -> BlockCopy:
        """Hold a block of one's own in place of a shared one, whose contents are to be copied; one must be free."""
        shared = held[index]
        held[index] = self._take_free()
        self._drop_reference(shared)
        return shared, held[index]

    def publish(self, block: int, key: BlockKey) -> None:
        """Let others find a block that is full and computed.  The first of equal blocks keeps the name."""
        if key not in self.block_of:
            self.block_of[key], self.key_of[block] = block, key

    def unpublish(self, held: Iterable[int]) -> None:
        """Let nobody find these blocks any more: their contents are not to be trusted."""
        for block in held:
            self._remove_key(block)

    def release(self, held: list[int]) -> None:
        """Let go of every block, the last first, so that beginnings outlive their endings."""
        while held:
            self._drop_reference(held.pop())

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that every block has exactly as many holders as `tables` list it, and is free iff it has none."""
        held = [0] * self.count
        for table in tables:
            for block in table:
                held[block] += 1
        assert held == self.reference_counts, "a block has other holders than the sequences that list it"
        assert len(self.free_blocks) == held.count(0), "a block is neither free nor held"
        assert not any(held[block] for block in self.free_blocks), "a block is both free and held"
        assert len(self.key_of) == len(self.block_of), "a block has two names, or a name two blocks"

    def _take_free(self) -> int:
        block, _ = self.free_blocks.popitem(last=False)
        self._remove_key(block)
        self.reference_counts[block] = 1
        return block

    def _add_reference(self, block: int) -> None:
        self.free_blocks.pop(block, None)
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
