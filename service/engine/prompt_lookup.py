"""What came next the last time: tokens foretold from the prompt and the answer themselves.

Knows one list of tokens, nothing of models or time.  The one idea is prompt lookup decoding (Saxena 2023; Yang et al.
2023, arXiv:2304.04487): an answer that edits, quotes or sums up repeats long passages, so whoever finds where the last
few tokens stood before can read on from there.  How far the two places agree says how much to trust it.  Where a long
agreement breaks, a word may have been changed, put in or left out: it is taken up again nearby.

An n-gram is looked up in a table of fixed size by a hash, and the newest of those that share a slot is kept: a token
costs about a microsecond, a sequence a quarter of a MiB at most, and what is found is compared, so never wrong.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LENGTHS = (3, 2)  # of n-grams, the better ones first
FEWEST, MOST = 11, 16  # powers of two: slots of a table
FURTHEST = 16  # tokens compared to find out how far two places agree
LONG = 4  # tokens of an agreement that may go on after a break,
NEARBY, SOON = 8, 4  # so many tokens further, after so many others
FACTOR, WIDE = (
    3_266_489_917,
    (1 << 32) - 1,
)  # a prime of xxHash's; not the golden ratio's, whose square is itself plus 1


class Lookup:
    """Follows `tokens`, which somebody else appends to and never takes any away from."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._end = tokens, len(tokens)
        bits = min(max((4 * self._end).bit_length(), FEWEST), MOST)
        self._shift, self._table = 32 - bits, array("i", bytes(4 << bits))  # the end of an n-gram; 0: none
        self._place = self.run = 0
        self._break = self._patience = (
            0  # where a long agreement broke, and how many more tokens it may be taken up after
        )
        self._index()
        self._search()

    @property
    def unread(self) -> int:
        """Tokens that were appended and not read yet."""
        return len(self._tokens) - self._end

    def read(self) -> bool:
        """Take in the next token; whether it is what was foretold.

        Afterwards `run` is how many of the last tokens stood before what is foretold now; 0: nothing is.
        """
        right = self.run > 0 and self._tokens[self._end] == self._tokens[self._place]
        self._end += 1
        if right:
            self._place += 1
            self.run += 1
            self._note()
            return True
        if self.run >= LONG:
            self._break, self._patience = self._place, SOON
        self._search()
        if not self.run and self._patience:
            self._resume()
        return False

    def propose(self, most: int) -> list[int]:
        """The next tokens, if they are those that came the last time; `most` of them, or none."""
        if not self.run:
            return []
        told = list(self._tokens[self._place : min(self._place + most, self._end)])
        period = self._end - self._place
        while len(told) < most:  # what is repeated reaches to the end: it goes round
            told.append(told[-period])
        return told

    def _search(self) -> None:
        """Where the last tokens stood before; from now on they are found here."""
        tokens, table, end = self._tokens, self._table, self._end
        self._place = self.run = 0
        for length in LENGTHS:
            if end < length:
                continue
            last = tokens[end - length : end]
            slot = self._slot(last)
            place, table[slot] = table[slot], end
            if not self.run and 0 < place < end and tokens[place - length : place] == last:
                self._place, self.run = place, self._agreement(place, length)

    def _resume(self) -> None:
        """Go on near the break: behind the same token, or, right after it, as if one token stood for another."""
        near = self._tokens[self._break : self._break + NEARBY]
        if (token := self._tokens[self._end - 1]) in near:
            self._place, self.run = self._break + near.index(token) + 1, 1
        elif self._patience == SOON:
            self._place, self.run = self._break + 1, 1
        if self._place >= self._end:
            self.run = 0
        self._patience -= 1

    def _agreement(self, place: int, known: int) -> int:
        tokens, end = self._tokens, self._end
        most = min(place, FURTHEST)
        while known < most and tokens[place - 1 - known] == tokens[end - 1 - known]:
            known += 1
        return known

    def _note(self) -> None:
        """Let the last tokens be found from now on."""
        for length in LENGTHS:
            if self._end >= length:
                self._table[self._slot(self._tokens[self._end - length : self._end])] = self._end

    def _slot(self, gram: Sequence[int]) -> int:
        slot = 0
        for token in gram:
            slot = (slot + token + 1) * FACTOR & WIDE
        return slot >> self._shift

    def _index(self) -> None:
        """Note all but the last n-grams of what is there, at once."""
        tokens = np.array(self._tokens, np.uint64)
        table = np.frombuffer(self._table, np.int32)
        for length in LENGTHS:
            count = self._end - length  # of n-grams before the last one
            if count > 0:
                slots: NDArray[Any] = np.zeros(count, np.uint64)
                for place in range(length):
                    slots = (slots + tokens[place : place + count] + 1) * FACTOR & WIDE
                table[slots >> self._shift] = np.arange(length, length + count, dtype=np.int32)  # the last one stays
