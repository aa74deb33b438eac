"""Allocates the cache blocks of windowed layers, and gives back those that lie before the window of all later rows.

These layers see the last `window` tokens only, so they have a pool of blocks of their own, and a sequence holds a piece
of their block table.  It begins where the window of the next row does, and reaches one chunk further than that row, or
to the last token.  So a sequence of any length holds at most `limit` blocks.

A block has the same key as that of the other layers for the same tokens (service.engine.block_allocator).  A cached
prefix can be used where the blocks of the last window before its end are cached too.  Sequences rarely begin anywhere
else than where another one ended, where its prompt ended, or where two of them branched.  So blocks that a sequence has
passed are allocated again before those in front of such places.

A network without windowed layers, or whose windowed layers use the blocks of the others, has none; then the methods do
nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .block_allocator import BlockAllocator, BlockCopy, BlockKey


@dataclass(eq=False, slots=True)
class HeldWindow:
    """The blocks of windowed layers that one sequence holds: those with the indexes `first`, `first` + 1, ...

    `marks` are indexes of blocks at which another sequence may begin: the blocks of the window before them stay cached.
    """

    first: int = 0
    blocks: list[int] = field(default_factory=list)
    marks: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        """The index behind the last block."""
        return self.first + len(self.blocks)


def held_limit(window: int, chunk: int, size: int) -> int:
    """The most blocks of `size` tokens that a sequence needs at once: for a chunk, and the window of its first row."""
    return -(-(window + chunk - 2) // size) + 1


class WindowBlocks:
    """A pool of `count` blocks of `size` tokens; 0: there are none.  Layers see `window` tokens, and a step computes at
    most `chunk` tokens of a sequence.

    Executors number these blocks from `offset` on, in tables and copies.
    """

    def __init__(self, count: int, size: int, offset: int, span: tuple[int, int]) -> None:
        """`span`: the window and the chunk."""
        self.count, self._size, self._offset = count, size, offset
        self._window, chunk = span
        self.limit = held_limit(self._window, chunk, size)
        self._pool = BlockAllocator(max(count, 1), size)

    @property
    def used_count(self) -> int:
        """Blocks with at least one reference."""
        return self._pool.used_count

    def extend(self, held: HeldWindow, tokens: int, spare: int = 0) -> bool:
        """Hold all blocks that the next chunk of a sequence with so many tokens can need, if `spare` blocks stay free;
        otherwise change nothing, return False.
        """
        return not self.count or self._pool.allocate(held.blocks, self._next_length(held, tokens), spare)

    def has_room(self, held: HeldWindow, tokens: int, spare: int, without: Iterable[HeldWindow]) -> bool:
        """Whether `extend` would succeed if those of `without` were released."""
        tables = (other.blocks for other in without)
        return not self.count or self._pool.has_room(held.blocks, self._next_length(held, tokens), spare, tables)

    def _next_length(self, held: HeldWindow, tokens: int) -> int:
        """The tokens in the blocks that `held` has when it is extended."""
        end = min(-(-tokens // self._size), held.first + self.limit)
        return (end - held.first) * self._size

    def extend_partly(self, held: HeldWindow, tokens: int) -> None:
        """The same, with as many blocks as are free."""
        if not self.extend(held, tokens):
            self._pool.allocate(held.blocks, (len(held.blocks) + len(self._pool.free_blocks)) * self._size)

    def hold_draft(self, held: HeldWindow, tokens: int, spare: int) -> bool:
        """Hold blocks up to the one that ends a draft, after which the sequence has so many tokens, if `spare` blocks
        stay free.
        """
        return not self.count or self._pool.allocate(held.blocks, tokens - held.first * self._size, spare)

    def room(self, held: HeldWindow, computed: int, count: int) -> int:
        """How many of the next `count` tokens have blocks."""
        return min(count, held.end * self._size - computed) if self.count else count

    def table(self, held: HeldWindow, tokens: int) -> list[int]:
        """The numbers of the blocks of the first `tokens` tokens, as far as they are held."""
        return [self._offset + block for block in held.blocks[: -(-tokens // self._size) - held.first]]

    def is_shared(self, held: HeldWindow, index: int) -> bool:
        """Whether the block at `index`, if there is one, has other references."""
        return bool(self.count) and self._pool.is_shared(held.blocks, index - held.first)

    def replace_shared(self, held: HeldWindow, index: int) -> list[BlockCopy]:
        """Put a free block in place of the shared one at `index`; return the copy to make, or nothing where no block is
        free.
        """
        if not self._pool.free_blocks:
            return []
        source, target = self._pool.replace_shared(held.blocks, index - held.first)
        return [(source + self._offset, target + self._offset)]

    def publish(self, held: HeldWindow, index: int, key: BlockKey) -> None:
        """Make the full, computed block at `index` findable by its key."""
        if self.count:
            self._pool.publish(held.blocks[index - held.first], key)

    def release_passed(self, held: HeldWindow, computed: int) -> None:
        """Release the blocks that no row from `computed` on sees."""
        if not self.count:
            return
        first = self._first_seen(computed)
        for index in range(held.first, first):
            is_marked = any(self._first_seen(mark * self._size) <= index < mark for mark in held.marks)
            self._pool.release_one(held.blocks[index - held.first], is_passed=not is_marked)
        del held.blocks[: first - held.first]
        held.first = first

    def count_usable(self, keys: Sequence[BlockKey], first: int) -> int:
        """The most of the leading keys, of blocks from index `first` on, that a sequence can skip: those with all
        blocks that the row after them sees.  It holds those before `first` itself.
        """
        usable = len(keys)
        while usable and self.count:
            seen = range(max(self._first_seen((first + usable) * self._size), first), first + usable)
            missing = next((index for index in reversed(seen) if keys[index - first] not in self._pool.block_of), None)
            if missing is None:
                break
            usable = missing - first
        return usable

    def adopt_cached(self, held: HeldWindow, keys: Sequence[BlockKey], first: int) -> None:
        """Skip `keys`, as many as `count_usable` says, of blocks from index `first` on: hold the cached blocks that the
        row after them sees.
        """
        if not self.count or not keys:
            return
        after = first + len(keys)
        seen = self._first_seen(after * self._size)
        found = self._pool.fork([self._pool.block_of[key] for key in keys[max(seen - first, 0) :]])
        own, ahead = held.blocks[max(seen - held.first, 0) : first - held.first], held.blocks[after - held.first :]
        kept = {*own, *ahead}
        self._pool.release([block for block in held.blocks if block not in kept])
        held.first, held.blocks = seen, own + found + ahead

    def mark(self, held: HeldWindow, index: int) -> None:
        """Let the blocks of the window before block `index` stay cached after the sequence has passed them."""
        held.marks.add(index)

    def share(self, held: HeldWindow, other: HeldWindow, computed: int) -> None:
        """Hold the blocks of `other`, which has computed so many tokens, in place of all that `held` has."""
        kept = self._pool.fork(other.blocks[: -(-computed // self._size) - other.first])
        self._pool.release(held.blocks)
        held.first, held.blocks, held.marks = other.first, kept, set(other.marks)

    def release(self, held: HeldWindow) -> None:
        """Release all blocks of a sequence that is not computed further."""
        self._pool.release(held.blocks)
        held.first = 0
        held.marks.clear()

    def unpublish(self, keys: Iterable[BlockKey]) -> None:
        """Let the blocks with these keys be found no more.  A key without a block is no error."""
        found = map(self._pool.block_of.get, keys)
        self._pool.unpublish([block for block in found if block is not None])

    def unpublish_all(self) -> None:
        self._pool.unpublish(range(self._pool.count))

    def check(self, running: Iterable[tuple[HeldWindow, int]]) -> None:
        """Assert that no block is leaked, lost or held too long; `running`: what sequences hold and have computed."""
        held_ones = list(running)
        self._pool.check(held.blocks for held, _ in held_ones)
        for held, computed in held_ones:
            seen = self._first_seen(computed) if self.count else 0
            assert held.first == seen, "a sequence holds a block before its window, or lost one inside"
            assert not self.count or held.end * self._size >= computed, "a computed token has no block"

    def _first_seen(self, computed: int) -> int:
        """The index of the first block that the row at position `computed` sees."""
        return max(computed - self._window + 1, 0) // self._size
