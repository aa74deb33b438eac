"""Keys and values: of past tokens, in blocks, and of texts that others are written from, in rectangles.

Which block belongs to whom is decided elsewhere.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .model_config import ModelConfig


class PagedCache:
    """Storage for `count` blocks of `size` tokens, per layer one tensor of keys and one of values.

    Inside a block the heads come first, so that what is gathered for a head lies in one piece: products want that.
    With `in_place` the tokens do, as the kernel that reads blocks where they are wants it (models.network.varlen).
    It starts as zeros and stays finite: what a mask hides is still multiplied, and 0 * NaN is NaN.
    """

    is_contiguous = False  # whether the n-th block is all of the n-th sequence, and read where it lies

    def __init__(self, config: ModelConfig, count: int, size: int, like: Tensor, in_place: bool = False) -> None:
        """Numbers are kept as those of `like`, and where it is."""
        self.count, self.size, self.heads, self.width = count, size, config.kv_heads, config.head_width
        self.in_place = in_place
        inner = (size, config.kv_heads) if in_place else (config.kv_heads, size)
        shape = (count, *inner, config.head_width)
        self.keys = [_zeros(shape, like) for _ in range(config.depth)]  # [count, KV, size, D] or [count, size, KV, D]
        self.values = [_zeros(shape, like) for _ in range(config.depth)]
        self._gathered = [like.new_empty(0) for _ in range(2)]

    def storage_rows(self, slots: Tensor) -> Tensor:
        """[T * KV] rows of D numbers in which the heads of the tokens at `slots` [T] are stored."""
        heads = torch.arange(self.heads, device=slots.device)
        if self.in_place:
            return (slots[:, None] * self.heads + heads).flatten()
        block, offset = slots // self.size, slots % self.size
        return ((block[:, None] * self.heads + heads) * self.size + offset[:, None]).flatten()

    def block_pieces(self, blocks: Tensor) -> Tensor:
        """[N, KV, B] pieces of `size` rows that hold [N, B] blocks, head by head."""
        return blocks[:, None] * self.heads + torch.arange(self.heads, device=blocks.device)[:, None]

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Store [T, KV, D] keys and values of one layer at `places` [T * KV]."""
        for storage, new in ((self.keys[layer], key), (self.values[layer], value)):
            storage.view(-1, self.width).index_copy_(0, places, new.reshape(-1, self.width))

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Of each pair the first block to the second, in all layers, one after the other."""
        for storage in (*self.keys, *self.values):
            for source, target in blocks:
                storage[target] = storage[source]

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero whole blocks in all layers."""
        for storage in (*self.keys, *self.values):
            storage[list(blocks)] = 0

    def are_finite(self, places: Tensor) -> Tensor:
        """[T] whether what was written at `places` is finite: what was not in an earlier layer is not in the last."""
        rows = (self.keys[-1].view(-1, self.width)[places], self.values[-1].view(-1, self.width)[places])
        sums = rows[0].sum(dim=1) + rows[1].sum(dim=1)
        return sums.view(-1, self.heads).isfinite().all(dim=1)

    def read(self, layer: int, pieces: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of [N, KV, B] pieces as [N, KV, B * size, D], good until the next read.

        Gathered into memory that is kept: fresh pages would cost more than the copy.
        """
        kept = (self.keys[layer], self.values[layer])
        keys, values = (self._gather(i, storage, pieces) for i, storage in enumerate(kept))
        return keys, values

    def _gather(self, which: int, storage: Tensor, pieces: Tensor) -> Tensor:
        rows = storage.view(self.count * self.heads, -1)  # a piece is one contiguous copy
        wanted = pieces.numel() * rows.size(1)
        if self._gathered[which].numel() < wanted:
            self._gathered[which] = storage.new_empty(wanted * 5 // 4)
        out = self._gathered[which][:wanted].view(pieces.numel(), -1)
        torch.index_select(rows, 0, pieces.flatten(), out=out)
        return out.view(*pieces.shape[:2], -1, self.width)


class ContiguousCache(PagedCache):
    """A block for each of `count` sequences, in order, which all attend together over their blocks where they lie.

    `writes` counts the steps that were written to it, for those who would write to it again.
    """

    is_contiguous = True

    def __init__(self, config: ModelConfig, count: int, size: int, like: Tensor) -> None:
        super().__init__(config, count, size, like)
        self.config, self.step_count = config, 0

    def read(self, layer: int, pieces: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all sequences, [N, KV, size, D]."""
        assert len(pieces) == self.count
        return self.keys[layer], self.values[layer]

    def select_rows(self, rows: Tensor) -> "ContiguousCache":
        """Of the sequences at [M] rows, in this order."""
        out = copy.copy(self)
        out.count, out.step_count = len(rows), 0
        out.keys, out.values = ([kept.index_select(0, rows) for kept in kind] for kind in (self.keys, self.values))
        return out

    @classmethod
    def concatenate(cls, caches: Sequence["ContiguousCache"], size: int) -> "ContiguousCache":
        """Of all their sequences, one cache behind the other, with room for `size` tokens each, or more."""
        size = max(size, *(cache.size for cache in caches))
        out, first = cls(caches[0].config, sum(cache.count for cache in caches), size, caches[0].keys[0]), 0
        for cache in caches:
            for mine, theirs in zip((*out.keys, *out.values), (*cache.keys, *cache.values), strict=True):
                mine[first : first + cache.count, :, : cache.size] = theirs
            first += cache.count
        return out


@dataclass(frozen=True)
class SourceMemory:
    """Keys and values of the states of M texts that were read, layer by layer: what those who write from them look at.

    The one idea: texts of like length stand in one rectangle, padded to its longest by repeating a first row, and
    rectangles lie end to end.  So they are laid out once and read in place, however many ask for the same text.
    """

    lengths: tuple[int, ...]  # [M]
    members: tuple[tuple[int, ...], ...]  # the texts of each rectangle, in its order
    layers: tuple[tuple[Tensor, Tensor], ...]  # keys and values of each, [R, KV, D] rows of all rectangles

    @classmethod
    def of(
        cls, layers: Iterable[tuple[Tensor, Tensor]], spans: Sequence[tuple[int, int]], members: Sequence[Sequence[int]]
    ) -> "SourceMemory":
        """Of packed rows, of which `spans` [M] are (first, count) of each text."""
        lengths = tuple(count for _, count in spans)
        rows = [
            spans[text][0] + (row if row < lengths[text] else 0)
            for some in members
            for text in some
            for row in range(max(lengths[text] for text in some))
        ]
        shape = tuple(map(tuple, members))
        kept = tuple(layers)
        device = kept[0][0].device if kept else torch.device("cpu")
        index = torch.tensor(rows, dtype=torch.int64, device=device)
        return cls(
            lengths, shape, tuple((key.index_select(0, index), value.index_select(0, index)) for key, value in kept)
        )

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """[M] in which rows each text lies: (first, count)."""
        found, first = [(0, 0)] * len(self.lengths), 0
        for some in self.members:
            longest = max(self.lengths[text] for text in some)
            for text in some:
                found[text] = (first, self.lengths[text])
                first += longest
        return found

    @property
    def row_count(self) -> int:
        return len(self.layers[0][0])


@dataclass(frozen=True)
class MemoryView:
    """One step's look at memories: which text each sequence is written from, numbered one memory behind the other.

    `asked` gets what every layer looks for, one after the other: [T, H, D] queries.
    """

    memories: Sequence[SourceMemory]
    sources: Sequence[int]  # [N]
    queries: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class CacheView:
    """One step's window on the cache: where each new token goes, and which blocks each sequence reads."""

    cache: PagedCache
    storage_rows: Tensor  # [T * KV] where the keys and values of each row are stored; see PagedCache.places
    tables: Sequence[Sequence[int]] = ()  # [N] the blocks of each sequence, in order; none where Ragged has spans
    lengths: Sequence[int] = ()  # [N] tokens to read, the new ones included; the same


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros whose memory is only taken when it is first written, on a CPU."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = int(np.prod(shape)) * like.dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(like.dtype).view(shape)
