"""What the first tells the others to do next, as numbers.

Knows nothing of how it is sent.  The one idea: a step is described completely by the integers of its `Rows`, which are
few beside what it computes; so the others need no scheduler, no requests, and no books.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from itertools import accumulate, pairwise

from ..executors.contract import Rows

Words = list[int]


class Ask(IntEnum):
    """The first word of what is told; the second is the number of a model."""

    LOAD = 0  # read a share of it: `Asked`
    READY = 1  # say whether that went well
    STEP = 2  # compute rows
    COPY = 3  # blocks
    DROP = 4  # forget it


@dataclass(frozen=True)
class Asked:
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

    def words(self) -> Words:
        return list(json.dumps(asdict(self)).encode())

    @classmethod
    def of(cls, words: Words) -> "Asked":
        return cls(**json.loads(bytes(words)))


def packed(rows: Rows) -> Words:
    """Adapters and what another sequence has read are not told: neither is computed in shares."""
    assert not rows.adapters
    assert not rows.sources
    segments = rows.segments or []
    lists = (rows.tokens, rows.positions, rows.starts, rows.wanted, segments, [len(table) for table in rows.tables])
    blocks = [block for table in rows.tables for block in table]
    sizes = [len(each) for each in lists]
    return [*sizes, *(number for each in lists for number in each), *blocks]


def unpacked(words: Words) -> Rows:
    sizes, rest = words[:6], words[6:]
    bounds = list(accumulate(sizes, initial=0))
    tokens, positions, starts, wanted, segments, lengths = (rest[a:b] for a, b in pairwise(bounds))
    blocks = rest[bounds[-1] :]
    tables = [blocks[a:b] for a, b in pairwise(accumulate(lengths, initial=0))]
    return Rows(tokens, positions, starts, tables, wanted, segments or None)


def pairs(words: Words) -> list[tuple[int, int]]:
    return list(zip(words[::2], words[1::2], strict=True))


def flat(blocks: Sequence[tuple[int, int]]) -> Words:
    return [block for pair in blocks for block in pair]
