"""Cross-attention: rows of targets attend to source texts.

Source texts lie in rectangles (models.network.cache.SourceMemory). One group is a rectangle with all rows, of any
sequences, that attend to its texts. The rest is as in models.network.attention.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from .attention import Attention, AttentionContext, AttentionGroup, CrossAttentionContext, additive_mask
from .cache import MemoryView, SourceMemory
from .lora import apply_linear
from .model_config import ModelConfig
from .ragged import RaggedBatch
from .work_pieces import ATTENDING_ROWS, LAYER_PRODUCTS, Pieces, map_ranges, rows_per_piece, split_range


def build_cross_context(
    batch: RaggedBatch, view: MemoryView, dtype: torch.dtype, *, in_pieces: bool = False
) -> CrossAttentionContext:
    """The shared context of cross-attention: every row sees all of its sequence's source text. `in_pieces`: ranges of
    the rows of a long target attend, as in models.network.attention."""
    target_rows: list[list[int]] = [[] for memory in view.memories for _ in memory.lengths]
    for n, source in enumerate(view.sources):
        target_rows[source].extend(range(batch.starts[n], batch.starts[n + 1]))
    contexts, order, texts, alone = [], list[int](), 0, replace(batch, cache=None, memory=None)
    for memory in view.memories:
        groups = []
        for members in memory.members:
            rows = [target_rows[texts + text] for text in members]
            longest = max(map(len, rows))
            for start, end in split_range(longest, ATTENDING_ROWS if in_pieces else longest) if longest else ():
                ranges = [some[start:end] for some in rows]
                groups.append(_build_memory_group(memory, members, ranges, dtype))
                order += [row for some in ranges for row in some + [-1] * (end - start - len(some))]
        if groups:
            own = AttentionContext(alone, groups, None, None, None, None, 0, in_pieces=in_pieces)
            contexts.append((memory, own))
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


def _apply_to_range(linear: nn.Linear, x: Tensor, start: int, end: int) -> Tensor:
    return apply_linear(linear, x[start:end])


class CrossAttention(Attention):
    """Attention of target rows to a source text (Bahdanau et al. 2015, arXiv:1409.0473; in this form, Vaswani et al.
    2017)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        if config.source_width:
            inner = config.kv_heads * config.head_width
            self.key, self.value = (nn.Linear(config.source_width, inner, bias=config.qkv_bias) for _ in range(2))

    def project_source(self, states: Tensor, *, in_pieces: bool = False) -> Pieces[tuple[Tensor, Tensor]]:
        """Keys and values [T, KV, D] of a source text's states [T, W]."""
        found = list[Tensor]()
        size = rows_per_piece(states.size(1) * self.config.width, LAYER_PRODUCTS) if in_pieces else len(states)
        for linear in (self.key, self.value):
            assert linear is not None
            projected = yield from map_ranges(partial(_apply_to_range, linear, states), len(states), size)
            found.append(projected.view(len(states), -1, self.config.head_width))
        return self.key_norm(found[0]), found[1]

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        """[T, W] to [T, W]."""
        across = frame.cross
        assert across is not None
        asked = yield from self.project(self.query, x, frame)
        query = self.query_norm(asked.view(len(x), -1, self.config.head_width))
        across.view.queries.append(query.detach())
        mixed = list[Tensor]()
        for memory, look in across.memory_contexts:
            mixed.append((yield from look.attend(self, (query, *memory.layers[self.layer]))))
        packed = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        packed = packed if across.order is None else packed.index_select(0, across.order)
        return (yield from self.project(self.output, packed, frame))

    def project(self, linear: nn.Linear, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        """As that of self-attention, which adapters do not change."""
        return (yield from frame.map_rows(lambda rows, _: apply_linear(linear, rows), x, self.products))

    def mean_weights(self, query: Tensor, keys: Tensor) -> Tensor:
        """[K] the weights of [H, D] queries over [K, KV, D] keys, the mean of all heads."""
        folded = query.view(keys.size(1), -1, query.size(1))  # [KV, S, D]
        scores = self.scoring.score(folded, keys.transpose(0, 1), None)
        return scores.softmax(dim=-1).mean(dim=(0, 1))
