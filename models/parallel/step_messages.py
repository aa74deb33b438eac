"""Messages from the first process to the others, as lists of integers. The integers of a StepInput describe a step
completely, so the others need no scheduler and no requests."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from itertools import accumulate, pairwise

from ..executors.contract import StepInput

MessageNumbers = list[int]


class StepCommand(IntEnum):
    """The first number of a message, the command; the second is the number of a model."""

    LOAD = 0  # load a share of it: `ShareRequest`
    READY = 1  # report whether loading succeeded
    STEP = 2  # compute rows
    COPY = 3  # copy cache blocks
    DROP = 4  # unload it


@dataclass(frozen=True)
class ShareRequest:
    """A model to be loaded, with a cache of `blocks` of `block_size` tokens; `dtype` is torch's name.

    `root` and `known` are its source policy (models.checkpoint.source_policy). `in_place`: attention reads cache blocks
    in place (models.network.varlen).
    """

    source: str
    root: str
    known: Sequence[str]
    dtype: str
    blocks: int
    block_size: int
    in_place: bool

    def encode(self) -> MessageNumbers:
        return list(json.dumps(asdict(self)).encode())

    @classmethod
    def decode(cls, numbers: MessageNumbers) -> "ShareRequest":
        return cls(**json.loads(bytes(numbers)))


def encode_step(rows: StepInput) -> MessageNumbers:
    """The integers of a step. Adapters, encoder-decoders and blocks of windowed layers are not supported in shares, so
    they are not sent."""
    assert not rows.adapters
    assert not rows.sources
    assert not rows.hidden
    assert rows.window_tables is None
    segments = rows.segments or []
    lists = (
        rows.tokens,
        rows.positions,
        rows.starts,
        rows.output_rows,
        segments,
        [len(table) for table in rows.block_tables],
    )
    blocks = [block for table in rows.block_tables for block in table]
    sizes = [len(each) for each in lists]
    return [*sizes, *(number for each in lists for number in each), *blocks]


def decode_step(numbers: MessageNumbers) -> StepInput:
    sizes, rest = numbers[:6], numbers[6:]
    bounds = list(accumulate(sizes, initial=0))
    tokens, positions, starts, output_rows, segments, lengths = (rest[a:b] for a, b in pairwise(bounds))
    blocks = rest[bounds[-1] :]
    tables = [blocks[a:b] for a, b in pairwise(accumulate(lengths, initial=0))]
    return StepInput(tokens, positions, starts, tables, output_rows, segments or None)


def decode_pairs(numbers: MessageNumbers) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def encode_pairs(blocks: Sequence[tuple[int, int]]) -> MessageNumbers:
    return [block for pair in blocks for block in pair]
