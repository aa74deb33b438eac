"""Attention: masks, scores and mixed values. The only module that converts between the ragged layout and padded groups.

Dense layers work on packed rows without padding. Scores need rectangles, so sequences of similar size attend together
in one AttentionGroup; `group_sequences` weighs a group's fixed cost against its padding.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cache import ByHeads, MemoryView, SourceMemory
from .lora import LinearFunction, apply_linear
from .mlp import logistic
from .model_config import ModelConfig
from .positions import DistanceBias, DistanceVectors, LinearBias, RelativeVectors, Rotary, rotate
from .ragged import RaggedBatch
from .scan_order import ScanOrder
from .scoring import Scoring
from .varlen import attention_window
from .work_pieces import (
    ATTENDING_ROWS,
    LAYER_PRODUCTS,
    LEAST_ROWS,
    Pieces,
    finish,
    map_ranges,
    rows_per_piece,
    split_range,
)

AttentionFunction = Callable[[Tensor, Tensor, Tensor, Tensor | None, Scoring], Tensor]  # as `attend`
RowFunction = Callable[[Tensor, LinearFunction], Tensor]
GroupFunction = Callable[["AttentionGroup", slice], AttentionFunction]
GROUP_COST = 1024  # fixed cost of one more group, in scores; measured on two cores
EDGE_COST = 2  # reading one more padded row or key, in scores
KEY_BORDER = 512  # ranges of keys begin and end at multiples of it, as the blocks of kernels do: sums keep their order
GROUP_KEYS = 8192  # of all members, unless one alone has more: limits the memory that cached keys are gathered into


def group_sequences(lengths: Sequence[int], key_counts: Sequence[int]) -> list[list[int]]:
    """Cut sequences with `lengths` query rows over `key_counts` keys into groups that are padded to one rectangle
    each."""
    order = sorted(range(len(lengths)), key=lambda n: (-lengths[n], -key_counts[n], n))
    groups: list[list[int]] = []
    rows = keys = 0
    for n in order:
        merged_rows, merged_keys = max(rows, lengths[n]), max(keys, key_counts[n])
        waste = merged_rows * merged_keys - lengths[n] * key_counts[n]
        waste += EDGE_COST * (merged_rows - lengths[n] + merged_keys - key_counts[n])
        room = groups and (len(groups[-1]) + 1) * keys <= GROUP_KEYS
        if room and merged_keys == keys and waste <= GROUP_COST:
            groups[-1].append(n)
        else:
            groups.append([n])
            rows, keys = lengths[n], key_counts[n]
    return [sorted(group) for group in groups]


def count_padding_rows(lengths: Sequence[int], key_counts: Sequence[int]) -> int:
    """The number of padding rows in the groups of such sequences."""
    groups = group_sequences(lengths, key_counts)
    return sum(max(lengths[n] for n in group) * len(group) - sum(lengths[n] for n in group) for group in groups)


@dataclass(frozen=True)
class GroupRows:
    """The rows of a group: of the sequences `members`, numbered in each, from `first` to before `end`."""

    members: list[int]
    first: int
    end: int


@dataclass(frozen=True)
class AttentionGroup:
    """N sequences, or a range of the rows of each, that attend together, padded to Q rows and K keys.

    `rows` are their packed rows [N * Q] (a slice if they are contiguous and need no padding), `keys` the packed rows of
    their keys [N * K] or, with a cache, its pieces [N, KV, B]. Masks are added to the scores; None hides nothing.
    """

    size: int
    rows: Tensor | slice
    keys: Tensor | slice | ByHeads
    mask: Tensor | None  # [N, 1, Q, K], or [N, H, Q, K] with a bias in it
    window_mask: Tensor | None
    window_keys: Tensor | slice | ByHeads  # as `keys`, of windowed layers
    # [N, Q, K] tokens that a key is before a row, or the bucket of that distance, if scores depend on it; N may be 1
    distances: Tensor | None = None

    def with_bias(self, bias: DistanceBias | LinearBias, dtype: torch.dtype) -> "AttentionGroup":
        """The group with a bias added to its masks."""
        added = bias(self.distances).to(dtype)  # [N, H, Q, K]
        mask = added if self.mask is None else added + self.mask
        same = self.window_mask is self.mask  # as large as all scores, so it is added once
        return replace(self, mask=mask, window_mask=mask if same else added + self.window_mask)


@dataclass(frozen=True)
class AttentionContext:
    """What all layers of one forward pass share: groups, masks, rotations, and the order of packed rows.

    There are no groups if one kernel attends for all sequences (`RaggedBatch.spans`) or if no layer attends. `scan` is
    for recurrent layers. `cross` is for cross-attention
    (models.network.cross_attention). `kept` collects the keys and values that later layers read, by layer.
    `layer_inputs` are the embeddings of each layer. `in_pieces`: layers are computed in pieces of bounded work.
    """

    batch: RaggedBatch
    groups: list[AttentionGroup]
    order: Tensor | None  # [T] where each packed row stands in the groups' concatenated output; None: in order
    rotation: tuple[Tensor, Tensor] | None  # rotation of full layers
    window_rotation: tuple[Tensor, Tensor] | None
    distances: Tensor | None  # the vectors [C, W] of the buckets
    last_layer: int
    scan: ScanOrder | None = None
    cross: "CrossAttentionContext | None" = None
    layer_inputs: Tensor | None = None  # [T, depth, P]
    in_pieces: bool = False
    global_tokens: tuple[range, ...] = ()  # of each sequence, if there may be such tokens; see GlobalAttention
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        batch: RaggedBatch,
        config: ModelConfig,
        encodings: tuple[Sequence[Rotary], nn.Module],
        dtype: torch.dtype,
        in_pieces: bool,
    ) -> Pieces["AttentionContext"]:
        """`encodings`: of positions, the rotaries, which are none, one for all layers, or those of full and of windowed
        layers; and one of the distance modules of models.network.positions, or another module if there is none.

        Each group is a piece.
        """
        rotaries, distances = encodings
        turns = [rotary.rotation(batch.positions, dtype) for rotary in rotaries]
        rows, groups = _group_batch(batch, config, in_pieces) if config.attention_layers else [], list[AttentionGroup]()
        global_tokens = find_global_tokens(batch, config)
        for some in rows:
            group = _build_group(batch, config, some, dtype, global_tokens)
            if isinstance(distances, DistanceVectors):
                assert group.distances is not None
                group = replace(group, distances=distances.look_up(group.distances, max(batch.lengths)))
            elif isinstance(distances, DistanceBias | LinearBias):
                group = group.with_bias(distances, dtype)
            groups.append(group)
            yield
        vectors = distances() if isinstance(distances, DistanceVectors) else None
        full, windowed = (turns[0], turns[-1]) if turns else (None, None)
        order = _output_order(batch, rows) if rows else None
        scan = ScanOrder.of(batch, config.recurrent.kernel) if config.recurrent and config.is_recurrent else None
        made = cls(batch, groups, order, full, windowed, vectors, config.depth - 1, scan)
        return replace(made, in_pieces=in_pieces, global_tokens=global_tokens)

    def select_output_rows(self, x: Tensor, layer: int) -> Tensor:
        """[T, W] to the output rows [M, W] if no later layer needs the others: after the last attention."""
        if self.batch.output_rows is None or layer < self.last_layer:
            return x
        return x.index_select(0, self.batch.output_rows)

    def layer_input(self, layer: int) -> Tensor:
        """[M, P] the embeddings of the rows that `layer` computes behind its attention."""
        assert self.layer_inputs is not None
        return self.select_output_rows(self.layer_inputs[:, layer], layer)

    def linear_function(self, layer: int, start: int, end: int) -> LinearFunction:
        """The function that applies linear layers to rows from `start` to before `end`: before attention, or after it
        in `layer` (see `select_output_rows`)."""
        additions = self.batch.additions
        if additions is None:
            return apply_linear
        narrowed = self.batch.output_rows is not None and layer == self.last_layer
        return (additions.for_output_rows() if narrowed else additions).within(start, end).apply

    def map_rows(self, function: RowFunction, x: Tensor, products: int, layer: int = -1) -> Pieces[Tensor]:
        """`function` of rows [M, W], and of what applies linear layers to them, to [M, O]; a row takes so many
        `products`. `layer` is that of linear_function."""

        def compute(start: int, end: int) -> Tensor:
            return function(x[start:end], self.linear_function(layer, start, end))

        size = rows_per_piece(products, LAYER_PRODUCTS) if self.in_pieces else len(x)
        return (yield from map_ranges(compute, len(x), size))

    def attend(self, attention: "Attention", heads: tuple[Tensor, Tensor, Tensor]) -> Pieces[Tensor]:
        """[T, H, D] queries over [T, KV, D] keys and values (and the cached ones): mixed values [T, H * D]."""
        query, key, value = heads
        config, layer, source = attention.config, attention.layer, attention.key_layer
        cache, windowed = self.batch.cache, config.is_windowed(layer)
        if cache is not None and source == layer:
            cache.cache.write(layer, cache.rows_in(layer), key, value)
        if self.batch.spans is not None:
            kept = (key, value) if cache is None else (cache.cache.keys[source], cache.cache.values[source])
            return self.batch.spans.attend(query, kept, attention_window(config, layer), attention.scoring)
        mixed, choose_function = [], attention.attention_function(self)
        for group in self.groups:
            if isinstance(group.keys, Mapping):
                assert cache is not None
                pieces = group.window_keys if source in cache.cache.own_blocks else group.keys
                assert isinstance(pieces, Mapping)
                keys, values = cache.cache.read(source, pieces)
            else:
                rows = group.window_keys if windowed else group.keys
                assert not isinstance(rows, Mapping)
                keys, values = (_gather_rows(kept, rows, group.size).transpose(1, 2) for kept in (key, value))
            queries = _gather_rows(query, group.rows, group.size)
            mask = group.window_mask if windowed else group.mask
            parts, shared, ranges = (
                list[Tensor](),
                config.heads // keys.size(1),
                self._split_heads(queries, keys, config),
            )
            for first, end in ranges:
                some, asking = slice(first, end), slice(first * shared, end * shared)
                if len(ranges) == 1:
                    some = asking = slice(None)
                shown = mask if mask is None or mask.size(1) == 1 else mask[:, asking]
                given = queries[:, :, asking], keys[:, some], values[:, some], shown
                parts.append(choose_function(group, asking)(*given, attention.scoring.of_heads(asking)).flatten(0, 1))
                yield
            mixed.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
        packed = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return packed if self.order is None else packed.index_select(0, self.order)

    def _split_heads(self, query: Tensor, key: Tensor, config: ModelConfig) -> list[tuple[int, int]]:
        """The ranges of key heads that are a piece each, of [N, Q, H, D] queries and [N, KV, K, D] keys."""
        products = count_score_products(config, query.numel() // key.size(1), key.size(2))
        return split_range(key.size(1), max(LAYER_PRODUCTS // products, 1) if self.in_pieces else key.size(1))


@dataclass(frozen=True)
class CrossAttentionContext:
    """What the cross-attention of all blocks shares: a context for each memory, and the place of each row in their
    concatenated outputs (None: in order)."""

    memory_contexts: list[tuple[SourceMemory, AttentionContext]]
    order: Tensor | None
    view: MemoryView


def has_pieces(batch: RaggedBatch) -> bool:
    """Whether layers compute this batch in pieces of bounded work. Steps with a cache are not interrupted, and on a GPU
    work is not done when a piece of it ends."""
    in_groups = batch.cache is None and batch.spans is None
    return in_groups and batch.tokens.device.type == "cpu" and not torch.is_grad_enabled()


def count_score_products(config: ModelConfig, numbers: int, keys: int) -> int:
    """Products of attention of queries that have so many `numbers` over `keys`. Selecting a score by its distance
    takes about as long as computing it."""
    return (6 if config.position == "distance" else 2) * numbers * keys


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017): [N, Q, H, D] over [N, KV, K, D], to [N, Q, H * D].

    `mask` [N, 1 or H, Q, K] is added to the scores. The H / KV query heads that share a key head become further rows of
    it, so that it is read once (grouped-query attention, Ainslie et al. 2023).
    """
    n, rows, heads, width = query.shape
    kv_heads = key.size(1)
    shared = heads // kv_heads
    folded = query.view(n, rows, kv_heads, shared, width).permute(0, 2, 3, 1, 4).reshape(n, kv_heads, -1, width)
    if mask is not None and shared > 1:
        mask = fold_mask(mask, kv_heads, shared)
    if scoring.cap or scoring.sinks is not None:
        sinks = None if scoring.sinks is None else scoring.sinks.view(kv_heads, shared, 1).repeat_interleave(rows, 1)
        scores = scoring.score(folded.float(), key.float(), mask)
        mixed = (scoring.weigh(scores, None if sinks is None else sinks.view(kv_heads, -1, 1)).to(value.dtype)) @ value
    else:
        mixed = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scoring.scale)
    # [N, KV, S * Q, D]
    return mixed.view(n, kv_heads, shared, rows, width).permute(0, 3, 1, 2, 4).reshape(n, rows, heads * width)


