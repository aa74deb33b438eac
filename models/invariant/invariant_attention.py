"""Attention in which a row does not depend on the other rows, keys and sequences of the batch. Called as
`models.network.attention.attend`.

It makes two passes over tiles of KEY_TILE keys at fixed positions of the sequence. The first finds each row's largest
score, which does not depend on the order. The second adds exponentials times values tile by tile. A masked or padding
key adds an exact zero. Arithmetic is in float32 whatever the values' type.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.errors import InvarianceError
from ..network.scoring import Scoring
from .invariant_linear import InvariantActivation
from .safe_sizes import is_prefix_of, split_rows

KEY_TILE = 256  # keys
QUERY_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # queries of a sequence at once
KEY_COUNTS = tuple(range(16, KEY_TILE + 1, 16))
MAX_SCORES = 1 << 20  # scores computed at once: about the size of a core's cache
MIN_QUERIES = 32  # queries at once, even if that exceeds MAX_SCORES
ONES_COLUMNS = 8  # columns; sums are computed as products with ones
BATCH_SIZES = (1, 2, 3, 4, 33)  # tested numbers of matrices in a batched product
REFERENCE_MATRICES = 4  # matrices in the reference product
REFERENCE_ROWS = 16  # rows of the reference product
KeyTiles = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class InvariantAttention:
    """Mixes values by scores, with tested numbers of queries at once and tested tile lengths."""

    query_counts: tuple[int, ...]
    key_counts: tuple[int, ...]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
        """[N, Q, H, D] over [N, KV, K, D], to [N, Q, H * D]; `mask` [N, 1 or H, Q, K] is added to the scores."""
        sequences, queries, heads, width = query.shape
        tiles = tile_keys(key.size(2), self.key_counts)
        length = tiles[-1][1]
        kept = _pad_keys(key, length), _pad_keys(value, length)
        hidden = None if mask is None and key.size(2) == length else _pad_mask_keys(mask, key, length)
        scaled = query.float() * scoring.scale
        folded = scaled.view(sequences, queries, key.size(1), -1, width).permute(0, 2, 3, 1, 4)  # [N, KV, S, Q, D]
        room = max(MAX_SCORES // (sequences * heads * length), MIN_QUERIES)
        sizes = tuple(size for size in self.query_counts if size <= room) or self.query_counts[:1]
        mixed = []
        for start, size in split_rows(queries, sizes):
            some = folded[:, :, :, start : start + size]
            shown = hidden if hidden is None or hidden.size(3) == 1 else hidden[:, :, :, start : start + size]
            mixed.append(mix_tiles(_pad_queries(some, size), kept, shown, tiles, scoring)[:, :, :, : some.size(3)])
        whole = mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=3)
        return whole.permute(0, 3, 1, 2, 4).reshape(sequences, queries, -1).to(query.dtype)


@lru_cache(maxsize=4096)
def tile_keys(length: int, keys: tuple[int, ...]) -> KeyTiles:
    """(start, end) of the tiles of `length` keys; the last is as short as the tested lengths allow."""
    whole = length // KEY_TILE * KEY_TILE
    tiles = [(start, start + KEY_TILE) for start in range(0, whole, KEY_TILE)]
    if whole < length:
        tiles.append((whole, whole + next(size for size in keys if size >= length - whole)))
    return tuple(tiles)


def mix_tiles(
    query: Tensor, kept: tuple[Tensor, Tensor], mask: Tensor | None, tiles: KeyTiles, scoring: Scoring
) -> Tensor:
    """[N, KV, S, Q, D] scaled queries over [N * KV, K, D] keys and values, to [N, KV, S, Q, D]; `mask` [N, 1, 1, Q, K],
    or [N, KV, S, Q, K]."""
    key, value = kept
    rows = query.reshape(len(key), -1, query.size(4))  # [N * KV, S * Q, D]
    scores = [torch.bmm(rows, key[:, start:end].transpose(1, 2)) for start, end in tiles]
    if scoring.cap:
        cap = InvariantActivation(lambda score: torch.tanh(score / scoring.cap) * scoring.cap)
        scores = [cap(score.flatten(0, 1)).view(score.shape) for score in scores]
    if mask is not None:
        for score, (start, end) in zip(scores, tiles, strict=True):
            score.view(*query.shape[:4], -1).add_(_pad_mask_queries(mask, query.size(3))[..., start:end])
    tops = [score.amax(dim=-1, keepdim=True) for score in scores]
    top = tops[0] if len(tops) == 1 else torch.stack(tops).amax(dim=0)
    sinks = None
    if scoring.sinks is not None:
        own = scoring.sinks.float().view(1, query.size(1), query.size(2), 1, 1)  # [1, KV, S, 1, 1]
        sinks = own.expand(*query.shape[:4], 1).reshape(top.shape)
        top = torch.maximum(top, sinks)
    mixed = total = None
    for score, (start, end) in zip(scores, tiles, strict=True):
        weights = score.sub_(top).exp_()
        part, share = torch.bmm(weights, value[:, start:end]), torch.bmm(weights, _ones(weights))
        mixed = part if mixed is None else mixed.add_(part)
        total = share if total is None else total.add_(share)
    assert mixed is not None
    assert total is not None
    if sinks is not None:
        total = total[..., :1] + (sinks - top).exp_()
    return mixed.div_(total[..., :1]).view(query.shape)


def self_test_attention(width: int, shared: int, device: torch.device) -> InvariantAttention:
    """The invariant attention for heads of `width`, `shared` query heads a key head. InvarianceError if too few shapes
    agree.

    Only the products are tested: what is between them adds in one order by construction, or does not add.
    """
    generator = torch.Generator().manual_seed(0)
    most = -(-QUERY_COUNTS[-1] * shared // REFERENCE_ROWS) * REFERENCE_ROWS
    lengths = (most, KEY_TILE, KEY_TILE)
    query, key, value = (
        torch.randn(REFERENCE_MATRICES, length, width, generator=generator).to(device) for length in lengths
    )
    weights = torch.rand(REFERENCE_MATRICES, most, KEY_TILE, generator=generator).to(device)
    scored = _by_rows(query, lambda rows: torch.bmm(rows, key.transpose(1, 2)))
    mixed = _by_rows(weights, lambda rows: torch.bmm(rows, value))
    queries = tuple(
        size
        for size in QUERY_COUNTS
        if is_prefix_of(torch.bmm(query[:, : size * shared], key.transpose(1, 2)), scored)
        and is_prefix_of(torch.bmm(weights[:, : size * shared], value), mixed)
        and _batches_agree(query, key, (weights, value), size * shared)
    )
    rows = tuple(size * shared for size in queries)
    keys = _safe_key_counts((query, key), (weights, value), scored, rows)
    if not queries or KEY_TILE not in keys or not _batches_agree(query, key, (weights, value), REFERENCE_ROWS):
        raise InvarianceError(f"products of attention heads of width {width} give a row other bits in another batch")
    return InvariantAttention(queries, keys)


def _by_rows(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([product(rows) for rows in torch.split(x, REFERENCE_ROWS, dim=1)], dim=1)


def _safe_key_counts(
    scored: tuple[Tensor, Tensor], mixed: tuple[Tensor, Tensor], reference: Tensor, rows: tuple[int, ...]
) -> tuple[int, ...]:
    """Lengths of a last tile that give the same scores as a whole tile, and the same sums as one padded with zeros."""
    (query, key), (weights, value) = scored, mixed

    def agrees(length: int, size: int) -> bool:
        short = weights[:, :size, :length].contiguous()
        full = F.pad(short, (0, KEY_TILE - length))
        return (
            is_prefix_of(torch.bmm(query[:, :size], key[:, :length].transpose(1, 2)), reference)
            and torch.equal(torch.bmm(short, value[:, :length]), torch.bmm(full, value))
            and torch.equal(torch.bmm(short, _ones(short)), torch.bmm(full, _ones(full)))
        )

    tried = {rows[0], REFERENCE_ROWS, rows[len(rows) // 2], rows[-1]} if rows else set()
    return tuple(length for length in KEY_COUNTS if all(agrees(length, size) for size in tried))


def _batches_agree(query: Tensor, key: Tensor, mixed: tuple[Tensor, Tensor], rows: int) -> bool:
    """Whether products of so many rows are the same beside any number of other matrices: with one matrix, threads may
    share its rows; with several, each thread may take a matrix."""
    weights, value = mixed
    queries, given = query[:, :rows].contiguous(), weights[:, :rows].contiguous()
    scored, summed = torch.bmm(queries, key.transpose(1, 2)), torch.bmm(given, value)
    totals = torch.bmm(given, _ones(given))
    for count in BATCH_SIZES:
        wide = [part.repeat(-(-count // len(part)), 1, 1)[:count] for part in (queries, key, given, value)]
        if not (
            torch.equal(torch.bmm(wide[0], wide[1].transpose(1, 2))[: len(queries)], scored[:count])
            and torch.equal(torch.bmm(wide[2], wide[3])[: len(queries)], summed[:count])
            and torch.equal(torch.bmm(wide[2], _ones(wide[2]))[: len(queries)], totals[:count])
        ):
            return False
    return True


def _pad_keys(kept: Tensor, length: int) -> Tensor:
    """[N, KV, K, D] to [N * KV, length, D] in float32, padded with zeros."""
    n, heads, count, width = kept.shape
    if count == length and kept.is_contiguous():
        return kept.float().view(n * heads, length, width)
    out = torch.empty(n, heads, length, width, device=kept.device)
    out[:, :, :count], out[:, :, count:] = kept, 0.0
    return out.view(n * heads, length, width)


def _pad_mask_keys(mask: Tensor | None, key: Tensor, length: int) -> Tensor:
    """The mask for [N, KV, K, D] keys padded to `length`: [N, 1, 1, Q, length], or 1 for any Q, or [N, KV, S, Q,
    length]."""
    if mask is None:
        mask = torch.zeros(1, 1, 1, key.size(2), device=key.device)
    if mask.size(3) < length:
        mask = F.pad(mask, (0, length - mask.size(3)), value=float("-inf"))
    return mask.float().view(len(mask), min(key.size(1), mask.size(1)), -1, *mask.shape[2:])


def _pad_queries(query: Tensor, size: int) -> Tensor:
    """[N, KV, S, Q, D] padded with zero queries up to `size`."""
    missing = size - query.size(3)
    return F.pad(query, (0, 0, 0, missing)) if missing else query


def _pad_mask_queries(mask: Tensor, rows: int) -> Tensor:
    """`mask` of Q queries padded to `rows`; padding rows see what the first row sees."""
    missing = rows - mask.size(3)
    if mask.size(3) == 1 or not missing:
        return mask
    return torch.cat((mask, mask[:, :, :, :1].expand(-1, -1, -1, missing, -1)), dim=3)


def _ones(weights: Tensor) -> Tensor:
    """[B, K, ONES_COLUMNS] ones, with which a product sums [B, m, K] weights; stored once."""
    return weights.new_ones(weights.size(2), ONES_COLUMNS).expand(len(weights), -1, -1)
