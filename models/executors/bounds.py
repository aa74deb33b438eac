"""The numbers of a step, checked before an executor indexes memory with them.

A token, a position or a block number may come from a stranger's file or request, so each of them is compared here with
the size of what it indexes, whatever was checked before.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from ..core.errors import RowsError
from ..network.model_config import ModelConfig
from .contract import Rows

MOST = 2**31  # what an int32 holds is below
TABLES = ("learned", "sinusoidal", "sines-cosines")  # positions that are looked up

Integers = NDArray[np.int32]


@dataclass(frozen=True)
class Arrays:
    """The numbers of Rows, within their bounds; `blocks` are those of all tables, that of sequence n from
    `table_starts[n]` on."""

    tokens: Integers  # [T]
    positions: Integers  # [T]
    segments: Integers | None  # [T]
    starts: Integers  # [N + 1]
    blocks: Integers
    table_starts: Integers  # [N + 1]
    wanted: Integers


@dataclass(frozen=True)
class Bounds:
    """How many tokens, positions, segments and cache blocks there are, numbered from 0.

    `positions` is 0 where no table of positions is read, `segments` where none of segments is, `block_count` without a
    cache.
    """

    tokens: int
    positions: int
    segments: int
    block_count: int
    block_size: int

    @classmethod
    def of(cls, config: ModelConfig, block_count: int, block_size: int) -> "Bounds":
        positions = config.max_positions if config.position in TABLES else 0
        return cls(config.vocab_size, positions, config.segments, block_count, block_size)

    def check(self, rows: Rows, attached: Container[int]) -> Arrays:
        """RowsError for the first number that is out of range; `attached` are the numbers of adapters."""
        count, sequences = len(rows.tokens), len(rows.starts) - 1
        equal("positions", len(rows.positions), count)
        equal("tables", len(rows.tables), sequences)
        starts = integers("starts", rows.starts)
        check_starts(starts, count)
        tokens = integers("tokens", rows.tokens)
        within("tokens", tokens, self.tokens)
        segments = None
        if rows.segments is not None and self.segments:
            equal("segments", len(rows.segments), count)
            segments = integers("segments", rows.segments)
            within("segments", segments, self.segments)
        if rows.adapters is not None:
            equal("adapters", len(rows.adapters), sequences)
            for number in {*rows.adapters} - {0}:
                if number not in attached:
                    raise RowsError(f"adapters: {number} is not attached")
        if rows.sources is not None:
            equal("sources", len(rows.sources), sequences)
            within("sources", integers("sources", list(chain.from_iterable(rows.sources))), self.tokens)
        wanted = integers("wanted", rows.wanted)
        within("wanted", wanted, count)
        ascending("wanted", wanted)
        blocks, table_starts = np.empty(0, np.int32), np.zeros(sequences + 1, np.int32)
        if self.block_count:
            blocks = integers("tables", list(chain.from_iterable(rows.tables)))
            within("tables", blocks, self.block_count)
            table_starts = integers("tables", list(accumulate(map(len, rows.tables), initial=0)))
        positions = integers("positions", rows.positions)
        self._check_positions(positions, starts, table_starts)
        return Arrays(tokens, positions, segments, starts, blocks, table_starts, wanted)

    def _check_positions(self, positions: Integers, starts: Integers, table_starts: Integers) -> None:
        """Consecutive in each sequence, within its blocks; from 0 on without a cache, where a sequence comes whole."""
        within("positions", positions, self.positions or MOST)
        gaps = positions[1:] - positions[:-1] != 1
        gaps[starts[1:-1] - 1] = False  # where the next sequence begins
        if gaps.any():
            row = int(gaps.argmax())
            raise RowsError(f"positions[{row + 1}] is {positions[row + 1]}, which should be {positions[row] + 1}")
        if self.block_count:
            last = positions[starts[1:] - 1]
            held = (table_starts[1:] - table_starts[:-1]).astype(np.int64) * self.block_size
            if (wrong := last >= held).any():
                n = int(wrong.argmax())
                raise RowsError(f"positions: sequence {n} has position {last[n]}, its blocks hold {held[n]}")
        elif (first := positions[starts[:-1]]).any():
            n = int((first != 0).argmax())
            raise RowsError(f"positions: sequence {n} begins at {first[n]}, which should be 0 without a cache")

    def check_copies(self, pairs: Sequence[tuple[int, int]]) -> None:
        """RowsError for a block that is not in the cache."""
        within("copies", integers("copies", list(chain.from_iterable(pairs))), self.block_count)


def integers(name: str, values: Sequence[int]) -> Integers:
    try:
        return np.fromiter(values, np.int32, len(values))
    except OverflowError:
        raise RowsError(f"{name}: {beyond(values)} is out of the range of 32 bits") from None


def beyond(values: Iterable[int]) -> int:
    """The first that an int32 does not hold."""
    return next(value for value in values if not -MOST <= value < MOST)


def equal(name: str, length: int, right: int) -> None:
    if length != right:
        raise RowsError(f"{name}: there are {length}, which should be {right}")


def within(name: str, values: Integers, count: int) -> None:
    """Each from 0 to `count` - 1.  As unsigned numbers the negative ones are the largest: one maximum is enough."""
    unsigned = values.view(np.uint32)
    if values.size and int(unsigned.max()) >= count:
        row = int((unsigned >= count).argmax())
        raise RowsError(f"{name}[{row}] is {values[row]}, which should be at least 0 and less than {count}")


def ascending(name: str, values: Integers) -> None:
    if (wrong := values[1:] <= values[:-1]).any():
        row = int(wrong.argmax())
        raise RowsError(f"{name}[{row + 1}] is {values[row + 1]}, which should be more than {values[row]}")


def check_starts(starts: Integers, count: int) -> None:
    """Ascending from 0 to `count`: no sequence is empty, and there is one."""
    if len(starts) < 2:
        raise RowsError("starts: there is no sequence")
    if starts[0] != 0 or starts[-1] != count:
        raise RowsError(f"starts: they are from {starts[0]} to {starts[-1]}, which should be from 0 to {count}")
    ascending("starts", starts)
