"""Attention of which a row does not depend on the rows, keys and sequences it is computed beside.

Knows nothing of caches or groups; it is called as `models.network.attention.attend` is.  The one idea: two passes
over tiles of TILE keys, at fixed places of the sequence.  The first finds each row's largest score, which no order
changes; the second adds up, tile after tile, exponentials times values.  A key that is hidden, or is only padding,
adds an exact zero.  Arithmetic is in float32, whatever the values are kept in."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.errors import InvarianceError
from .safe_sizes import cut, same

TILE = 256  # keys
ASKED = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # queries at once of a sequence
KEYS = tuple(range(16, TILE + 1, 16))
SCORES = 1 << 20  # numbers in flight: about what stays in a core's cache
FEWEST = 32  # queries at once, though they be more than that
ONES = 8  # columns: sums are products too, with ones
SHARES = (1, 2, 3, 4, 33)  # matrices in a batch of products, as far as tried
MATRICES = 4  # of the products that others are compared with
REFERENCE = 16  # and their rows
Tiles = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class InvariantMix:
    """Mixes values by scores: so many queries of a sequence at once, and tiles of so many keys, all proven to agree."""

    asked: tuple[int, ...]
    keys: tuple[int, ...]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """[N, Q, H, D] over [N, KV, K, D], to [N, Q, H * D]; `mask` [N, 1 or H, Q, K] is added to the scores."""
        sequences, asked, heads, width = query.shape
        tiles = tiled(key.size(2), self.keys)
        length = tiles[-1][1]
        kept = _padded(key, length), _padded(value, length)
        hidden = None if mask is None and key.size(2) == length else _hidden(mask, key, length)
        scaled = query.float() * (width**-0.5 if scale is None else scale)
        folded = scaled.view(sequences, asked, key.size(1), -1, width).permute(0, 2, 3, 1, 4)  # [N, KV, S, Q, D]
        room = max(SCORES // (sequences * heads * length), FEWEST)
        sizes = tuple(size for size in self.asked if size <= room) or self.asked[:1]
        mixed = []
        for start, size in cut(asked, sizes):
            some = folded[:, :, :, start : start + size]
            shown = hidden if hidden is None or hidden.size(3) == 1 else hidden[:, :, :, start : start + size]
            mixed.append(mix_tiles(_filled(some, size), kept, shown, tiles)[:, :, :, : some.size(3)])
        whole = mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=3)
        return whole.permute(0, 3, 1, 2, 4).reshape(sequences, asked, -1).to(query.dtype)


@lru_cache(maxsize=4096)
def tiled(length: int, keys: tuple[int, ...]) -> Tiles:
    """(start, end) of the tiles of `length` keys; the last as short as is proven."""
    whole = length // TILE * TILE
    tiles = [(start, start + TILE) for start in range(0, whole, TILE)]
    if whole < length:
        tiles.append((whole, whole + next(size for size in keys if size >= length - whole)))
    return tuple(tiles)


def mix_tiles(query: Tensor, kept: tuple[Tensor, Tensor], mask: Tensor | None, tiles: Tiles) -> Tensor:
    """[N, KV, S, Q, D] scaled queries over [N * KV, K, D] keys and values, to the same; `mask` [N, 1, 1, Q, K], or
    [N, KV, S, Q, K]."""
    key, value = kept
    rows = query.reshape(len(key), -1, query.size(4))  # [N * KV, S * Q, D]
    scores = [torch.bmm(rows, key[:, start:end].transpose(1, 2)) for start, end in tiles]
    if mask is not None:
        for score, (start, end) in zip(scores, tiles, strict=True):
            score.view(*query.shape[:4], -1).add_(_given(mask, query.size(3))[..., start:end])
    tops = [score.amax(dim=-1, keepdim=True) for score in scores]
    top = tops[0] if len(tops) == 1 else torch.stack(tops).amax(dim=0)
    mixed = total = None
    for score, (start, end) in zip(scores, tiles, strict=True):
        weights = score.sub_(top).exp_()
        part, share = torch.bmm(weights, value[:, start:end]), torch.bmm(weights, _ones(weights))
        mixed = part if mixed is None else mixed.add_(part)
        total = share if total is None else total.add_(share)
    assert mixed is not None
    assert total is not None
    return mixed.div_(total[..., :1]).view(query.shape)


def prove_attention(width: int, shared: int, device: torch.device) -> InvariantMix:
    """What gives a row the same bits, of heads of `width` that share keys by `shared`; InvarianceError if too little.

    The kernels are those of the products alone: what is between them adds in one order by construction, or not at all.
    """
    generator = torch.Generator().manual_seed(0)
    most = -(-ASKED[-1] * shared // REFERENCE) * REFERENCE
    lengths = (most, TILE, TILE)
    query, key, value = (torch.randn(MATRICES, length, width, generator=generator).to(device) for length in lengths)
    weights = torch.rand(MATRICES, most, TILE, generator=generator).to(device)
    scored = _by_rows(query, lambda rows: torch.bmm(rows, key.transpose(1, 2)))
    mixed = _by_rows(weights, lambda rows: torch.bmm(rows, value))
    asked = tuple(
        size
        for size in ASKED
        if same(torch.bmm(query[:, : size * shared], key.transpose(1, 2)), scored)
        and same(torch.bmm(weights[:, : size * shared], value), mixed)
        and _batches_agree(query, key, (weights, value), size * shared)
    )
    rows = tuple(size * shared for size in asked)
    keys = _agreeing_keys((query, key), (weights, value), scored, rows)
    if not asked or TILE not in keys or not _batches_agree(query, key, (weights, value), REFERENCE):
        raise InvarianceError(f"products of attention heads of width {width} give a row other bits in another batch")
    return InvariantMix(asked, keys)


def _by_rows(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([product(rows) for rows in torch.split(x, REFERENCE, dim=1)], dim=1)


def _agreeing_keys(
    scored: tuple[Tensor, Tensor], mixed: tuple[Tensor, Tensor], reference: Tensor, rows: tuple[int, ...]
) -> tuple[int, ...]:
    """Lengths of a last tile: scores as in a whole one, and sums as if zeros filled it up."""
    (query, key), (weights, value) = scored, mixed

    def agrees(length: int, size: int) -> bool:
        short = weights[:, :size, :length].contiguous()
        full = F.pad(short, (0, TILE - length))
        return (
            same(torch.bmm(query[:, :size], key[:, :length].transpose(1, 2)), reference)
            and torch.equal(torch.bmm(short, value[:, :length]), torch.bmm(full, value))
            and torch.equal(torch.bmm(short, _ones(short)), torch.bmm(full, _ones(full)))
        )

    tried = {rows[0], REFERENCE, rows[len(rows) // 2], rows[-1]} if rows else set()
    return tuple(length for length in KEYS if all(agrees(length, size) for size in tried))


def _batches_agree(query: Tensor, key: Tensor, mixed: tuple[Tensor, Tensor], rows: int) -> bool:
    """Whether products of so many rows are the same beside any number of others: threads may share the rows of one
    matrix where they would take a matrix each of several."""
    weights, value = mixed
    asked, given = query[:, :rows].contiguous(), weights[:, :rows].contiguous()
    scored, summed = torch.bmm(asked, key.transpose(1, 2)), torch.bmm(given, value)
    totals = torch.bmm(given, _ones(given))
    for count in SHARES:
        wide = [part.repeat(-(-count // len(part)), 1, 1)[:count] for part in (asked, key, given, value)]
        if not (
            torch.equal(torch.bmm(wide[0], wide[1].transpose(1, 2))[: len(asked)], scored[:count])
            and torch.equal(torch.bmm(wide[2], wide[3])[: len(asked)], summed[:count])
            and torch.equal(torch.bmm(wide[2], _ones(wide[2]))[: len(asked)], totals[:count])
        ):
            return False
    return True


def _padded(kept: Tensor, length: int) -> Tensor:
    """[N, KV, K, D] to [N * KV, length, D] in float32, zeros where there was nothing."""
    n, heads, count, width = kept.shape
    if count == length and kept.is_contiguous():
        return kept.float().view(n * heads, length, width)
    out = torch.empty(n, heads, length, width, device=kept.device)
    out[:, :, :count], out[:, :, count:] = kept, 0.0
    return out.view(n * heads, length, width)


def _hidden(mask: Tensor | None, key: Tensor, length: int) -> Tensor:
    """What is added to the scores of [N, KV, K, D] keys padded to `length`: [N, 1, 1, Q, length], or 1 for any Q, or
    [N, KV, S, Q, length]."""
    if mask is None:
        mask = torch.zeros(1, 1, 1, key.size(2), device=key.device)
    if mask.size(3) < length:
        mask = F.pad(mask, (0, length - mask.size(3)), value=float("-inf"))
    return mask.float().view(len(mask), min(key.size(1), mask.size(1)), -1, *mask.shape[2:])


def _filled(query: Tensor, size: int) -> Tensor:
    """[N, KV, S, Q, D] with zeros for queries up to `size`."""
    missing = size - query.size(3)
    return F.pad(query, (0, 0, 0, missing)) if missing else query


def _given(mask: Tensor, rows: int) -> Tensor:
    """`mask` of Q queries for `rows` of them, the last of which may be nobody's and see what the first sees."""
    missing = rows - mask.size(3)
    if mask.size(3) == 1 or not missing:
        return mask
    return torch.cat((mask, mask[:, :, :, :1].expand(-1, -1, -1, missing, -1)), dim=3)


def _ones(weights: Tensor) -> Tensor:
    """[B, K, ONES] that add up [B, m, K] weights, stored once."""
    return weights.new_ones(weights.size(2), ONES).expand(len(weights), -1, -1)
