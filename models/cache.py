"""Keys and values of past tokens, in blocks.  Which block belongs to whom is decided elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.config import ModelConfig


class PagedCache:
    """Storage for `count` blocks of `size` tokens, per layer one tensor of keys and one of values.

    Inside a block the heads come first, so that what is gathered for a head lies in one piece: products want that.
    With `in_place` the tokens do, as the kernel that reads blocks where they are wants it (models.varlen).
    It starts as zeros and stays finite: what a mask hides is still multiplied, and 0 * NaN is NaN.
    """

    def __init__(self, config: ModelConfig, count: int, size: int, like: Tensor, in_place: bool = False) -> None:
        """Numbers are kept as those of `like`, and where it is."""
        self.count, self.size, self.heads, self.width = count, size, config.kv_heads, config.head_width
        self.in_place = in_place
        inner = (size, config.kv_heads) if in_place else (config.kv_heads, size)
        shape = (count, *inner, config.head_width)
        self.keys = [_zeros(shape, like) for _ in range(config.depth)]  # [count, KV, size, D] or [count, size, KV, D]
        self.values = [_zeros(shape, like) for _ in range(config.depth)]
        self._gathered = [like.new_empty(0) for _ in range(2)]

    def places(self, slots: Tensor) -> Tensor:
        """[T * KV] rows of D numbers in which the heads of the tokens at `slots` [T] are stored."""
        heads = torch.arange(self.heads, device=slots.device)
        if self.in_place:
            return (slots[:, None] * self.heads + heads).flatten()
        block, offset = slots // self.size, slots % self.size
        return ((block[:, None] * self.heads + heads) * self.size + offset[:, None]).flatten()

    def pieces(self, blocks: Tensor) -> Tensor:
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

    def finite(self, places: Tensor) -> Tensor:
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


@dataclass(frozen=True)
class CacheView:
    """One step's window on the cache: where each new token goes, and which blocks each sequence reads."""

    cache: PagedCache
    places: Tensor  # [T * KV] where the keys and values of each row are stored; see PagedCache.places
    tables: Sequence[Sequence[int]] = ()  # [N] the blocks of each sequence, in order; none where Ragged has spans
    lengths: Sequence[int] = ()  # [N] tokens to read, the new ones included; the same


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros whose memory is only taken when it is first written, on a CPU."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = int(np.prod(shape)) * like.dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(like.dtype).view(shape)
