"""Cross-attention: rows of targets attend to source texts.

Source texts lie in rectangles (models.network.cache.SourceMemory). One group is a rectangle with all rows, of any
sequences, that attend to its texts. The rest is as in models.network.attention.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from .attention import Attention, AttentionContext, AttentionGroup, CrossAttentionContext, additive_mask
from .cache import MemoryView, SourceMemory
from .model_config import ModelConfig
from .ragged import RaggedBatch


def build_cross_context(batch: RaggedBatch, view: MemoryView, dtype: torch.dtype) -> CrossAttentionContext:
    """The shared context of cross-attention: every row sees all of its sequence's source text."""
    target_rows: list[list[int]] = [[] for memory in view.memories for _ in memory.lengths]
    for n, source in enumerate(view.sources):
        target_rows[source].extend(range(batch.starts[n], batch.starts[n + 1]))
    contexts, order, texts, alone = [], list[int](), 0, replace(batch, cache=None, memory=None)
    for memory in view.memories:
        groups = []
        for members in memory.members:
            rows = [target_rows[texts + text] for text in members]
            if any(rows):
                groups.append(_build_memory_group(memory, members, rows, dtype))
                longest = max(map(len, rows))
                order += [row for some in rows for row in some + [-1] * (longest - len(some))]
        if groups:
            contexts.append((memory, AttentionContext(alone, groups, None, None, None, None, 0)))
        texts += len(memory.lengths)
    return CrossAttentionContext(contexts, _row_order(order, batch), view)


def _row_order(order: list[int], batch: RaggedBatch) -> Tensor | None:
    """The place of each row in `order`, where -1 is a padding row; None if the order is unchanged."""
    if order == list(range(batch.starts[-1])):
        return None
    places = {row: place for place, row in enumerate(order)}
    return torch.tensor([places[row] for row in range(batch.starts[-1])], device=batch.tokens.device)


def _build_memory_group(
    memory: SourceMemory, members: Sequence[int], target_rows: list[list[int]], dtype: torch.dtype
) -> AttentionGroup:
    """The rows that attend to the texts of one rectangle, padded by repeating a first row, or by row 0 if there is
    none."""
    longest, lengths = max(map(len, target_rows)), [memory.lengths[text] for text in members]
    first, device = memory.spans[members[0]][0], memory.layers[0][0].device
    padded = [row for rows in target_rows for row in rows + (rows or [0])[:1] * (longest - len(rows))]
    side_by_side = padded == list(range(padded[0], padded[0] + len(padded)))
    rows = slice(padded[0], padded[-1] + 1) if side_by_side else torch.tensor(padded, device=device)
    shown = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])[:, None, None]  # [N, 1, 1, K]
    mask = additive_mask(shown, dtype, device)
    keys = slice(first, first + len(members) * max(lengths))
    return AttentionGroup(len(members), rows, keys, mask, mask, keys)


class CrossAttention(Attention):
    """Attention of target rows to a source text (Bahdanau et al. 2015, arXiv:1409.0473; in this form, Vaswani et al.
    2017)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        if config.source_width:
            inner = config.kv_heads * config.head_width
            self.key, self.value = (nn.Linear(config.source_width, inner, bias=config.qkv_bias) for _ in range(2))

    def project_source(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, KV, D] of a source text's states [T, W]."""
        assert self.key is not None
        assert self.value is not None
        key, value = (made(states).view(len(states), -1, self.config.head_width) for made in (self.key, self.value))
        return self.key_norm(key), value

    def forward(self, x: Tensor, frame: AttentionContext) -> Tensor:
        """[T, W] to [T, W]."""
        across = frame.cross
        assert across is not None
        query = self.query_norm(self.query(x).view(len(x), -1, self.config.head_width))
        across.view.queries.append(query.detach())
        mixed = [look.attend(self, (query, *memory.layers[self.layer])) for memory, look in across.memory_contexts]
        packed = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        out: Tensor = self.output(packed if across.order is None else packed.index_select(0, across.order))
        return out

    def mean_weights(self, query: Tensor, keys: Tensor) -> Tensor:
        """[K] the weights of [H, D] queries over [K, KV, D] keys, the mean of all heads."""
        folded = query.view(keys.size(1), -1, query.size(1))  # [KV, S, D]
        scores = self.scoring.score(folded, keys.transpose(0, 1), None)
        return scores.softmax(dim=-1).mean(dim=(0, 1))
