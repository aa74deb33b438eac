"""Gives out the state slots of sequences in steps, as a scheduler does."""

import random

from polyhead.models.executors.contract import StateUse

Part = tuple[list[int], int, list[int]]  # tokens, the position of the first, and the blocks of the whole sequence


class StateSlots:
    """`count` slots; a sequence is known by its first block. Some sequences also write the state after some of their
    rows to a slot of its own."""

    def __init__(self, count: int, choice: random.Random) -> None:
        self.count, self._choice = count, choice
        self._free = choice.sample(range(count), count)
        self._held: dict[int, int] = {}  # by first block
        self._passed: list[int] = []  # slots that the last step still used

    def uses(self, parts: list[Part]) -> list[StateUse]:
        """The slots of a step. Slots that are no longer needed are free in the next one."""
        self._free += self._passed
        self._passed, found = [], []
        for tokens, first, table in parts:
            read = self._held[table[0]] if first else -1
            write = self._held[table[0]] = self._free.pop()
            border_rows = self._choice.randint(1, len(tokens)) if self._choice.random() < 0.3 else 0
            border = self._free.pop() if border_rows else -1
            self._passed += [slot for slot in (read, border) if slot >= 0]
            found.append(StateUse(read, write, border_rows, border))
        return found

    def go_back(self, sequence: int, use: StateUse) -> None:
        """A sequence, known by its first block, goes on from the border of its last use."""
        self._held[sequence] = use.border
        self._passed = [use.write if slot == use.border else slot for slot in self._passed]
