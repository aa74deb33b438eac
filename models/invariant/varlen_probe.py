"""Tests whether the variable-length attention kernel gives a row the same bits in any batch.

The kernel guarantees it as long as keys are not divided among programs. The test compares sequences together, alone, in
chunks and row by row, with cached and packed keys, with and without a window.
"""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ..core.errors import InvarianceError
from ..network.model_config import ModelConfig
from ..network.scoring import Scoring
from ..network.sequence_spans import Kernel, KeysAndValues, SequenceSpans, Window
from ..network.varlen import random_inputs

SEQUENCES = [(1, 300), (90, 600), (5, 5), (1, 1), (130, 130)]  # rows and keys
CHUNKS = (1, 7, 64)  # rows of a sequence at once


@torch.inference_mode()
def self_test_kernel(kernel: Kernel, config: ModelConfig, like: Tensor) -> None:
    """InvarianceError if a row depends on the others, for heads like those of `config` and numbers like `like`."""
    layers = map(config.of_layer, config.attention_layers)
    for shape in sorted({(config.heads, each.kv_heads, each.head_width) for each in layers}):
        _self_test_shape(kernel, shape, like)


def _self_test_shape(kernel: Kernel, shape: tuple[int, int, int], like: Tensor) -> None:
    """The same for heads, key heads and features of a head."""
    query, pages, spans = random_inputs(kernel, like, SEQUENCES, shape)
    kept = (query[:, : shape[1]].flip(0), query[:, : shape[1]].flip(2))
    packed = SequenceSpans(kernel, spans.starts, spans.starts, spans.max_rows, spans.max_keys)
    agree = all(_is_cached_invariant(query, pages, spans, window) for window in ((-1, 0), (40, 0)))
    if not agree or not all(_is_packed_invariant(query, kept, packed, window) for window in ((-1, -1), (8, 8))):
        raise InvarianceError("the attention kernel gives a row other bits in another batch")


def _is_cached_invariant(query: Tensor, pages: KeysAndValues, spans: SequenceSpans, window: Window) -> bool:
    together = spans.attend(query, pages, window, _scoring(query))
    assert spans.key_counts is not None
    assert spans.block_table is not None
    for n, (start, end) in enumerate(pairwise(spans.starts.tolist())):
        for chunk in CHUNKS:
            for first in range(start, end, chunk):
                last = min(first + chunk, end)
                used = spans.key_counts[n : n + 1] - (end - last)
                alone = replace(
                    _single_span(spans, last - first, used), key_counts=used, block_table=spans.block_table[n : n + 1]
                )
                if not torch.equal(
                    alone.attend(query[first:last], pages, window, _scoring(query)), together[first:last]
                ):
                    return False
    return True


def _is_packed_invariant(query: Tensor, kept: KeysAndValues, spans: SequenceSpans, window: Window) -> bool:
    together = spans.attend(query, kept, window, _scoring(query))
    for start, end in pairwise(spans.starts.tolist()):
        alone = _single_span(spans, end - start, spans.starts.new_tensor([end - start]))
        own = (kept[0][start:end], kept[1][start:end])
        if not torch.equal(alone.attend(query[start:end], own, window, _scoring(query)), together[start:end]):
            return False
    return True


def _scoring(query: Tensor) -> Scoring:
    return Scoring(query.size(2) ** -0.5)


def _single_span(spans: SequenceSpans, rows: int, keys: Tensor) -> SequenceSpans:
    """A single sequence of so many rows and keys [1]."""
    starts = spans.starts.new_tensor([0, rows])
    return replace(spans, starts=starts, key_starts=torch.cat((starts[:1], keys)), max_rows=rows)
