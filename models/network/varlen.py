"""Attention of packed rows by one kernel that gets the start of each sequence: no padding, no masks, cache blocks read
in place.

The kernel is in Triton (models.network.triton_attention), for GPUs. It must give the right numbers for a few sequences
before it is used.
"""

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise, product

import torch
from torch import Tensor

from .model_config import ModelConfig
from .scoring import Scoring
from .sequence_spans import Kernel, KeysAndValues, SequenceSpans, Window

TESTED_BLOCK = 16  # tokens of a block in tests of a kernel
MIXED_STEP = [(1, 300), (5, 5), (70, 600), (1, 1)]  # rows and keys of sequences in such a test
DECODE_STEP = [(1, 300), (1, 1), (1, 1400), (1, 512)]
MAX_HEAD_WIDTH = 256  # a program keeps whole heads
TOLERANCE = 0.03  # for numbers around one, with intermediate results in bfloat16

log = logging.getLogger("polyhead.varlen")
TritonAttention: Callable[[bool], Kernel] | None = None
if torch.cuda.is_available():  # the import takes seconds, so it is done only with a GPU
    with suppress(ImportError):  # builds of torch without Triton
        from .triton_attention import TritonAttention


def attention_window(config: ModelConfig, layer: int) -> Window:
    """The attention window of a layer."""
    before = config.window - 1 if config.is_windowed(layer) else -1
    return before, 0 if config.causal else before


def is_supported(config: ModelConfig) -> bool:
    """Whether the kernel supports heads of these widths, and scores without biases. It has no cross-attention, and no
    tokens that see more than others."""
    widths = {config.of_layer(layer).head_width for layer in config.attention_layers}
    others = config.has_distance_scores or config.has_cross_attention or config.global_tokens
    return max(widths, default=0) <= MAX_HEAD_WIDTH and not others


def find_kernel(device: torch.device, dtype: torch.dtype, invariant: bool = False) -> Kernel | None:
    """The kernel, if there is one and it gives the right numbers; else None.

    `invariant`: a row's sums have one order in steps of any shape.
    """
    return try_kernel(device, dtype, invariant)[0]


@lru_cache(maxsize=8)
def try_kernel(device: torch.device, dtype: torch.dtype, invariant: bool = False) -> tuple[Kernel | None, str]:
    """The same; without a kernel, why."""
    if device.type != "cuda":
        return None, "it runs on GPUs only"
    if TritonAttention is None:
        return None, "Triton is not installed"
    kernel = TritonAttention(not invariant)
    if problem := kernel_problem(kernel, device, dtype):
        log.warning("attention is computed in groups, which is slower, since the kernel cannot be used: %s", problem)
        return None, problem
    return kernel, ""


def kernel_problem(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernel is not used; empty if it is."""
    try:
        return wrong_result(kernel, device, dtype)
    except Exception as error:  # noqa: BLE001  Triton raises many kinds: for a missing compiler, a folder, a GPU too small
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@torch.inference_mode()
def wrong_result(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str:
    """What the kernel computes wrongly for a few sequences, in blocks and packed; empty if nothing."""
    like = torch.zeros(0, dtype=dtype, device=device)
    for sequences in MIXED_STEP, DECODE_STEP:
        query, pages, spans = random_inputs(kernel, like, sequences)
        packed = SequenceSpans(kernel, spans.starts, spans.starts, spans.max_rows, spans.max_rows)
        plain = Scoring(query.size(2) ** -0.5)
        unusual = Scoring(0.3, 2.0, query[0, :, 0].contiguous())  # with a cap and sinks
        kept = (query[:, 2:].flip(0), query[:, :2].flip(0))
        for over, windows in ((spans, ((-1, 0), (40, 0))), (packed, ((-1, -1), (-1, 0), (8, 8)))):
            keys, where = (kept, "packed keys") if over is packed else (pages, "blocks")
            for window, scoring in product(windows, (plain, unusual)):
                found = over.attend(query, keys, window, scoring)
                if is_far(found, reference_attention(query, keys, over, window, scoring)):
                    return f"over {where}, with a window of {window}, it gives other numbers than plain attention"
    return ""


def random_inputs(
    kernel: Kernel, like: Tensor, sequences: list[tuple[int, int]], shape: tuple[int, int, int] = (4, 2, 64)
) -> tuple[Tensor, KeysAndValues, SequenceSpans]:
    """Random queries [T, H, D] and blocks [P, size, KV, D], in random order, of sequences with these (rows, keys).

    `shape` is (H, KV, D). Slots behind a sequence's last key hold NaN: what is left there must not be read.
    """
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, width = shape
    rows, keys = zip(*sequences, strict=True)
    counts = [math.ceil(count / TESTED_BLOCK) for count in keys]
    free = torch.randperm(sum(counts), generator=generator).tolist()
    table = [[free.pop() if index < count else 0 for index in range(max(counts))] for count in counts]
    whole = torch.randn(2, sum(counts), TESTED_BLOCK, kv_heads, width, generator=generator).to(like)
    for blocks, count in zip(table, keys, strict=True):
        if count % TESTED_BLOCK:
            whole[:, blocks[count // TESTED_BLOCK], count % TESTED_BLOCK :] = math.nan
    query = torch.randn(sum(rows), heads, width, generator=generator).to(like)

    def integers(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=like.device)

    starts = [[sum(counts[:n]) for n in range(len(counts) + 1)] for counts in (rows, keys)]
    ends = (integers(starts[0]), integers(starts[1]))
    spans = SequenceSpans(kernel, *ends, max(rows), max(counts) * TESTED_BLOCK, integers(keys), integers(table))
    return query, (whole[0], whole[1]), spans


def reference_attention(
    query: Tensor, kept: KeysAndValues, spans: SequenceSpans, window: Window, scoring: Scoring
) -> Tensor:
    """The expected result of `spans.attend`, computed in float32 one sequence after the other."""
    mixed = []
    starts, key_starts = spans.starts.tolist(), spans.key_starts.tolist()
    for n, (start, end) in enumerate(pairwise(starts)):
        count = key_starts[n + 1] - key_starts[n]
        if spans.block_table is None:
            key, value = (part[key_starts[n] : key_starts[n + 1]] for part in kept)
        else:
            key, value = (part[spans.block_table[n].long()].flatten(0, 1)[:count] for part in kept)
        shared = query.size(1) // key.size(1)
        key, value = (part.float().repeat_interleave(shared, dim=1) for part in (key, value))
        place = torch.arange(count - (end - start), count, device=query.device)[:, None]
        other = torch.arange(count, device=query.device)
        hidden = (window[0] >= 0) & (other < place - window[0]) | (window[1] >= 0) & (other > place + window[1])
        mask = torch.zeros(hidden.shape, device=query.device).masked_fill(hidden, float("-inf"))
        scores = scoring.score(query[start:end].float().transpose(0, 1), key.transpose(0, 1), mask)
        weights = scoring.weigh(scores, None if scoring.sinks is None else scoring.sinks.float()[:, None, None])
        mixed.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(mixed).flatten(1)


def is_far(some: Tensor, other: Tensor) -> bool:
    """Whether the numbers differ by more than the tolerance; NaN always does."""
    return not bool(((some.float() - other).abs() <= TOLERANCE).all())
