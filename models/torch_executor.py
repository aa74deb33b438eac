"""The reference executor: the network in torch, on any device, over a paged cache of its own."""

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from models.attention import padding
from models.cache import CacheView, PagedCache
from models.config import ModelConfig
from models.executor import Rows
from models.heads import LanguageHead
from models.ragged import Ragged
from models.transformer import Transformer


class TorchExecutor:
    """Runs `network` and, for a generator, `head` on what `Rows` asks for; see models.executor.Executor.

    `block_count` 0 means no cache: every sequence comes whole.
    """

    def __init__(
        self, network: Transformer, head: LanguageHead | None = None, *, block_count: int = 0, block_size: int = 0
    ) -> None:
        self.network, self.head = network.eval(), head
        self.block_count, self.block_size = block_count, block_size
        weight = network.tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.cache = (
            PagedCache(network.config, block_count, block_size, self.dtype, self.device) if block_count else None
        )

    @staticmethod
    def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Memory of one block: keys and values of `block_size` tokens in all layers."""
        return 2 * config.depth * config.kv_heads * config.head_width * block_size * dtype.itemsize

    @torch.inference_mode()
    def step(self, rows: Rows) -> Tensor:
        states = self.network(self._batch(rows))  # [T, W]
        if len(rows.wanted) < len(rows.tokens):
            states = states.index_select(0, torch.tensor(rows.wanted, device=self.device))
        out = states if self.head is None else self.head(states)
        return cast(Tensor, out.float())

    def padding(self, rows: Rows) -> int:
        lengths = [end - start for start, end in pairwise(rows.starts)]
        return padding(lengths, self._seen(rows))

    def _batch(self, rows: Rows) -> Ragged:
        tensor = torch.tensor
        return Ragged(
            tokens=tensor(rows.tokens, device=self.device),
            positions=tensor(rows.positions, device=self.device),
            starts=tuple(rows.starts),
            segments=None if rows.segments is None else tensor(rows.segments, device=self.device),
            cache=None
            if self.cache is None
            else CacheView(self.cache, self._slots(rows), rows.tables, self._seen(rows)),
        )

    def _slots(self, rows: Rows) -> Tensor:
        size = self.block_size
        slots = [
            table[position // size] * size + position % size
            for table, (start, end) in zip(rows.tables, pairwise(rows.starts), strict=True)
            for position in rows.positions[start:end]
        ]
        return torch.tensor(slots, device=self.device)

    def _seen(self, rows: Rows) -> list[int]:
        return [rows.positions[end - 1] + 1 for end in rows.starts[1:]]
