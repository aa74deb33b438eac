"""Who holds which cache block.

Plain integers: nothing here knows tensors, sequences or time.  The one idea: a full block is named by a hash of its
tokens and, through its parent's name, of all tokens before them, so that equal prefixes find each other's blocks.  A
block that nobody holds keeps its contents, and its name, until the room is needed.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

Key = bytes
ROOT: Key = b""
Copy = tuple[int, int]  # the contents of a block, to another


def root(adapter: int, salt: str = "") -> Key:
    """What the first block of a sequence follows: what different adapters compute of the same tokens differs, and who
    gives a `salt` shares with nobody who doesn't know it."""
    return array("q", (adapter,)).tobytes() + salt.encode() if adapter or salt else ROOT


def chain(parent: Key, tokens: Sequence[int]) -> Key:
    """The name of a full block that follows `parent` and holds `tokens`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class Blocks:
    """A pool of `count` blocks of `size` tokens, each counted by its holders.

    Free blocks are taken least recently used first; those without stored contents before all others.
    """

    def __init__(self, count: int, size: int) -> None:
        assert count > 0
        assert size > 0
        self.count, self.size = count, size
        self.holders = [0] * count
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self.key_of: dict[int, Key] = {}
        self.block_of: dict[Key, int] = {}

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.count - len(self.free)

    def grow(self, held: list[int], length: int, spare: int = 0) -> bool:
        """Hold enough blocks for `length` tokens and leave `spare` free, or change nothing and say no."""
        missing = -(-length // self.size) - len(held)
        if missing <= 0:
            return True
        if missing + spare > len(self.free):
            return False
        held += (self._take() for _ in range(missing))
        return True

    def share(self, held: list[int], keys: Iterable[Key], first: int) -> int:
        """Hold stored blocks named `keys` at `first` and after, in place of what is held there; return how many.

        Whoever calls has written nothing to the blocks at `first` and after.
        """
        shared = 0
        for index, key in enumerate(keys, first):
            block = self.block_of.get(key)
            if block is None:
                break
            self._hold(block)
            if index < len(held):
                self._drop(held[index])
                held[index] = block
            else:
                held.append(block)
            shared += 1
        return shared

    def fork(self, held: Sequence[int]) -> list[int]:
        """Hold the same blocks once more.  Who wants to write to one of them makes it its own first."""
        for block in held:
            self._hold(block)
        return list(held)

    def is_shared(self, held: Sequence[int], index: int) -> bool:
        """Whether others hold the block at `index`, if there is one."""
        return index < len(held) and self.holders[held[index]] > 1

    def own(self, held: list[int], index: int) -> Copy:
        """Hold a block of one's own in place of a shared one, whose contents are to be copied; one must be free."""
        shared = held[index]
        held[index] = self._take()
        self._drop(shared)
        return shared, held[index]

    def publish(self, block: int, key: Key) -> None:
        """Let others find a block that is full and computed.  The first of equal blocks keeps the name."""
        if key not in self.block_of:
            self.block_of[key], self.key_of[block] = block, key

    def forget(self, held: Iterable[int]) -> None:
        """Let nobody find these blocks any more: their contents are not to be trusted."""
        for block in held:
            self._unname(block)

    def release(self, held: list[int]) -> None:
        """Let go of every block, the last first, so that beginnings outlive their endings."""
        while held:
            self._drop(held.pop())

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that every block has exactly as many holders as `tables` list it, and is free iff it has none."""
        held = [0] * self.count
        for table in tables:
            for block in table:
                held[block] += 1
        assert held == self.holders, "a block has other holders than the sequences that list it"
        assert len(self.free) == held.count(0), "a block is neither free nor held"
        assert not any(held[block] for block in self.free), "a block is both free and held"
        assert len(self.key_of) == len(self.block_of), "a block has two names, or a name two blocks"

    def _take(self) -> int:
        block, _ = self.free.popitem(last=False)
        self._unname(block)
        self.holders[block] = 1
        return block

    def _hold(self, block: int) -> None:
        self.free.pop(block, None)
        self.holders[block] += 1

    def _drop(self, block: int) -> None:
        self.holders[block] -= 1
        if not self.holders[block]:
            self.free[block] = None
            if block not in self.key_of:
                self.free.move_to_end(block, last=False)

    def _unname(self, block: int) -> None:
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.block_of[key]
