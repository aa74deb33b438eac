"""Attention of packed rows over keys and values that are packed or in cache blocks: a kernel for GPUs, in Triton.

It is flash attention (https://arxiv.org/abs/2205.14135): a program takes some rows of one key head of one sequence,
reads keys block after block, and keeps the sums of a softmax that is not yet complete. Blocks of keys start at
multiples of their size for any rows, so a row's sums have one order. With `splits`, a step of one row for each sequence
divides the keys among several programs, and a second kernel adds up, as one sequence has too few heads to occupy a GPU
(Dao, Haziza, Massa, Sizov 2023: Flash-Decoding). A part has a fixed number of keys, so it does not depend on other
sequences.

It is imported only where torch finds a GPU; Triton comes with torch's builds for CUDA.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .scoring import Scoring
from .sequence_spans import KeysAndValues, SequenceSpans, Window

PART_KEYS = 512  # of one program, at least, where keys are divided
MAX_PARTS = 16
DECODE_SLOTS, SLOTS = 16, 64  # rows times query heads of a program; a matrix unit takes 16 at least
WIDE = 128  # heads of more features leave memory for half the rows and keys


@triton.jit
def _score(query, key, visible, scale, cap, HAS_CAP: tl.constexpr):
    """[S, D] queries and [D, K] keys to scores [S, K]; -inf where a key is not visible."""
    scores = tl.dot(query, key, input_precision="ieee") * scale
    if HAS_CAP:
        scores = (2 * tl.sigmoid(2 * scores / cap) - 1) * cap  # tanh
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _attend(
    query, key, value, out, parts, sums, starts, key_starts, counts, table, sinks, scale, cap, table_width, part_count,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, SLOTS: tl.constexpr,
    KEYS: tl.constexpr, PAGE: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, PART: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The rows of a tile. PAGE 0: packed keys; PART 0: all keys, else the program's part, with its sums in `parts` [T,
    H, P, PADDED] and `sums` [T, H, P, 2]: the largest score and the sum of weights."""
    tile, sequence = tl.program_id(0), tl.program_id(1)
    split, head = tl.program_id(2) // KV_HEADS, tl.program_id(2) % KV_HEADS
    shared: tl.constexpr = HEADS // KV_HEADS
    start = tl.load(starts + sequence)
    rows = tl.load(starts + sequence + 1) - start
    if tile * SLOTS >= rows * shared:
        return
    first_key = tl.load(key_starts + sequence)
    if PAGE:
        count = tl.load(counts + sequence)
    else:
        count = tl.load(key_starts + sequence + 1) - first_key
    slot = tile * SLOTS + tl.arange(0, SLOTS)
    row, own_head = slot // shared, head * shared + slot % shared
    here = row < rows
    place = count - rows + row
    feature = tl.arange(0, PADDED)
    wide = feature < WIDTH
    at = (start + row).to(tl.int64) * HEADS + own_head  # [S] row and head
    inside = here[:, None] & wide[None, :]
    asked = tl.load(query + at[:, None] * WIDTH + feature[None, :], mask=inside, other=0.0)
    low, high = 0, count
    if BEFORE >= 0:
        low = tl.maximum(count - rows + tile * SLOTS // shared - BEFORE, 0) // KEYS * KEYS
    if AFTER >= 0:
        last = tl.minimum((tile * SLOTS + SLOTS - 1) // shared, rows - 1)
        high = tl.minimum(count, count - rows + last + AFTER + 1)
    if PART:
        low, high = tl.maximum(low, split * PART), tl.minimum(high, split * PART + PART)
    largest = tl.full([SLOTS], float("-inf"), tl.float32)
    total = tl.zeros([SLOTS], tl.float32)
    mixed = tl.zeros([SLOTS, PADDED], tl.float32)
    for first in range(low, high, KEYS):
        other = first + tl.arange(0, KEYS)
        there = other < count
        if PAGE:
            block = tl.load(table + sequence.to(tl.int64) * table_width + other // PAGE, mask=there, other=0)
            line = (block.to(tl.int64) * PAGE + other % PAGE) * KV_HEADS + head
        else:
            line = (first_key + other).to(tl.int64) * KV_HEADS + head
        keys = tl.load(key + line[None, :] * WIDTH + feature[:, None], mask=wide[:, None] & there[None, :], other=0.0)
        visible = here[:, None] & there[None, :]
        if BEFORE >= 0:
            visible = visible & (other[None, :] >= place[:, None] - BEFORE)
        if AFTER >= 0:
            visible = visible & (other[None, :] <= place[:, None] + AFTER)
        scores = _score(asked, keys, visible, scale, cap, HAS_CAP)
        larger = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)  # nothing was visible yet
        weights, fading = tl.exp(scores - base[:, None]), tl.exp(largest - base)
        stored = there[:, None] & wide[None, :]
        values = tl.load(value + line[:, None] * WIDTH + feature[None, :], mask=stored, other=0.0)
        total = total * fading + tl.sum(weights, 1)
        mixed = mixed * fading[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        largest = larger
    if PART:
        place_of = at * part_count + split
        tl.store(parts + place_of[:, None] * PADDED + feature[None, :], mixed, mask=here[:, None])
        tl.store(sums + place_of * 2, largest, mask=here)
        tl.store(sums + place_of * 2 + 1, total, mask=here)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + own_head, mask=here, other=0.0).to(tl.float32)
            larger = tl.maximum(largest, sink)
            total = total * tl.exp(largest - larger) + tl.exp(sink - larger)
            mixed = mixed * tl.exp(largest - larger)[:, None]
        tl.store(out + at[:, None] * WIDTH + feature[None, :], mixed / total[:, None], mask=inside)


@triton.jit
def _add_up(
    out, parts, sums, counts, sinks, part_count,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One row and head: the parts of its keys. Sequence n has row n alone."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    used = (tl.load(counts + sequence) + PART - 1) // PART
    feature = tl.arange(0, PADDED)
    at = sequence.to(tl.int64) * HEADS + head
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    mixed = tl.zeros([PADDED], tl.float32)
    if HAS_SINKS:
        largest = tl.load(sinks + head).to(tl.float32)
        total += 1.0
    for part in range(0, used):
        score = tl.load(sums + (at * part_count + part) * 2)
        larger = tl.maximum(largest, score)
        base = tl.where(larger == float("-inf"), 0.0, larger)
        fading, weight = tl.exp(largest - base), tl.exp(score - base)
        total = total * fading + tl.load(sums + (at * part_count + part) * 2 + 1) * weight
        mixed = mixed * fading + tl.load(parts + (at * part_count + part) * PADDED + feature) * weight
        largest = larger
    tl.store(out + at * WIDTH + feature, mixed / total, mask=feature < WIDTH)


@dataclass(frozen=True)
class TritonAttention:
    """A Kernel (models.network.sequence_spans). Without `splits` a row's sums have one order in steps of any shape."""

    splits: bool = True

    def __call__(
        self, query: Tensor, kept: KeysAndValues, spans: SequenceSpans, window: Window, scoring: Scoring
    ) -> Tensor:
        """[T, H, D] queries to mixed values [T, H, D]."""
        query, key, value = query.contiguous(), kept[0].contiguous(), kept[1].contiguous()
        out, (heads, width), kv_heads = torch.empty_like(query), query.shape[1:], key.size(-2)
        table, sequences = spans.block_table, len(spans.starts) - 1
        part = self._part(spans) if table is not None and spans.max_rows == 1 else 0
        parts = -(-spans.max_keys // part) if part else 1
        padded = max(triton.next_power_of_2(width), 16)
        smaller = 1 if padded <= WIDE and query.element_size() == 2 else 2
        slots = SLOTS // smaller
        if self.splits and spans.max_rows * (heads // kv_heads) <= DECODE_SLOTS:
            slots = DECODE_SLOTS
        held = out.new_empty(len(query), heads, parts, padded if part else 0, dtype=torch.float32)
        sums = out.new_empty(len(query), heads, parts, 2 if part else 0, dtype=torch.float32)
        sinks, counts = scoring.sinks, spans.key_counts
        sizes = {"HEADS": heads, "WIDTH": width, "PADDED": padded, "PART": part, "HAS_SINKS": sinks is not None}
        tiles = triton.cdiv(spans.max_rows * (heads // kv_heads), slots)
        _attend[(tiles, sequences, kv_heads * parts)](
            query, key, value, out, held, sums, spans.starts, spans.key_starts,
            spans.starts if counts is None else counts, spans.starts if table is None else table,
            query if sinks is None else sinks, scoring.scale, scoring.cap, 0 if table is None else table.size(1), parts,
            **sizes, KV_HEADS=kv_heads, SLOTS=slots, KEYS=64 // smaller, PAGE=0 if table is None else key.size(1),
            BEFORE=window[0], AFTER=window[1], HAS_CAP=scoring.cap > 0, num_stages=2,
        )  # fmt: skip
        if part:
            _add_up[(sequences, heads)](out, held, sums, counts, query if sinks is None else sinks, parts, **sizes)
        return out

    def _part(self, spans: SequenceSpans) -> int:
        """The keys of a part; 0: they are not divided."""
        if not self.splits or spans.max_keys <= PART_KEYS:
            return 0
        return max(PART_KEYS, triton.next_power_of_2(triton.cdiv(spans.max_keys, MAX_PARTS)))
