"""Caches of keys and values: of past tokens in blocks, and of source texts in rectangles."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .model_config import ModelConfig

ByHeads = Mapping[int, Tensor]  # by the number of key heads, which may differ from layer to layer


class BlockCounts(NamedTuple):
    """How many blocks a cache has for each layer; `windowed`: for each windowed layer, 0: as many as for others, and
    the same ones."""

    full: int
    windowed: int = 0


class PagedCache:
    """Storage for blocks of `size` tokens, with one tensor of keys and one of values for each layer.

    Inside a block the heads come first, so that a head's data is contiguous when it is gathered for a product. With
    `in_place` the tokens come first, as the kernel that reads blocks in place requires (models.network.varlen). It
    starts as zeros. Slots behind a sequence's last token are read and masked, unless `in_place`, and 0 * NaN is NaN: no
    numbers of other sequences may be there.
    """

    is_contiguous = False  # whether block n is the whole sequence n and is read in place

    def __init__(
        self, config: ModelConfig, counts: BlockCounts, size: int, like: Tensor, in_place: bool = False
    ) -> None:
        """Numbers have the type and device of `like`."""
        self.count, self.window_count = counts
        self.size, self.in_place = size, in_place
        self.own_blocks = frozenset(config.windowed_layers if counts.windowed else ())  # layers that have such blocks
        cached = {layer: config.of_layer(layer) for layer in config.cached_layers}
        self.heads = {layer: each.kv_heads for layer, each in cached.items()}
        self.head_counts = sorted({*self.heads.values()}) or [1]
        shapes = {
            layer: (
                counts.windowed if layer in self.own_blocks else counts.full,
                *((size, each.kv_heads) if in_place else (each.kv_heads, size)),
                each.head_width,
            )
            for layer, each in cached.items()
        }
        # [count, KV, size, D] or [count, size, KV, D]; nothing for a layer that has no keys of its own
        self.keys, self.values = (
            [zero_pages(shapes.get(layer, (0,)), like) for layer in range(config.depth)] for _ in range(2)
        )
        self.last_layer = max(cached, default=-1)
        self._gathered = [like.new_empty(0) for _ in range(2)]

    def storage_rows(self, slots: Tensor) -> ByHeads:
        """[T * KV] storage rows of D numbers for the heads of the tokens at `slots` [T]."""
        return {count: self._storage_rows(slots, count) for count in self.head_counts}

    def _storage_rows(self, slots: Tensor, count: int) -> Tensor:
        heads = torch.arange(count, device=slots.device)
        if self.in_place:
            return (slots[:, None] * count + heads).flatten()
        block, offset = slots // self.size, slots % self.size
        return ((block[:, None] * count + heads) * self.size + offset[:, None]).flatten()

    def block_pieces(self, blocks: Tensor) -> ByHeads:
        """[N, KV, B] pieces of `size` rows that hold [N, B] blocks, head by head."""
        return {
            count: blocks[:, None] * count + torch.arange(count, device=blocks.device)[:, None]
            for count in self.head_counts
        }

    def write(self, layer: int, places: ByHeads, key: Tensor, value: Tensor) -> None:
        """Store [T, KV, D] keys and values of one layer at the storage rows `places`."""
        rows = places[self.heads[layer]]
        for storage, new in ((self.keys[layer], key), (self.values[layer], value)):
            storage.view(-1, new.size(-1)).index_copy_(0, rows, new.reshape(-1, new.size(-1)))

    def copy(self, blocks: Sequence[tuple[int, int]], windowed: bool = False) -> None:
        """Copy blocks in all layers that have them, in order: of each pair, the first block to the second.
        `windowed`: the blocks of windowed layers."""
        for storage in self._storages(windowed):
            for source, target in blocks:
                storage[target] = storage[source]

    def clear(self, blocks: Sequence[int], windowed: bool = False) -> None:
        """Zero whole blocks in all layers that have them."""
        if blocks and (storages := self._storages(windowed)):
            index = torch.tensor(blocks, device=storages[0].device)
            for storage in storages:
                storage.index_fill_(0, index, 0)

    def _storages(self, windowed: bool) -> list[Tensor]:
        """The keys and values of the layers that have blocks of their own, or of the others that have keys."""
        layers = [layer for layer in range(len(self.keys)) if (layer in self.own_blocks) == windowed]
        return [kept[layer] for layer in layers for kept in (self.keys, self.values) if len(kept[layer])]

    def are_finite(self, places: ByHeads) -> Tensor:
        """[T] whether the numbers at `places` of the last layer with keys of its own are finite. NaN in an earlier
        layer reaches it; an infinite key that has no weight does not, and changes nothing."""
        if self.last_layer < 0:
            [rows] = places.values()
            return torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        heads = self.heads[self.last_layer]
        kept = (self.keys[self.last_layer], self.values[self.last_layer])
        keys, values = (storage.view(-1, storage.size(-1))[places[heads]] for storage in kept)
        sums = keys.sum(dim=1) + values.sum(dim=1)
        return sums.view(-1, heads).isfinite().all(dim=1)

    def read(self, layer: int, pieces: ByHeads) -> tuple[Tensor, Tensor]:
        """Keys and values of [N, KV, B] pieces as [N, KV, B * size, D], valid until the next read.

        They are gathered into reused memory: fresh pages would cost more than the copy.
        """
        heads = self.heads[layer]
        kept = (self.keys[layer], self.values[layer])
        keys, values = (self._gather(i, storage, pieces[heads]) for i, storage in enumerate(kept))
        return keys, values

    def _gather(self, which: int, storage: Tensor, pieces: Tensor) -> Tensor:
        rows = storage.view(len(storage) * pieces.size(1), -1)  # a piece is one contiguous copy
        needed = pieces.numel() * rows.size(1)
        if self._gathered[which].numel() < needed:
            self._gathered[which] = storage.new_empty(needed * 5 // 4)
        out = self._gathered[which][:needed].view(pieces.numel(), -1)
        torch.index_select(rows, 0, pieces.flatten(), out=out)
        return out.view(*pieces.shape[:2], -1, storage.size(-1))


class ContiguousCache(PagedCache):
    """A cache with one block for each of `count` sequences, in order, that all attend together without a gather.

    `step_count` counts the steps written to it, by which a state detects that another state has written to it since.
    """

    is_contiguous = True

    def __init__(self, config: ModelConfig, count: int, size: int, like: Tensor) -> None:
        super().__init__(config, BlockCounts(count), size, like)
        self.config, self.step_count = config, 0

    def read(self, layer: int, pieces: ByHeads) -> tuple[Tensor, Tensor]:
        """Keys and values of all sequences, [N, KV, size, D]."""
        assert len(pieces[self.heads[layer]]) == self.count
        return self.keys[layer], self.values[layer]

    def select_rows(self, rows: Tensor) -> "ContiguousCache":
        """The cache of the sequences at [M] rows, in this order."""
        out = copy.copy(self)
        out.count, out.step_count = len(rows), 0
        out.keys, out.values = ([kept.index_select(0, rows) for kept in kind] for kind in (self.keys, self.values))
        return out

    @classmethod
    def concatenate(cls, caches: Sequence["ContiguousCache"], size: int) -> "ContiguousCache":
        """The concatenated cache of all sequences, with room for at least `size` tokens each."""
        size = max(size, *(cache.size for cache in caches))
        out, first = cls(caches[0].config, sum(cache.count for cache in caches), size, caches[0].keys[0]), 0
        for cache in caches:
            for mine, theirs in zip((*out.keys, *out.values), (*cache.keys, *cache.values), strict=True):
                mine[first : first + cache.count, :, : cache.size] = theirs
            first += cache.count
        return out


@dataclass(frozen=True)
class SourceMemory:
    """Keys and values of the encoder states of M source texts, layer by layer, for cross-attention.

    Texts of similar length are in one rectangle, padded to its longest by repeating a first row; rectangles are
    concatenated. So they are laid out once and read in place, however many sequences use the same text.
    """

    lengths: tuple[int, ...]  # [M]
    members: tuple[tuple[int, ...], ...]  # the texts of each rectangle, in its order
    layers: tuple[tuple[Tensor, Tensor], ...]  # keys and values of each, [R, KV, D] rows of all rectangles

    @classmethod
    def of(
        cls, layers: Iterable[tuple[Tensor, Tensor]], spans: Sequence[tuple[int, int]], members: Sequence[Sequence[int]]
    ) -> "SourceMemory":
        """From packed rows; `spans` [M] are (first, count) of each text."""
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
        """[M] the rows of each text: (first, count)."""
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
    """The source memories of one step: which text each sequence uses, numbered across the memories.

    `queries` collects the [T, H, D] queries of every layer.
    """

    memories: Sequence[SourceMemory]
    sources: Sequence[int]  # [N]
    queries: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class CacheView:
    """The cache of one step: where each new token is stored, and which blocks each sequence reads."""

    cache: PagedCache
    storage_rows: ByHeads  # [T * KV] where the keys and values of each row are stored; see PagedCache.storage_rows
    tables: Sequence[Sequence[int]] = ()  # [N] the blocks of each sequence, in order; empty if the batch has spans
    lengths: Sequence[int] = ()  # [N] tokens to read, including the new ones; empty if the batch has spans
    # The same of layers that have blocks of their own; of blocks that no row sees, the tables have other numbers.
    window_rows: ByHeads | None = None
    window_tables: Sequence[Sequence[int]] = ()

    def rows_in(self, layer: int) -> ByHeads:
        """Where the keys and values of each row are stored in a layer."""
        if layer not in self.cache.own_blocks:
            return self.storage_rows
        assert self.window_rows is not None, "the cache has blocks of windowed layers, the step has none"
        return self.window_rows

    def are_finite(self) -> Tensor:
        """[T] whether the keys and values of each row are finite."""
        return self.cache.are_finite(self.rows_in(self.cache.last_layer))


def zero_pages(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros; on a CPU their pages take memory only when they are first written."""
    if like.device.type != "cpu" or 0 in shape:
        return like.new_zeros(shape)
    size = int(np.prod(shape)) * like.dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(like.dtype).view(shape)
