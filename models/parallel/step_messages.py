"""What the first tells the others to do next, as numbers.

Knows nothing of how it is sent.  The one idea: a step is described completely by the integers of its `Rows`, which are
few beside what it computes; so the others need no scheduler, no requests, and no books.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from itertools import accumulate, pairwise

from ..executors.contract import StepInput

MessageNumbers = list[int]


class StepCommand(IntEnum):
    """The first word of what is told; the second is the number of a model."""

    LOAD = 0  # read a share of it: `Asked`
    READY = 1  # say whether that went well
    STEP = 2  # compute rows
    COPY = 3  # blocks
    DROP = 4  # forget it


@dataclass(frozen=True)
class ShareRequest:
    """A model to be read, with a cache of `blocks` of `block_size` tokens; `dtype` is torch's word.

    `root` and `known` are what its source may reach (models.checkpoint.source_policy).  `in_place`: what attends
    reads blocks where they are (models.network.varlen)."""

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
    def decode(cls, words: MessageNumbers) -> "ShareRequest":
        return cls(**json.loads(bytes(words)))


def encode_step(rows: StepInput) -> MessageNumbers:
    """Adapters and what another sequence has read are not told: neither is computed in shares."""
    assert not rows.adapters
    assert not rows.sources
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


def decode_step(words: MessageNumbers) -> StepInput:
    sizes, rest = words[:6], words[6:]
    bounds = list(accumulate(sizes, initial=0))
    tokens, positions, starts, wanted, segments, lengths = (rest[a:b] for a, b in pairwise(bounds))
    blocks = rest[bounds[-1] :]
    tables = [blocks[a:b] for a, b in pairwise(accumulate(lengths, initial=0))]
    return StepInput(tokens, positions, starts, tables, wanted, segments or None)


def decode_pairs(words: MessageNumbers) -> list[tuple[int, int]]:
    return list(zip(words[::2], words[1::2], strict=True))


def encode_pairs(blocks: Sequence[tuple[int, int]]) -> MessageNumbers:
    return [block for pair in blocks for block in pair]
