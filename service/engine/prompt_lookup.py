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

NGRAM_LENGTHS = (3, 2)  # of n-grams, the better ones first
MIN_TABLE_BITS, MAX_TABLE_BITS = 11, 16  # powers of two: slots of a table
MAX_COMPARED = 16  # tokens compared to find out how far two places agree
LONG_RUN = 4  # tokens of an agreement that may go on after a break,
RESUME_WINDOW, RESUME_TRIES = 8, 4  # so many tokens further, after so many others
HASH_FACTOR, HASH_MASK = (
    3_266_489_917,
    (1 << 32) - 1,
)  # a prime of xxHash's; not the golden ratio's, whose square is itself plus 1


class PromptLookup:
    """Follows `tokens`, which somebody else appends to and never takes any away from."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._read_count = tokens, len(tokens)
        bits = min(max((4 * self._read_count).bit_length(), MIN_TABLE_BITS), MAX_TABLE_BITS)
        self._shift, self._table = 32 - bits, array("i", bytes(4 << bits))  # the end of an n-gram; 0: none
        self._match = self.run = 0
        self._break = self._resume_tries = (
            0  # where a long agreement broke, and how many more tokens it may be taken up after
        )
        self._index_all()
        self._find_match()

    @property
    def unread_count(self) -> int:
        """Tokens that were appended and not read yet."""
        return len(self._tokens) - self._read_count

    def read_token(self) -> bool:
        """Take in the next token; whether it is what was foretold.

        Afterwards `run` is how many of the last tokens stood before what is foretold now; 0: nothing is.
        """
        right = self.run > 0 and self._tokens[self._read_count] == self._tokens[self._match]
        self._read_count += 1
        if right:
            self._match += 1
            self.run += 1
            self._index_last()
            return True
        if self.run >= LONG_RUN:
            self._break, self._resume_tries = self._match, RESUME_TRIES
        self._find_match()
        if not self.run and self._resume_tries:
            self._resume()
        return False

    def propose(self, most: int) -> list[int]:
        """The next tokens, if they are those that came the last time; `most` of them, or none."""
        if not self.run:
            return []
        told = list(self._tokens[self._match : min(self._match + most, self._read_count)])
        period = self._read_count - self._match
        while len(told) < most:  # what is repeated reaches to the end: it goes round
            told.append(told[-period])
        return told

    def _find_match(self) -> None:
        """Where the last tokens stood before; from now on they are found here."""
        tokens, table, end = self._tokens, self._table, self._read_count
        self._match = self.run = 0
        for length in NGRAM_LENGTHS:
            if end < length:
                continue
            last = tokens[end - length : end]
            slot = self._slot(last)
            place, table[slot] = table[slot], end
            if not self.run and 0 < place < end and tokens[place - length : place] == last:
                self._match, self.run = place, self._agreement_length(place, length)

    def _resume(self) -> None:
        """Go on near the break: behind the same token, or, right after it, as if one token stood for another."""
        near = self._tokens[self._break : self._break + RESUME_WINDOW]
        if (token := self._tokens[self._read_count - 1]) in near:
            self._match, self.run = self._break + near.index(token) + 1, 1
        elif self._resume_tries == RESUME_TRIES:
            self._match, self.run = self._break + 1, 1
        if self._match >= self._read_count:
            self.run = 0
        self._resume_tries -= 1

    def _agreement_length(self, place: int, known: int) -> int:
        tokens, end = self._tokens, self._read_count
        most = min(place, MAX_COMPARED)
        while known < most and tokens[place - 1 - known] == tokens[end - 1 - known]:
            known += 1
        return known

    def _index_last(self) -> None:
        """Let the last tokens be found from now on."""
        for length in NGRAM_LENGTHS:
            if self._read_count >= length:
                self._table[self._slot(self._tokens[self._read_count - length : self._read_count])] = self._read_count

    def _slot(self, gram: Sequence[int]) -> int:
        slot = 0
        for token in gram:
            slot = (slot + token + 1) * HASH_FACTOR & HASH_MASK
        return slot >> self._shift

    def _index_all(self) -> None:
        """Note all but the last n-grams of what is there, at once."""
        tokens = np.array(self._tokens, np.uint64)
        table = np.frombuffer(self._table, np.int32)
        for length in NGRAM_LENGTHS:
            count = self._read_count - length  # of n-grams before the last one
            if count > 0:
                slots: NDArray[Any] = np.zeros(count, np.uint64)
                for place in range(length):
                    slots = (slots + tokens[place : place + count] + 1) * HASH_FACTOR & HASH_MASK
                table[slots >> self._shift] = np.arange(length, length + count, dtype=np.int32)  # the last one stays
