"""Attention of packed rows by one kernel that gets the start of each sequence: no padding, no masks, cache blocks read
in place.

The kernel is torch's variable-length attention over a paged cache, which exists on some GPUs in some versions of torch.
Versions are not compared: the function is looked up, its parameters are checked, and it must give the right numbers for
a few sequences before it is used.
"""

import inspect
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from .model_config import ModelConfig

# Called as torch.nn.attention.varlen.varlen_attn is: [T, H, D] over [T, KV, D] or pages [P, size, KV, D], to [T, H, D].
Kernel = Callable[..., Tensor]
KeysAndValues = tuple[Tensor, Tensor]
Window = tuple[int, int]  # visible keys before and after a row's own; -1: all

PAGE_TOKENS = 256  # the kernel requires blocks of a multiple of this many tokens
REQUIRED_ARGUMENTS = {"window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"}
MAX_HEAD_WIDTH = 256  # of a head, whose width must be a multiple of 8 too
TOLERANCE = 0.03  # for numbers around one, with intermediate results in bfloat16

log = logging.getLogger("polyhead.varlen")
varlen_attn: Kernel | None = None
if torch.cuda.is_available():  # the import takes seconds, so it is done only with a GPU
    with suppress(ImportError):  # older supported versions of torch do not have it
        from torch.nn.attention.varlen import varlen_attn  # type: ignore[assignment]


@dataclass(frozen=True)
class SequenceSpans:
    """Where N sequences lie among packed rows, and their keys among packed keys or, with `block_table`, in cache
    blocks.

    All are int32, as the kernel requires. Entries of `block_table` beyond a sequence's `key_counts` are not read.
    """

    kernel: Kernel
    starts: Tensor  # [N + 1]
    key_starts: Tensor  # [N + 1]
    max_rows: int  # of a sequence
    max_keys: int  # of any sequence; constant over steps, so that the kernel's choices do not depend on the batch
    key_counts: Tensor | None = None  # [N]
    block_table: Tensor | None = None  # [N, B]

    def attend(self, query: Tensor, kept: KeysAndValues, window: Window, scale: float | None) -> Tensor:
        """[T, H, D] queries over keys and values, packed or in blocks, to [T, H * D]; the last row sees the last key.

        Keys are never split among threads and merged afterwards (`num_splits`), so a row's sums have one order whatever
        is beside it. Also, with splits over blocks the kernel gives wrong results (pytorch issue 194167).
        """
        key, value = kept
        mixed = self.kernel(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            self.starts,
            self.key_starts,
            self.max_rows,
            self.max_keys,
            scale=scale,
            window_size=window,
            enable_gqa=query.size(1) != key.size(-2),
            seqused_k=self.key_counts,
            block_table=self.block_table,
            num_splits=1,
        )
        return mixed.flatten(1)


def attention_window(config: ModelConfig, layer: int) -> Window:
    """The attention window of a layer."""
    before = config.window - 1 if config.is_windowed(layer) else -1
    return before, 0 if config.causal else before


def is_supported(config: ModelConfig) -> bool:
    """Whether the kernel supports heads of these widths, and scores without biases, caps and sinks. It has no
    cross-attention."""
    widths = {config.of_layer(layer).head_width for layer in config.attention_layers}
    return (
        all(width <= MAX_HEAD_WIDTH and width % 8 == 0 for width in widths)
        and config.has_plain_scores
        and not (config.has_distance_scores or config.has_cross_attention)
    )


@lru_cache(maxsize=8)
def find_kernel(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """The kernel, if there is one and it gives the right numbers; else None."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or torch.version.cuda is None:
        return None
    wrong = kernel_problem(varlen_attn, device, dtype)
    if wrong:
        log.info("torch's variable-length attention is not used: %s", wrong)
        return None
    return varlen_attn


def kernel_problem(kernel: Kernel | None, device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernel is not used; empty if it is."""
    if kernel is None:
        return "this torch has none"
    if missing := REQUIRED_ARGUMENTS - inspect.signature(kernel).parameters.keys():
        return f"it takes no {', '.join(sorted(missing))}"
    try:
        return wrong_result(kernel, device, dtype)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@torch.inference_mode()
def wrong_result(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str:
    """What the kernel computes wrongly for a few sequences, in blocks and packed; empty if nothing."""
    like = torch.zeros(0, dtype=dtype, device=device)
    query, pages, spans = random_inputs(kernel, like, [(1, 300), (5, 5), (70, 600), (1, 1)])
    packed = SequenceSpans(kernel, spans.starts, spans.starts, spans.max_rows, spans.max_rows)
    for window in ((-1, 0), (40, 0)):
        if is_far(spans.attend(query, pages, window, None), reference_attention(query, pages, spans, window)):
            return f"over blocks, with a window of {window}, it gives other numbers than plain attention"
    kept = (query[:, 2:].flip(0), query[:, :2].flip(0))
    for window in ((-1, -1), (-1, 0), (8, 8)):
        if is_far(packed.attend(query, kept, window, None), reference_attention(query, kept, packed, window)):
            return f"over packed keys, with a window of {window}, it gives other numbers than plain attention"
    return ""


def random_inputs(
    kernel: Kernel, like: Tensor, sequences: list[tuple[int, int]], shape: tuple[int, int, int] = (4, 2, 64)
) -> tuple[Tensor, KeysAndValues, SequenceSpans]:
    """Random queries [T, H, D] and pages [P, PAGE_TOKENS, KV, D] of sequences with these (rows, keys), blocks in random
    order.

    `shape` is (H, KV, D).
    """
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, width = shape
    rows, keys = zip(*sequences, strict=True)
    counts = [math.ceil(count / PAGE_TOKENS) for count in keys]
    free = torch.randperm(sum(counts), generator=generator).tolist()
    table = [[free.pop() if index < count else 0 for index in range(max(counts))] for count in counts]
    whole = torch.randn(2, sum(counts), PAGE_TOKENS, kv_heads, width, generator=generator).to(like)
    query = torch.randn(sum(rows), heads, width, generator=generator).to(like)

    def integers(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=like.device)

    starts = [[sum(counts[:n]) for n in range(len(counts) + 1)] for counts in (rows, keys)]
    ends = (integers(starts[0]), integers(starts[1]))
    spans = SequenceSpans(kernel, *ends, max(rows), max(counts) * PAGE_TOKENS, integers(keys), integers(table))
    return query, (whole[0], whole[1]), spans


def reference_attention(query: Tensor, kept: KeysAndValues, spans: SequenceSpans, window: Window) -> Tensor:
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
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), key) * query.size(2) ** -0.5
        place = torch.arange(count - (end - start), count, device=query.device)[:, None]
        other = torch.arange(count, device=query.device)
        hidden = (window[0] >= 0) & (other < place - window[0]) | (window[1] >= 0) & (other > place + window[1])
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        mixed.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(mixed).flatten(1)


def is_far(some: Tensor, other: Tensor) -> bool:
    """Whether the numbers differ by more than the tolerance; NaN always does."""
    return not bool(((some.float() - other).abs() <= TOLERANCE).all())
