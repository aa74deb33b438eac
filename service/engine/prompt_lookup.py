"""Drafts tokens from the prompt and the answer themselves: prompt lookup decoding.

Saxena 2023; Yang et al. 2023, arXiv:2304.04487.  An answer that edits, quotes or summarises repeats long passages.
Where the last few tokens occurred before, the tokens after that occurrence are the draft.  The length of the match says
how likely it is right.  Where a long match breaks, a word may have been changed, inserted or left out: the lookup
resumes nearby.

N-grams are found by a hash in a table of fixed size, which keeps the newest of those that share a slot.  A token costs
about a microsecond, a sequence at most a quarter of a MiB.  What is found is compared, so a match is always right.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

NGRAM_LENGTHS = (3, 2)  # of n-grams, the longer first
MIN_TABLE_BITS, MAX_TABLE_BITS = 11, 16  # binary logarithms of the number of slots of a table
MAX_COMPARED = 16  # tokens compared at most to measure the length of a match
LONG_RUN = 4  # tokens of a match that may be resumed after a break,
RESUME_WINDOW, RESUME_TRIES = 8, 4  # within so many tokens of the break, for so many tokens
HASH_FACTOR, HASH_MASK = (
    3_266_489_917,
    (1 << 32) - 1,
)  # a prime of xxHash; not the golden ratio's, whose square is itself plus 1


class PromptLookup:
    """Follows `tokens`, to which the caller only appends."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._read_count = tokens, len(tokens)
        bits = min(max((4 * self._read_count).bit_length(), MIN_TABLE_BITS), MAX_TABLE_BITS)
        self._shift, self._table = 32 - bits, array("i", bytes(4 << bits))  # the end of an n-gram; 0: none
        self._match = self.run = 0
        self._break = self._resume_tries = 0  # where a long match broke, and for how many more tokens it may be resumed
        self._index_all()
        self._find_match()

    @property
    def unread_count(self) -> int:
        """Tokens that were appended and not read yet."""
        return len(self._tokens) - self._read_count

    def read_token(self) -> bool:
        """Read the next token.  Returns whether it is the one that was drafted.

        Afterwards `run` is the length of the match before the next draft; 0: there is none.
        """
        hit = self.run > 0 and self._tokens[self._read_count] == self._tokens[self._match]
        self._read_count += 1
        if hit:
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
        """A draft of `most` tokens, or none."""
        if not self.run:
            return []
        draft = list(self._tokens[self._match : min(self._match + most, self._read_count)])
        period = self._read_count - self._match
        while len(draft) < most:  # the repeated passage reaches the end: it repeats itself
            draft.append(draft[-period])
        return draft

    def _find_match(self) -> None:
        """Find where the last n-gram occurred before, and index it."""
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
        """Continue near the break: after the same token, or, right after the break, as if one token was replaced."""
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
        """Add the last n-grams to the table."""
        for length in NGRAM_LENGTHS:
            if self._read_count >= length:
                self._table[self._slot(self._tokens[self._read_count - length : self._read_count])] = self._read_count

    def _slot(self, gram: Sequence[int]) -> int:
        slot = 0
        for token in gram:
            slot = (slot + token + 1) * HASH_FACTOR & HASH_MASK
        return slot >> self._shift

    def _index_all(self) -> None:
        """Add all but the last n-grams to the table at once."""
        tokens = np.array(self._tokens, np.uint64)
        table = np.frombuffer(self._table, np.int32)
        for length in NGRAM_LENGTHS:
            count = self._read_count - length  # of n-grams before the last one
            if count > 0:
                slots: NDArray[Any] = np.zeros(count, np.uint64)
                for place in range(length):
                    slots = (slots + tokens[place : place + count] + 1) * HASH_FACTOR & HASH_MASK
                table[slots >> self._shift] = np.arange(length, length + count, dtype=np.int32)  # the last one stays
