"""Keys and values of past tokens, in blocks.  Which block belongs to whom is decided elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.config import ModelConfig


class PagedCache:
    """Storage for `count` blocks of `size` tokens, per layer one tensor of keys and one of values.

    It starts as zeros and stays finite: what a mask hides is still multiplied, and 0 * NaN is NaN.
    """

    def __init__(self, config: ModelConfig, count: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.count, self.size = count, size
        shape = (count * size, config.kv_heads, config.head_width)
        self.keys = [_zeros(shape, dtype, device) for _ in range(config.depth)]  # [slots, KV, D]
        self.values = [_zeros(shape, dtype, device) for _ in range(config.depth)]
        self._gathered = [torch.empty(0, dtype=dtype, device=device) for _ in range(2)]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store [T, KV, D] keys and values of one layer at `slots` [T]."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero whole blocks in all layers."""
        for storage in (*self.keys, *self.values):
            storage.view(self.count, -1)[list(blocks)] = 0

    def finite(self, slots: Tensor) -> Tensor:
        """[T] whether what stands at `slots` is finite: what was not in an earlier layer is not in the last one."""
        sums = self.keys[-1][slots].sum(dim=(1, 2)) + self.values[-1][slots].sum(dim=(1, 2))
        return sums.isfinite()

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of [N, B] blocks as [N, B * size, KV, D], good until the next read.

        Gathered into memory that is kept: fresh pages would cost more than the copy.
        """
        kept = (self.keys[layer], self.values[layer])
        keys, values = (self._gather(i, storage, blocks) for i, storage in enumerate(kept))
        return keys, values

    def _gather(self, which: int, storage: Tensor, blocks: Tensor) -> Tensor:
        rows = storage.view(self.count, -1)  # a block is one contiguous copy
        wanted = blocks.numel() * rows.size(1)
        if self._gathered[which].numel() < wanted:
            self._gathered[which] = storage.new_empty(wanted * 5 // 4)
        out = self._gathered[which][:wanted].view(blocks.numel(), -1)
        torch.index_select(rows, 0, blocks.flatten(), out=out)
        return out.view(blocks.size(0), -1, *storage.shape[1:])


@dataclass(frozen=True)
class CacheView:
    """One step's window on the cache: where each new token goes, and which blocks each sequence reads."""

    cache: PagedCache
    slots: Tensor  # [T] where the key and value of each row are stored
    tables: Sequence[Sequence[int]]  # [N] the blocks of each sequence, in order
    lengths: Sequence[int]  # [N] tokens to read, the new ones included


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose memory is only taken when it is first written, on a CPU."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