def fold_mask(mask: Tensor, kv_heads: int, shared: int) -> Tensor:
    """[N, 1 or H, Q, K] to [N, KV, S * Q, K], for query heads that share a key head as further rows."""
    if mask.size(1) > 1:
        return mask.reshape(len(mask), kv_heads, -1, mask.size(3))
    return mask.repeat(1, 1, shared, 1) if mask.size(2) > 1 else mask


class HeadNorm(nn.Module):
    """The norm of queries or keys: of each head over its features, with one weight for all heads ("shared") or one for
    each ("per_head"), or of all heads together ("joint"); see ModelConfig.query_key_norm."""

    def __init__(self, config: ModelConfig, heads: int) -> None:
        super().__init__()
        width = config.head_width
        shape = {"shared": (width,), "per_head": (heads, width), "joint": (heads * width,)}[config.query_key_norm]
        self.weight = nn.Parameter(torch.ones(shape)) if config.query_key_norm_weight else None
        has_bias = config.norm == "layer" and config.query_key_norm_bias
        self.bias = nn.Parameter(torch.zeros(shape)) if has_bias else None
        self.is_joint, self.is_rms, self.eps = config.query_key_norm == "joint", config.norm == "rms", config.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """[T, H, D] to [T, H, D]."""
        flat = x.flatten(-2) if self.is_joint else x
        if self.is_rms and (self.weight is None or self.weight.dim() == 1):
            return F.rms_norm(flat, flat.shape[-1:], self.weight, self.eps).view_as(x)
        normed = (
            F.rms_norm(flat, flat.shape[-1:], None, self.eps)
            if self.is_rms
            else F.layer_norm(flat, flat.shape[-1:], eps=self.eps)
        )
        scaled = normed if self.weight is None else normed * self.weight
        return (scaled if self.bias is None else scaled + self.bias).view_as(x)


