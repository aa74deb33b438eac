"""Allocates the slots that hold recurrent states, and finds cached states again by the tokens before them.

A slot holds the state of all recurrent layers after some token of a sequence.  A step reads the state of a sequence
from one slot and writes the next state to another; what is held or cached is never written.  So a step can be computed
again to the same bits, forked sequences share a slot, and no state is ever copied.

The state after the last token of a full block gets the key of that block (service.engine.block_allocator).  A slot
without references keeps its state and its key until it is allocated again.  Of the borders inside an answer, which few
other sequences share, only the last stays cached.

A network without recurrent layers has no slots; then the methods do nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .block_allocator import ROOT_KEY, BlockAllocator, BlockKey

NO_SLOT = -1
SPARE_SLOTS = 2  # beyond two for each sequence: one for the self-test, one for a border


@dataclass(eq=False, slots=True)
class HeldSlots:
    """The slots that one sequence holds; NO_SLOT where it holds none."""

    current: int = NO_SLOT  # the state after its computed tokens
    write: int = NO_SLOT  # for the state after its planned chunk
    border: int = NO_SLOT  # for the state after the first `border_rows` tokens of that chunk
    border_rows: int = 0
    answer_key: BlockKey = ROOT_KEY  # of the cached state at the last border of its answer, if there is one

    def list_held(self) -> list[int]:
        return [slot for slot in (self.current, self.write, self.border) if slot != NO_SLOT]


def smallest_slot_count(sequences: int) -> int:
    """The slots that so many running sequences need: one to read and one to write for each, and the spare ones."""
    return 2 * sequences + SPARE_SLOTS


class StateSlots:
    """A pool of `count` slots; 0 for a network without recurrent layers.  Blocks have `block_size` tokens."""

    def __init__(self, count: int, block_size: int) -> None:
        self.count, self._block_size = count, block_size
        self._pool = BlockAllocator(max(count, 1), 1)

    @property
    def used_count(self) -> int:
        """Slots with at least one reference."""
        return self._pool.used_count

    @property
    def cached_count(self) -> int:
        """Slots whose state can be found by its key."""
        return len(self._pool.key_of)

    def take_write(self, held: HeldSlots) -> None:
        """Take the slot for the state after the sequence's next chunk.  One is free by `smallest_slot_count`."""
        if self.count:
            held.write = self._take(spare=0)
            assert held.write != NO_SLOT, "no slot is free for the next state of a sequence"

    def take_border(self, held: HeldSlots, rows: int, key: BlockKey) -> None:
        """Take a slot for the state after the first `rows` tokens of the next chunk, whose block has the key `key`.

        None is taken where that state is cached already, or only the last slot is free.
        """
        if self.count and key not in self._pool.block_of:
            held.border = self._take(spare=1)
            held.border_rows = rows if held.border != NO_SLOT else 0

    def drop_planned(self, held: HeldSlots) -> None:
        """Release the slots of a chunk that was not committed."""
        self._drop(held.write)
        self._drop(held.border)
        held.write = held.border = NO_SLOT
        held.border_rows = 0

    def commit(self, held: HeldSlots, keys: Sequence[BlockKey], computed: int, count: int) -> None:
        """Make the state that was written the current one, and publish states at block borders.

        `count` tokens were computed, `computed` are now; `keys` are those of the full blocks of the sequence.
        """
        if held.write == NO_SLOT:
            return
        self._drop(held.current)
        held.current, held.write = held.write, NO_SLOT
        if held.border != NO_SLOT:
            self._pool.publish(held.border, keys[(computed - count + held.border_rows) // self._block_size - 1])
        self.drop_planned(held)
        if computed % self._block_size == 0:
            key = keys[computed // self._block_size - 1]
            self._pool.publish(held.current, key)
            if count == 1 and self._pool.block_of[key] == held.current:
                self.unpublish([held.answer_key])
                held.answer_key = key

    def count_usable(self, keys: Sequence[BlockKey]) -> int:
        """How many of the leading keys lie before the last cached state of those with the keys `keys`; 0 if none is
        cached.
        """
        usable = len(keys)
        while usable and self.count and keys[usable - 1] not in self._pool.block_of:
            usable -= 1
        return usable

    def adopt_cached(self, held: HeldSlots, keys: Sequence[BlockKey]) -> None:
        """Make the cached state after the blocks with these keys, as many as `count_usable` says, the current one."""
        if self.count and keys:
            self._replace_current(held, self._pool.block_of[keys[-1]])

    def share(self, held: HeldSlots, other: HeldSlots) -> None:
        """Make the current state of `other` that of `held` too, in place of all that it holds."""
        self.drop_planned(held)
        self._replace_current(held, other.current)

    def release(self, held: HeldSlots) -> None:
        """Drop all references of a sequence that is not computed further."""
        self.drop_planned(held)
        self._replace_current(held, NO_SLOT)

    def unpublish(self, keys: Iterable[BlockKey]) -> None:
        """Let the states with these keys be found no more.  A key without a state is no error."""
        found = map(self._pool.block_of.get, keys)
        self._pool.unpublish([slot for slot in found if slot is not None])

    def unpublish_all(self) -> None:
        self._pool.unpublish(range(self._pool.count))

    def check(self, running: Iterable[HeldSlots]) -> None:
        """Assert that no slot is leaked, lost or held by one that is not in `running`."""
        self._pool.check(held.list_held() for held in running)

    def _replace_current(self, held: HeldSlots, slot: int) -> None:
        if slot != NO_SLOT:
            self._pool.fork([slot])
        self._drop(held.current)
        held.current = slot

    def _take(self, spare: int) -> int:
        taken: list[int] = []
        return taken[0] if self._pool.allocate(taken, 1, spare) else NO_SLOT

    def _drop(self, slot: int) -> None:
        if slot != NO_SLOT:
            self._pool.release([slot])
