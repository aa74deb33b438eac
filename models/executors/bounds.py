"""Checks the numbers of a step before an executor indexes memory with them.

A token, position or block number may come from an untrusted file or request, so each is compared with the size of what
it indexes, whatever was checked before.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from ..core.errors import StepInputError
from ..network.model_config import ModelConfig
from .contract import StateUse, StepInput

INT32_LIMIT = 2**31  # int32 values are below it
TABLE_POSITIONS = (
    "learned",
    "sinusoidal",
    "sines-cosines",
    "closed-sines-cosines",
)  # kinds of positions that are read from a table

Integers = NDArray[np.int32]


@dataclass(frozen=True)
class StepArrays:
    """The numbers of a StepInput, checked. `blocks` are the blocks of all tables; those of sequence n begin at
    `table_starts[n]`."""

    tokens: Integers  # [T]
    positions: Integers  # [T]
    segments: Integers | None  # [T]
    starts: Integers  # [N + 1]
    blocks: Integers
    table_starts: Integers  # [N + 1]
    output_rows: Integers
    states: Integers | None = None  # [N, 4] the numbers of each StateUse
    window_blocks: Integers | None = None  # of all window tables; those of sequence n begin at `window_starts[n]`
    window_starts: Integers | None = None  # [N + 1]


@dataclass(frozen=True)
class Bounds:
    """The counts of tokens, positions, segments, cache blocks and state slots; each is numbered from 0.

    `positions` is 0 if the network has no table of positions, `segments` 0 if it has no segment embeddings,
    `block_count` 0 without a cache, `state_count` 0 without a cache or without recurrent layers. `keeps_states`:
    recurrent layers with a cache. `window_blocks`: cache blocks of layers with a window of `window` tokens, numbered
    from `block_count` on; 0: they have none of their own.
    """

    tokens: int
    positions: int
    segments: int
    block_count: int
    block_size: int
    hides_rows: bool = False
    keeps_states: bool = False
    state_count: int = 0
    window_blocks: int = 0
    window: int = 0

    @classmethod
    def of(
        cls, config: ModelConfig, block_count: int, block_size: int, state_count: int = 0, window_blocks: int = 0
    ) -> "Bounds":
        assert not window_blocks or (block_count and config.window), "no layer can use the blocks of windowed layers"
        positions = config.max_positions if config.position in TABLE_POSITIONS else 0
        keeps_states = config.is_recurrent and block_count > 0
        return cls(
            config.vocab_size,
            positions,
            config.segments,
            block_count,
            block_size,
            config.hides_rows,
            keeps_states,
            state_count if keeps_states else 0,
            window_blocks,
            config.window,
        )

    def within(self, other: "Bounds") -> "Bounds":
        """With the positions that another stack, which reads the same texts, has as well."""
        tables = [count for count in (self.positions, other.positions) if count]
        return replace(self, positions=min(tables, default=0))

    def check(self, rows: StepInput, attached: Container[int]) -> StepArrays:
        """StepInputError for the first number that is out of range; `attached` are the numbers of the attached
        adapters."""
        count, sequences = len(rows.tokens), len(rows.starts) - 1
        check_length("positions", len(rows.positions), count)
        check_length("block_tables", len(rows.block_tables), sequences)
        starts = int32_array("starts", rows.starts)
        check_starts(starts, count)
        tokens = int32_array("tokens", rows.tokens)
        check_range("tokens", tokens, self.tokens)
        segments = None
        if rows.segments is not None and self.segments:
            check_length("segments", len(rows.segments), count)
            segments = int32_array("segments", rows.segments)
            check_range("segments", segments, self.segments)
        if rows.adapters is not None:
            check_length("adapters", len(rows.adapters), sequences)
            for number in {*rows.adapters} - {0}:
                if number not in attached:
                    raise StepInputError(f"adapters: {number} is not attached")
        if rows.sources is not None:
            check_length("sources", len(rows.sources), sequences)
            check_range("sources", int32_array("sources", list(chain.from_iterable(rows.sources))), self.tokens)
        if rows.hidden is not None:
            self._check_hidden(rows.hidden, starts)
        outputs = int32_array("output_rows", rows.output_rows)
        check_range("output_rows", outputs, count)
        check_ascending("output_rows", outputs)
        blocks, table_starts = np.empty(0, np.int32), np.zeros(sequences + 1, np.int32)
        if self.block_count:
            blocks = int32_array("block_tables", list(chain.from_iterable(rows.block_tables)))
            check_range("block_tables", blocks, self.block_count)
            table_starts = int32_array("block_tables", list(accumulate(map(len, rows.block_tables), initial=0)))
        positions = int32_array("positions", rows.positions)
        self._check_positions(positions, starts, table_starts)
        firsts, lasts = positions[starts[:-1]], positions[starts[1:] - 1]
        states = self._check_states(rows.states, firsts, starts[1:] - starts[:-1])
        windows = self._check_windows(rows.window_tables, firsts, lasts)
        return StepArrays(tokens, positions, segments, starts, blocks, table_starts, outputs, states, *windows)

    def _check_windows(
        self, tables: Sequence[Sequence[int]] | None, firsts: Integers, lasts: Integers
    ) -> tuple[Integers, Integers] | tuple[None, None]:
        """The blocks of windowed layers, and where those of each sequence begin. They must hold all tokens that a row
        sees; `firsts` and `lasts` [N] are the positions of first and last rows."""
        if tables is None and not self.window_blocks:
            return None, None
        if tables is None or not self.window_blocks:
            right = "be there for windowed layers with their own blocks" if tables is None else "be None for this cache"
            raise StepInputError(f"window_tables: they should {right}")
        check_length("window_tables", len(tables), len(firsts))
        blocks = int32_array("window_tables", list(chain.from_iterable(tables)))
        check_range("window_tables", blocks, self.window_blocks, self.block_count)
        ends = lasts.astype(np.int64) // self.block_size + 1  # [N] blocks of all tokens
        least = ends - np.maximum(firsts.astype(np.int64) - self.window + 1, 0) // self.block_size
        counts = np.fromiter(map(len, tables), np.int64, len(tables))
        if (wrong := (counts < least) | (counts > ends)).any():
            n = int(wrong.argmax())
            raise StepInputError(
                f"window_tables[{n}] has {counts[n]} blocks, which should be at least {least[n]} and at most {ends[n]}"
            )
        return blocks, int32_array("window_tables", list(accumulate(map(len, tables), initial=0)))

    def _check_states(self, uses: Sequence[StateUse] | None, firsts: Integers, lengths: Integers) -> Integers | None:
        """Slots that are written must be distinct and not read in the step. `firsts` [N] are the positions of first
        rows, `lengths` [N] the rows of the sequences."""
        if uses is None and not self.keeps_states:
            return None
        if uses is None or not self.keeps_states:
            right = "be there for recurrent layers with a cache" if uses is None else "be None for this network"
            raise StepInputError(f"states: they should {right}")
        check_length("states", len(uses), len(firsts))
        for n, use in enumerate(uses):
            check_length(f"states[{n}]", len(use), len(StateUse._fields))
        flat = int32_array("states", list(chain.from_iterable(uses)))
        table = flat.reshape(-1, len(StateUse._fields))  # [N, 4]
        read, write, border_rows, border = (np.ascontiguousarray(column) for column in table.T)
        check_range("states.read", read[read != -1], self.state_count)
        check_range("states.write", write, self.state_count)
        check_range("states.border", border[border != -1], self.state_count)
        for name, wrong, right in (
            ("read", (read == -1) != (firsts == 0), "-1 for a sequence that begins, and only for such a one"),
            ("border_rows", (border_rows < 0) | (border_rows > lengths), "at most the rows of the sequence"),
            ("border", (border == -1) != (border_rows == 0), "-1 without border_rows, and only then"),
        ):
            if wrong.any():
                n = int(wrong.argmax())
                raise StepInputError(f"states[{n}].{name} is {getattr(uses[n], name)}, which should be {right}")
        written = np.concatenate((write, border[border != -1]))
        slots, counts = np.unique(written, return_counts=True)
        if (twice := counts > 1).any():
            raise StepInputError(f"states: slot {slots[twice.argmax()]} is written twice")
        if (clash := np.isin(slots, read)).any():
            raise StepInputError(f"states: slot {slots[clash.argmax()]} is read and written")
        return table

    def _check_hidden(self, hidden: Sequence[int], starts: Integers) -> None:
        """Each sequence must have a row that is not hidden, and the network must be able to hide rows."""
        if not self.hides_rows:
            raise StepInputError("hidden: this network has no rows that no row attends to")
        check_length("hidden", len(hidden), len(starts) - 1)
        for count, length in zip(hidden, (starts[1:] - starts[:-1]).tolist(), strict=True):
            if not 0 <= count < length:
                raise StepInputError(f"hidden: {count} of {length} rows, which should be fewer")

    def _check_positions(self, positions: Integers, starts: Integers, table_starts: Integers) -> None:
        """Positions must be consecutive in each sequence and within its blocks; without a cache they start at 0."""
        check_range("positions", positions, self.positions or INT32_LIMIT)
        gaps = positions[1:] - positions[:-1] != 1
        gaps[starts[1:-1] - 1] = False  # where the next sequence begins
        if gaps.any():
            row = int(gaps.argmax())
            raise StepInputError(f"positions[{row + 1}] is {positions[row + 1]}, which should be {positions[row] + 1}")
        if self.block_count:
            last = positions[starts[1:] - 1]
            capacity = (table_starts[1:] - table_starts[:-1]).astype(np.int64) * self.block_size
            if (wrong := last >= capacity).any():
                n = int(wrong.argmax())
                raise StepInputError(f"positions: sequence {n} has position {last[n]}, its blocks hold {capacity[n]}")
        elif (first := positions[starts[:-1]]).any():
            n = int((first != 0).argmax())
            raise StepInputError(f"positions: sequence {n} begins at {first[n]}, which should be 0 without a cache")

    def check_copies(self, pairs: Sequence[tuple[int, int]]) -> None:
        """StepInputError for a block that is not in the cache, and for a copy from other layers to windowed ones, or
        back."""
        blocks = int32_array("copies", list(chain.from_iterable(pairs)))
        check_range("copies", blocks, self.block_count + self.window_blocks)
        for pair in pairs:
            if len({block < self.block_count for block in pair}) > 1:
                raise StepInputError(f"copies: {pair[0]} and {pair[1]} are blocks of different layers")


def int32_array(name: str, values: Sequence[int]) -> Integers:
    try:
        return np.fromiter(values, np.int32, len(values))
    except OverflowError:
        raise StepInputError(f"{name}: {first_overflow(values)} is out of the range of 32 bits") from None


def first_overflow(values: Iterable[int]) -> int:
    """The first value that does not fit an int32."""
    return next(value for value in values if not -INT32_LIMIT <= value < INT32_LIMIT)


def check_length(name: str, length: int, right: int) -> None:
    if length != right:
        raise StepInputError(f"{name}: there are {length}, which should be {right}")


def check_range(name: str, values: Integers, count: int, first: int = 0) -> None:
    """Each value must be one of the `count` numbers from `first` on. As unsigned differences the smaller ones are the
    largest, so one maximum is enough."""
    unsigned = values.view(np.uint32) - np.uint32(first)  # modulo 2**32
    if values.size and int(unsigned.max()) >= count:
        row = int((unsigned >= count).argmax())
        raise StepInputError(
            f"{name}[{row}] is {values[row]}, which should be at least {first} and less than {first + count}"
        )


def check_ascending(name: str, values: Integers) -> None:
    if (wrong := values[1:] <= values[:-1]).any():
        row = int(wrong.argmax())
        raise StepInputError(f"{name}[{row + 1}] is {values[row + 1]}, which should be more than {values[row]}")


def check_starts(starts: Integers, count: int) -> None:
    """Starts must ascend from 0 to `count`: there is at least one sequence and none is empty."""
    if len(starts) < 2:
        raise StepInputError("starts: there is no sequence")
    if starts[0] != 0 or starts[-1] != count:
        raise StepInputError(f"starts: they are from {starts[0]} to {starts[-1]}, which should be from 0 to {count}")
    check_ascending("starts", starts)
