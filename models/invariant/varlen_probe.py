"""Whether one kernel that attends for all sequences gives a row the same bits whatever it is computed beside.

Knows nothing of networks.  It promises so, where it does not split keys; as nothing promised is trusted here, it is
tried: sequences together, each alone, in chunks, and row by row, over blocks and packed, with and without a window.
"""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ..core.errors import InvarianceError
from ..network.model_config import ModelConfig
from ..network.varlen import Kernel, Pair, Spans, Window, scene

SEQUENCES = [(1, 300), (90, 600), (5, 5), (1, 1), (130, 130)]  # rows and keys
CHUNKS = (1, 7, 64)  # rows of a sequence at once


@torch.inference_mode()
def prove_kernel(kernel: Kernel, config: ModelConfig, like: Tensor) -> None:
    """InvarianceError where a row of heads like those of `config`, in numbers like `like`, depends on the others."""
    shape = (config.heads, config.kv_heads, config.head_width)
    query, pages, spans = scene(kernel, like, SEQUENCES, shape)
    kept = (query[:, : config.kv_heads].flip(0), query[:, : config.kv_heads].flip(2))
    packed = Spans(kernel, spans.starts, spans.starts, spans.most_rows, spans.most_keys)
    agree = all(_cached_agrees(query, pages, spans, window) for window in ((-1, 0), (40, 0)))
    if not agree or not all(_packed_agrees(query, kept, packed, window) for window in ((-1, -1), (8, 8))):
        raise InvarianceError("torch's variable-length attention gives a row other bits in another batch")


def _cached_agrees(query: Tensor, pages: Pair, spans: Spans, window: Window) -> bool:
    together = spans.attend(query, pages, window, None)
    assert spans.used is not None
    assert spans.table is not None
    for n, (start, end) in enumerate(pairwise(spans.starts.tolist())):
        for chunk in CHUNKS:
            for first in range(start, end, chunk):
                last = min(first + chunk, end)
                used = spans.used[n : n + 1] - (end - last)
                alone = replace(_one(spans, last - first, used), used=used, table=spans.table[n : n + 1])
                if not torch.equal(alone.attend(query[first:last], pages, window, None), together[first:last]):
                    return False
    return True


def _packed_agrees(query: Tensor, kept: Pair, spans: Spans, window: Window) -> bool:
    together = spans.attend(query, kept, window, None)
    for start, end in pairwise(spans.starts.tolist()):
        alone = _one(spans, end - start, spans.starts.new_tensor([end - start]))
        own = (kept[0][start:end], kept[1][start:end])
        if not torch.equal(alone.attend(query[start:end], own, window, None), together[start:end]):
            return False
    return True


def _one(spans: Spans, rows: int, keys: Tensor) -> Spans:
    """A single sequence of so many rows and keys [1]."""
    starts = spans.starts.new_tensor([0, rows])
    return replace(spans, starts=starts, key_starts=torch.cat((starts[:1], keys)), most_rows=rows)