class Attention(nn.Module):
    """Multi-head self-attention with grouped keys and values. `mix` computes scores and mixes values.

    `config` has the sizes of this layer. A layer that reads the keys and values of another has only queries.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer, self.key_layer = config, layer, config.key_layer(layer)
        self.mix: AttentionFunction = attend
        inner, kv_inner = config.heads * config.head_width, config.kv_heads * config.head_width
        has_keys, has_values = self.key_layer == layer, not config.has_tied_values(layer)
        self.query = nn.Linear(config.width, inner, bias=config.qkv_bias)
        self.key = nn.Linear(config.width, kv_inner, bias=config.qkv_bias) if has_keys else None
        self.value = nn.Linear(config.width, kv_inner, bias=config.qkv_bias) if has_keys and has_values else None
        self.output = nn.Linear(inner, config.width, bias=config.output_bias)
        normed = config.has_query_key_norm(layer)
        self.query_norm = HeadNorm(config, config.heads) if normed else nn.Identity()
        self.key_norm = HeadNorm(config, config.kv_heads) if normed and has_keys else nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(config.heads)) if config.sinks else None
        self.gate = nn.Linear(config.width, inner, bias=False) if config.attention_gate else None
        self.products = config.width * inner  # of a row and its widest matrix

    @property
    def scoring(self) -> Scoring:
        scale = self.config.score_scale or self.config.head_width**-0.5
        return Scoring(scale, self.config.score_cap, self.sinks)

    def forward(self, x: Tensor, frame: AttentionContext) -> Tensor:
        """[T, W] to [T, W]."""
        return finish(self.read(x, frame))

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        """As `forward`, in pieces."""
        query = self.turn((yield from self.project(self.query, x, frame)), self.query_norm, frame)
        key, value = yield from self.keys_and_values(x, frame)
        mixed = yield from frame.attend(self, (query, key, value))
        if self.gate is not None:
            gate = self.gate
            mixed = mixed * (yield from frame.map_rows(lambda rows, _: logistic(gate(rows)), x, self.products))
        return (yield from self.project(self.output, mixed, frame))

    def project(self, linear: nn.Linear, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        """Rows [T, in] to [T, out]."""
        return (yield from frame.map_rows(lambda rows, through: through(linear, rows), x, self.products))

    def keys_and_values(self, x: Tensor, frame: AttentionContext) -> Pieces[tuple[Tensor, Tensor]]:
        """[T, KV, D] of the rows [T, W], or of the layer that this one reads."""
        if self.key is None:
            return frame.kept[self.key_layer]
        config = self.config
        projected = yield from self.project(self.key, x, frame)
        value = self.limit(projected if self.value is None else (yield from self.project(self.value, x, frame)))
        if config.value_norm:
            value = F.rms_norm(value, value.shape[-1:], None, config.norm_eps)
        kept = self.turn(projected, self.key_norm, frame), value
        if self.layer in config.read_layers:
            frame.kept[self.layer] = kept
        return kept

    def turn(self, projected: Tensor, norm: nn.Module, frame: AttentionContext) -> Tensor:
        """[T, H * D] queries or keys to [T, H, D], normed and rotated."""
        config = self.config
        if config.norm_after_rotation:
            return norm(self.rotate(self.limit(projected), frame))  # type: ignore[no-any-return]
        x: Tensor = norm(projected.view(len(projected), -1, config.head_width))
        return self.rotate(self.limit(x), frame)

    def limit(self, x: Tensor) -> Tensor:
        """[T, H, D] queries, keys or values within `qkv_limit`."""
        limit = self.config.qkv_limit
        x = x.view(len(x), -1, self.config.head_width)
        return x.clamp(-limit, limit) if limit else x

    def rotate(self, x: Tensor, frame: AttentionContext) -> Tensor:
        """[T, H, D] queries or keys at their positions."""
        turns = frame.window_rotation if self.config.is_windowed(self.layer) else frame.rotation
        return x if turns is None or not self.config.is_rotated(self.layer) else rotate(x, turns)

    def attention_function(self, frame: AttentionContext) -> GroupFunction:  # noqa: ARG002
        """The function of a group, and of some of the query heads, to what mixes values for them in this forward
        pass."""
        return lambda _group, _heads: self.mix


class DisentangledAttention(Attention):
    """Disentangled attention: scores also have content-to-position and position-to-content terms (He et al. 2021)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        if config.has_distance_projections:
            self.distance_query, self.distance_key = (
                nn.Linear(config.width, config.heads * config.head_width) for _ in range(2)
            )

    @property
    def distance_projections(self) -> tuple[nn.Module, nn.Module]:
        """The projections of distance vectors to queries and keys."""
        assert self.key is not None
        has_own = self.config.has_distance_projections
        return (self.distance_query, self.distance_key) if has_own else (self.query, self.key)

    def attention_function(self, frame: AttentionContext) -> GroupFunction:
        vectors = frame.distances
        assert vectors is not None
        position_queries, position_keys = (
            made(vectors).unflatten(-1, (-1, self.config.head_width)) for made in self.distance_projections
        )

        def choose(group: AttentionGroup, heads: slice) -> AttentionFunction:
            kinds = group.distances
            assert kinds is not None

            def mix(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
                of = kinds[:, None].expand(query.size(0), query.size(2), -1, -1)
                bias = distance_scores(
                    query.transpose(1, 2), position_keys[:, heads], of
                )  # [N, H, Q, K], as large as all scores, so it is changed in place
                bias.add_(distance_scores(key, position_queries[:, heads], of.mT).mT).mul_(scoring.scale)
                return self.mix(query, key, value, bias if mask is None else bias.add_(mask), scoring)

            return mix

        return choose


def distance_scores(tokens: Tensor, distances: Tensor, of: Tensor) -> Tensor:
    """[N, H, Q, K] products of token features [N, H, Q, D] and distance vectors [C, H, D], selected by the buckets `of`
    [N, H, Q, K]."""
    return (tokens @ distances.permute(1, 2, 0)).gather(-1, of)


class BiasedAttention(Attention):
    """Attention with a distance bias of its own; see DistanceBias."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.distances = DistanceBias(config.distances, config.farthest, config.heads, config.causal)

    def attention_function(self, frame: AttentionContext) -> GroupFunction:  # noqa: ARG002
        def choose(group: AttentionGroup, heads: slice) -> AttentionFunction:
            bias = self.distances(group.distances)[:, heads]  # [N, H, Q, K]

            def mix(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
                added = bias.to(query.dtype)
                return self.mix(query, key, value, added if mask is None else added + mask, scoring)

            return mix

        return choose


class TwoStreamAttention(Attention):
    """Two rows for each token (Qi et al. 2020, arXiv:2001.04063, section 2.2): its own, as in causal attention, and one
    that predicts the token after it, which attends to the own rows up to its token and to itself.

    The rows of a token are side by side. Only the keys and values of own rows are kept. Each row computes from its
    state a bias for each head and bucket of distances; a predicting row is one token further than its token, and at no
    distance from itself.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.distance_bias = nn.Linear(config.width, config.distances * config.heads)

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        """[2 T, W] to [2 T, W], in one piece or two."""
        assert self.key is not None
        assert self.value is not None
        shape = (-1, 2, self.config.heads, self.config.head_width)
        query, key, value = (made(x).view(shape) for made in (self.query, self.key, self.value))
        bias = self.distance_bias(x).view(*query.shape[:2], -1, self.config.heads).mT  # [T, 2, H, C]
        rows = torch.cat((query, key, value, bias), dim=-1)  # what `mix` needs of a row
        mixed = yield from frame.attend(self, (rows, key[:, 0], value[:, 0]))  # [T, 2 * H * D]
        out: Tensor = self.output(mixed.view(len(x), -1))
        return out

    def attention_function(self, frame: AttentionContext) -> GroupFunction:
        assert not frame.in_pieces, "all heads of a row are together"
        return lambda group, _heads: self.mix_group(group)

    def mix_group(self, group: AttentionGroup) -> AttentionFunction:
        """What mixes values for a group."""
        assert group.distances is not None
        before, width = group.distances, self.config.head_width
        of = self.bucket(torch.stack((before, before + 1), dim=2).flatten(1, 2))[:, None]  # [N, 1, 2 Q, K]

        def mix(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
            """`query` [N, Q, 2, H, 3 D + C] has the queries, keys, values and biases of both rows."""
            rows = query.permute(0, 3, 1, 2, 4).flatten(2, 3)  # [N, H, 2 Q, 3 D + C]
            asking, own_key, own_value, bias = torch.split(rows, [width, width, width, self.config.distances], dim=-1)
            scores = (asking @ key.mT * scoring.scale).add_(bias.gather(-1, of.expand(*rows.shape[:3], -1)))
            if mask is not None:
                scores.add_(mask.repeat_interleave(2, dim=2))
            itself = (asking * own_key).sum(dim=-1, keepdim=True) * scoring.scale + bias[..., :1]  # [N, H, 2 Q, 1]
            itself[:, :, ::2] = float("-inf")  # own rows are among the keys
            weights = torch.cat((scores, itself), dim=-1).softmax(dim=-1)
            mixed: Tensor = weights[..., :-1] @ value + weights[..., -1:] * own_value  # [N, H, 2 Q, D]
            return mixed.view(*mixed.shape[:2], -1, 2, width).permute(0, 2, 3, 1, 4).flatten(2)  # [N, Q, 2 * H * D]

        return mix

    def bucket(self, before: Tensor) -> Tensor:
        """The bucket of distances, as of a causal DistanceBias, except that the number of near distances is added
        before the logarithm is rounded down, as in the reference."""
        kinds, away = self.config.distances, before.clamp(min=0)
        near = kinds // 2
        spread = (away.clamp(min=1).float() / near).log() / math.log(self.config.farthest / near) * (kinds - near)
        return torch.where(away < near, away, (near + spread).clamp(max=kinds - 1).long())


class RelativeAttention(Attention):
    """Keys and values get a vector for their distance to the row (Shaw et al. 2018); see RelativeVectors."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.relative = RelativeVectors(config.farthest, config.head_width)
        self.weigh: Callable[[Tensor], Tensor] = partial(torch.softmax, dim=-1)  # used instead of `mix`

    def attention_function(self, frame: AttentionContext) -> GroupFunction:  # noqa: ARG002
        return lambda group, _heads: self.mix_group(group)

    def mix_group(self, group: AttentionGroup) -> AttentionFunction:
        """What mixes values for a group, with any of its heads."""
        assert group.distances is not None
        of = self.relative.bucket(group.distances)[:, None]  # [N, 1, Q, K]

        def mix(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
            """Weights of keys of one kind are added up, times that kind's vector: no value is changed for a row."""
            shared = query.size(2) // key.size(1)
            key, value = (kept.repeat_interleave(shared, dim=1) for kept in (key, value))
            scaled_query = query.transpose(1, 2) * scoring.scale  # [N, H, Q, D]
            kinds = of.expand(*scaled_query.shape[:3], -1)
            scores = (scaled_query @ key.mT).add_((scaled_query @ self.relative.keys.weight.T).gather(-1, kinds))
            weights = self.weigh(scores if mask is None else scores.add_(mask))
            sums = weights.new_zeros(*scaled_query.shape[:3], self.relative.values.num_embeddings)
            sums = sums.scatter_add(-1, kinds, weights)
            return (weights @ value + sums @ self.relative.values.weight).transpose(1, 2).flatten(2)

        return mix


class LatentAttention(Attention):
    """Latent attention: keys and values of all heads are computed from one narrow vector for each token (DeepSeek-V2,
    arXiv:2405.04434). See LatentConfig.

    The rotated features of a head come first; those of keys are the same for all heads. The cache has the keys and
    values of every head, the values padded with zeros to the width of keys. For a token and a layer that is 2 * heads *
    head_width numbers; the narrow vector and the rotated features would be rank + rotary_width (49,152 and 576 in
    DeepSeek-V3). Adapters do not change it unmerged.
    """

    key: nn.Linear
    value: nn.Linear

    def __init__(self, config: ModelConfig, layer: int) -> None:
        nn.Module.__init__(self)
        assert config.latent is not None
        self.config, self.layer, self.key_layer, self.latent = config, layer, layer, config.latent
        self.mix: AttentionFunction = attend
        rank, query_rank, rotated = self.latent.rank, self.latent.query_rank, config.rotary_width
        if query_rank:
            self.query_down = nn.Linear(config.width, query_rank, bias=config.qkv_bias)
            self.query_down_norm = nn.RMSNorm(query_rank, self.latent.norm_eps)
        self.query = nn.Linear(query_rank or config.width, config.heads * config.head_width, bias=False)
        self.down = nn.Linear(config.width, rank, bias=config.qkv_bias)
        self.down_norm = nn.RMSNorm(rank, self.latent.norm_eps)
        self.key_rotated = nn.Linear(config.width, rotated, bias=config.qkv_bias)
        self.key = nn.Linear(rank, config.heads * (config.head_width - rotated), bias=False)
        self.value = nn.Linear(rank, config.heads * self.latent.value_width, bias=False)
        self.output = nn.Linear(config.heads * self.latent.value_width, config.width, bias=config.output_bias)
        self.sinks = None
        self.products = max(config.width, query_rank, rank) * config.heads * config.head_width

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        """As `forward`, in pieces."""
        heads = self.config.heads
        asked = yield from frame.map_rows(lambda rows, _: self.ask(rows), x, self.products)
        query = asked.view(len(x), heads, -1)
        narrow = self.down_norm(self.down(x))  # [T, rank]
        rotated = self.key_rotated(x)[:, None]  # [T, 1, R]
        turns = frame.window_rotation if self.config.is_windowed(self.layer) else frame.rotation
        assert turns is not None, "description.invalid_fields has refused it"
        if self.config.is_rotated(self.layer):
            query, rotated = rotate(query, turns), rotate(rotated, turns)
        plain = (yield from self.project(self.key, narrow, frame)).view(len(x), heads, -1)
        key = torch.cat((rotated.expand(-1, heads, -1), plain), dim=-1)
        value = (yield from self.project(self.value, narrow, frame)).view(len(x), heads, -1)
        value = F.pad(value, (0, self.config.head_width - self.latent.value_width))
        mixed = (yield from frame.attend(self, (query, key, value))).view(len(x), heads, -1)
        return (yield from self.project(self.output, mixed[:, :, : self.latent.value_width].flatten(1), frame))

    def project(self, linear: nn.Linear, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        return (yield from frame.map_rows(lambda rows, _: apply_linear(linear, rows), x, self.products))

    def ask(self, x: Tensor) -> Tensor:
        """Rows [T, W] to their queries [T, H * D]."""
        asked: Tensor = self.query(self.query_down_norm(self.query_down(x)) if self.latent.query_rank else x)
        return asked


class GlobalAttention(Attention):
    """Attention in which global tokens see the whole sequence, through projections of their own, and the others a
    window and the global tokens (Longformer, Beltagy et al. 2020, arXiv:2004.05150); see ModelConfig.global_tokens.

    Of the second projections, neither queries nor keys are normed or rotated. Adapters do not change them unmerged.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        inner, kept = config.heads * config.head_width, config.kv_heads * config.head_width
        self.global_query, self.global_key, self.global_value = (
            nn.Linear(config.width, outputs, bias=config.qkv_bias) for outputs in (inner, kept, kept)
        )

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        """As `forward`, in pieces."""
        query = self.turn((yield from self.project(self.query, x, frame)), self.query_norm, frame)
        key, value = yield from self.keys_and_values(x, frame)
        mixed = yield from frame.attend(self, (query, key, value))
        mixed = yield from self.replace_global(x, mixed, frame)
        return (yield from self.project(self.output, mixed, frame))

    def project_global(self, linear: nn.Linear, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        """[T, W] to [T, H, D]."""
        made = yield from frame.map_rows(lambda rows, _: apply_linear(linear, rows), x, self.products)
        return made.view(len(x), -1, self.config.head_width)

    def replace_global(self, x: Tensor, mixed: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        """The mixed values [T, H * D] with those of the global tokens, which are computed sequence by sequence."""
        starts = frame.batch.starts
        rows = [start + place for start, some in zip(starts, frame.global_tokens, strict=False) for place in some]
        if not rows:
            return mixed
        where = torch.tensor(rows, device=x.device)
        query = yield from self.project_global(self.global_query, x.index_select(0, where), frame)
        key = yield from self.project_global(self.global_key, x, frame)
        value = yield from self.project_global(self.global_value, x, frame)
        queries, found = torch.split(query, [len(some) for some in frame.global_tokens]), list[Tensor]()
        for asking, (start, end), some in zip(queries, pairwise(starts), frame.global_tokens, strict=True):
            products = count_score_products(self.config, self.config.heads * self.config.head_width, end - start)
            size = rows_per_piece(products, LAYER_PRODUCTS) if frame.in_pieces else len(some)
            for first, last in split_range(len(some), size) if some else ():
                own = asking[first:last], key[start:end], value[start:end]
                found.append(self.mix_global(*own, some.start + first))
                yield
        return mixed.index_copy(0, where, torch.cat(found))

    def mix_global(self, query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:  # noqa: ARG002
        """[G, H, D] queries of the tokens from `first` on, over all [K, KV, D] of their sequence, to [G, H * D]."""
        keys, values = (each.transpose(0, 1)[None] for each in (key, value))
        return self.mix(query[None], keys, values, None, self.scoring)[0]


def find_global_tokens(batch: RaggedBatch, config: ModelConfig) -> tuple[range, ...]:
    """The places of the global tokens of each sequence, of which every token is in the batch; see ModelConfig. Nothing
    if the network has none. A sequence without a separator has none."""
    if not config.global_tokens:
        return ()
    if config.global_tokens == "first":
        return (range(1),) * len(batch.lengths)
    tokens, found = batch.tokens.tolist(), list[range]()
    for start, end in pairwise(batch.starts):
        own = tokens[start:end]
        first = own.index(config.separator) if config.separator in own else -1
        if config.global_tokens == "before_separator":
            found.append(range(max(first, 0)))
        else:
            found.append(range(min(first + 2, len(own)) if first >= 0 else len(own), len(own)))
    return tuple(found)


ATTENTION_CLASSES: dict[str, type[Attention]] = {
    "latent": LatentAttention,
    "global": GlobalAttention,
    "distance": DisentangledAttention,
    "relative": RelativeAttention,
    "layer_bias": BiasedAttention,
    "two_streams": TwoStreamAttention,
}  # by ModelConfig.attention_kind


def build_attention(config: ModelConfig, layer: int) -> Attention:
    return ATTENTION_CLASSES.get(config.attention_kind, Attention)(config.of_layer(layer), layer)


def _group_batch(batch: RaggedBatch, config: ModelConfig, in_pieces: bool) -> list[GroupRows]:
    """The groups of sequences that attend together; in pieces, of ranges of the rows of long ones."""
    if batch.spans is not None:
        return []
    groups = group_sequences(batch.lengths, batch.key_counts)
    if batch.cache is not None and batch.cache.cache.is_contiguous:
        groups = [list(range(len(batch.lengths)))]
    found = list[GroupRows]()
    for members in groups:
        longest = max(batch.lengths[n] for n in members)
        size = longest
        if in_pieces:  # the last range has rows of all members
            least = longest - min(batch.lengths[n] for n in members) + 1
            size = max(attending_rows(config, len(members) * longest, longest), least)
        found += [GroupRows(members, first, end) for first, end in split_range(longest, size)]
    return found


def attending_rows(config: ModelConfig, rows: int, keys: int) -> int:
    """How many rows of each sequence attend together, if all of them are so many `rows` over `keys`: all, or
    ATTENDING_ROWS of those that a key head has from its query heads."""
    if count_score_products(config, rows * config.heads * config.head_width, keys) <= LAYER_PRODUCTS:
        return keys
    return max(ATTENDING_ROWS * config.kv_heads // config.heads, LEAST_ROWS)


def _seen_keys(batch: RaggedBatch, config: ModelConfig, some: GroupRows, windowed: bool) -> tuple[int, int]:
    """The first one and the end of the keys that such rows see, without a cache, and some beside them."""
    count = max(batch.lengths[n] for n in some.members)
    if config.has_distance_scores or config.global_tokens:  # one bias is for both kinds of layers
        return 0, count
    low = max(some.first - config.window + 1, 0) if windowed else 0
    high = some.end if config.causal else some.end + config.window - 1 if windowed else count
    return low // KEY_BORDER * KEY_BORDER, min(-(-high // KEY_BORDER) * KEY_BORDER, count)


def _build_group(
    batch: RaggedBatch,
    config: ModelConfig,
    some: GroupRows,
    dtype: torch.dtype,
    global_tokens: Sequence[range] = (),
) -> AttentionGroup:
    members, device = some.members, batch.tokens.device
    lengths, key_counts = [batch.lengths[n] for n in members], [batch.key_counts[n] for n in members]
    starts = [batch.starts[n] for n in members]
    rows = _pad_range(starts, lengths, (some.first, some.end), device)
    keys: Tensor | slice | ByHeads
    window_keys: Tensor | slice | ByHeads
    window_low = 0
    if batch.cache is None:
        high = _seen_keys(batch, config, some, windowed=False)[1]
        window_low, window_high = _seen_keys(batch, config, some, windowed=bool(config.window))
        key_count, window_count = high, window_high - window_low
        keys = _pad_range(starts, lengths, (0, high), device)
        window_keys = _pad_range(starts, lengths, (window_low, window_high), device)
    else:
        cache = batch.cache.cache
        blocks = _padded_blocks([batch.cache.tables[n] for n in members], key_counts, cache.size, device)
        keys, key_count = cache.block_pieces(blocks), blocks.size(1) * cache.size
        window_keys, window_count = keys, key_count
    if batch.cache is not None and batch.cache.window_tables:
        own = [batch.cache.window_tables[n] for n in members]
        window_keys = cache.block_pieces(_padded_blocks(own, key_counts, cache.size, device))
    # The position of each member's first row.
    firsts = [total - new + some.first for total, new in zip(key_counts, lengths, strict=True)]
    shape = some.end - some.first, key_count
    seen = (
        key_counts
        if batch.hidden is None
        else [count - batch.hidden[n] for n, count in zip(members, key_counts, strict=True)]
    )
    plain = not config.causal and min(seen) == key_count
    mask = None if plain else _visibility_mask(firsts, seen, shape, config.causal, 0)
    window_mask = mask
    if config.window and max(key_counts) > config.window:
        own_firsts, own_seen = ([count - window_low for count in counts] for counts in (firsts, seen))
        window_shape = shape[0], window_count
        window_mask = _visibility_mask(own_firsts, own_seen, window_shape, config.causal, config.window)
        if global_tokens:  # all tokens see them
            for shown, n in zip(window_mask, members, strict=True):
                shown[..., global_tokens[n].start : global_tokens[n].stop] = True
    before = _key_distances(firsts, shape).to(device) if config.has_distance_scores else None
    hiding = additive_mask(mask, dtype, device)
    window_hiding = hiding if window_mask is mask else additive_mask(window_mask, dtype, device)
    return AttentionGroup(len(members), rows, keys, hiding, window_hiding, window_keys, before)


def _key_distances(firsts: list[int], shape: tuple[int, int]) -> Tensor:
    """[N, Q, K] how many tokens a key is before a row; N is 1 if that is the same for all members."""
    rows, keys = shape
    distinct = firsts if len(set(firsts)) > 1 else firsts[:1]
    return torch.tensor(distinct)[:, None, None] + torch.arange(rows)[:, None] - torch.arange(keys)


def _pad_range(starts: list[int], lengths: list[int], some: tuple[int, int], device: torch.device) -> Tensor | slice:
    """As `_padded_rows`, of the members' rows from the first one of the range `some` to before its end."""
    first, end = some
    counts = [min(length, end) - first for length in lengths]
    assert min(counts) > 0, "lengths of a group differ by less than a range"
    return _padded_rows([start + first for start in starts], counts, device)


def _padded_rows(starts: list[int], lengths: list[int], device: torch.device) -> Tensor | slice:
    """Packed rows of members, padded to the longest by repeating a first row: [N * Q], or a slice of them."""
    longest = max(lengths)
    side_by_side = all(start == starts[0] + i * longest for i, start in enumerate(starts))
    if min(lengths) == longest and side_by_side:
        return slice(starts[0], starts[0] + longest * len(starts))
    rows = [start + (q if q < n else 0) for start, n in zip(starts, lengths, strict=True) for q in range(longest)]
    return torch.tensor(rows, device=device)


def _padded_blocks(
    tables: Sequence[Sequence[int]], key_counts: Sequence[int], size: int, device: torch.device
) -> Tensor:
    """[N, B] blocks of the tokens of each sequence, padded with the sequence's own first block.

    Masked slots are still multiplied, and a block of another sequence, or one that is not begun, could hold NaN.
    """
    used = [table[: -(-count // size)] for table, count in zip(tables, key_counts, strict=True)]
    longest = max(map(len, used))
    return torch.tensor([[*table, *[table[0]] * (longest - len(table))] for table in used], device=device)


def _visibility_mask(
    firsts: list[int], key_counts: list[int], shape: tuple[int, int], causal: bool, window: int
) -> Tensor:
    """[N, 1, Q, K] True where a row may attend."""
    rows, keys = shape
    key = torch.arange(keys)  # [K]
    row_positions = torch.tensor(firsts)[:, None] + torch.arange(rows)  # [N, Q]
    allowed = (key < torch.tensor(key_counts)[:, None])[:, None, :].expand(-1, rows, -1)
    if causal:
        allowed = allowed & (key <= row_positions[:, :, None])
    if window:
        allowed = allowed & (key > row_positions[:, :, None] - window)
        if not causal:
            allowed = allowed & (key < row_positions[:, :, None] + window)
    return allowed[:, None]


def additive_mask(mask: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """0 where True, -inf where False; a padding row without any key attends to all keys, and its output is dropped."""
    if mask is None or bool(mask.all()):
        return None
    mask = mask | ~mask.any(dim=-1, keepdim=True)
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf")).to(device)


def _output_order(batch: RaggedBatch, groups: list[GroupRows]) -> Tensor | None:
    """The place of each packed row in the groups' concatenated outputs."""
    lengths, order, base = batch.lengths, [0] * batch.starts[-1], 0
    for some in groups:
        for n in some.members:
            count = min(lengths[n], some.end) - some.first
            first = batch.starts[n] + some.first
            order[first : first + count] = range(base, base + count)
            base += some.end - some.first
    if order == list(range(base)):
        return None
    return torch.tensor(order, device=batch.tokens.device)


def _gather_rows(x: Tensor, rows: Tensor | slice, size: int) -> Tensor:
    """Packed [T, ...] rows as `size` sequences: [N, Q, ...]."""
    taken = x[rows] if isinstance(rows, slice) else x.index_select(0, rows)
    return taken.view(size, -1, *x.shape[1:])
