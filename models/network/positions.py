"""Position encodings: on embeddings, on queries and keys, or on scores."""

import math

import torch
from torch import Tensor, nn

from .model_config import ModelConfig, RopeScaling

SINUSOID_ROWS = 1024  # rows of sinusoidal positions that are computed at a time
WHOLE_VECTORS = 64  # a multiple of what a vector loop computes at once: its rest is rounded in another way


class LearnedPositions(nn.Module):
    """A learned vector per position, added to the embeddings (Gehring et al. 2017, arXiv:1705.03122).

    The first `offset` rows of the table belong to no position (RoBERTa counts from its padding id).
    """

    def __init__(self, count: int, width: int, offset: int) -> None:
        super().__init__()
        self.table = nn.Embedding(count + offset, width)
        self.offset = offset

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[T, W] embeddings of tokens at [T] positions."""
        placed: Tensor = x + self.table(positions + self.offset)
        return placed


class SinusoidalPositions(nn.Module):
    """A fixed vector per position: sines and cosines of W / 2 frequencies, from once every 2 pi tokens down to a
    ten-thousandth of that (Vaswani et al. 2017, arXiv:1706.03762).

    A sine and its cosine are side by side; with `halves`, all sines come before all cosines, as in Marian. With
    `closed` the last frequency is exactly a ten-thousandth of the first, as in fairseq and M2M-100; otherwise it is
    the one before that. Positions are counted from `offset`.
    """

    table: Tensor

    def __init__(self, count: int, width: int, *, halves: bool, closed: bool = False, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.register_buffer("table", sinusoids(count + offset, width, halves, closed), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[T, W] embeddings of tokens at [T] positions."""
        return x + self.table[positions + self.offset].to(x.dtype)


def sinusoids(count: int, width: int, halves: bool, closed: bool = False) -> Tensor:
    """[count, W] in float32, computed in float64 because an angle may be large, a few rows at a time."""
    span = max(width - 2, 1) if closed else width
    exponents = torch.arange(0, width, 2, device="cpu", dtype=torch.float64) / span
    table = torch.empty(count, width, device="cpu")
    for rows in torch.split(torch.arange(count, device="cpu", dtype=torch.float64), SINUSOID_ROWS):
        angles = rows[:, None] / 10_000.0**exponents  # [rows, W / 2]
        both = (angles.sin(), angles.cos())
        first = int(rows[0])
        table[first : first + len(rows)] = torch.cat(both, dim=1) if halves else torch.stack(both, dim=2).flatten(1)
    return table


class DistanceBias(nn.Module):
    """A bias for each head's scores by the distance of key and row, shared by all layers (Raffel et al. 2020,
    arXiv:1910.10683).

    Half of the buckets are for keys before a row, half for those after it; all are for keys before it if `causal`. Near
    distances have a bucket each; the rest is divided by the logarithm of the distance, up to `farthest`.
    """

    def __init__(self, kinds: int, farthest: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.table, self.farthest, self.causal = nn.Embedding(kinds, heads), farthest, causal

    def forward(self, before: Tensor) -> Tensor:
        """[N, H, Q, K] for keys that are `before` [N, Q, K] tokens before rows."""
        bias: Tensor = self.table(self.bucket(before))  # [N, Q, K, H]
        return bias.permute(0, 3, 1, 2)

    def bucket(self, before: Tensor) -> Tensor:
        """The bucket of distances, which are positive for keys before the row."""
        one_side = self.table.num_embeddings // (1 if self.causal else 2)
        near, away = one_side // 2, before.clamp(min=0) if self.causal else before.abs()
        spread = (away.clamp(min=1).float() / near).log() / math.log(self.farthest / near) * (one_side - near)
        far = (near + spread.long()).clamp(max=one_side - 1)
        kind = torch.where(away < near, away, far)
        return kind if self.causal else kind + one_side * (before < 0)


class LinearBias(nn.Module):
    """A bias proportional to the distance, with a fixed rate for each head: ALiBi (Press et al. 2022,
    arXiv:2108.12409).

    It is symmetric in networks that are not causal.
    """

    rates: Tensor

    def __init__(self, heads: int, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("rates", linear_rates(heads) * scale, persistent=False)

    def forward(self, before: Tensor) -> Tensor:
        """[N, H, Q, K] for keys that are `before` [N, Q, K] tokens before rows."""
        return -self.rates.float()[:, None, None] * before.abs()[:, None]


def linear_rates(heads: int) -> Tensor:
    """[H] rates from 2^(-8 / H) down to 2^-8, evenly spaced by their logarithm, in float32.

    If the number of heads is no power of two, the last heads take every other rate of twice as many, as the authors do.
    """
    whole = 1 << (heads.bit_length() - 1)
    powers = [8 * (head + 1) / whole for head in range(whole)]
    powers += [8 * (2 * head + 1) / (2 * whole) for head in range(heads - whole)]
    return torch.tensor([2.0**-power for power in powers], device="cpu")


class RelativeVectors(nn.Module):
    """A layer's vectors for each distance up to `farthest`, before and after: one is added to a key, one to a value
    (Shaw et al. 2018, arXiv:1803.02155).

    Larger distances are clipped; all heads share the vectors.
    """

    def __init__(self, farthest: int, width: int) -> None:
        super().__init__()
        self.keys, self.values = (nn.Embedding(2 * farthest + 1, width) for _ in range(2))
        self.farthest = farthest

    def bucket(self, before: Tensor) -> Tensor:
        """The index of the vector for distances, which are positive for keys before the row."""
        return (self.farthest - before).clamp(0, 2 * self.farthest)


class DistanceVectors(nn.Module):
    """A vector for each bucket of distances, which attention scores beside those of tokens (He et al. 2021,
    arXiv:2006.03654).

    Half of the buckets are for keys before a row, half for those after it. In each half, the near half of the distances
    have a bucket each; the rest is divided by the logarithm of the distance, up to `farthest`. Without
    `has_log_distances` every distance has a bucket, and those that have none share the last.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.distances, config.width)
        self.norm = nn.LayerNorm(config.width, config.norm_eps) if config.has_distance_norm else nn.Identity()
        self.farthest, self.is_log = config.farthest, config.has_log_distances

    def forward(self) -> Tensor:
        """[buckets, W] vectors."""
        vectors: Tensor = self.norm(self.table.weight)
        return vectors

    def look_up(self, before: Tensor, longest: int) -> Tensor:
        """The buckets of distances, all of which are shorter than `longest`."""
        reach = -(-longest // WHOLE_VECTORS) * WHOLE_VECTORS
        return self.bucket(torch.arange(-reach, reach, device=before.device))[before + reach]

    def bucket(self, before: Tensor) -> Tensor:
        """The bucket of distances, which are positive for keys before the row."""
        span = self.table.num_embeddings // 2
        if not self.is_log:
            return (before + span).clamp(0, 2 * span - 1)
        near, away = span // 2, before.abs()
        steps = torch.log(torch.tensor((self.farthest - 1) / near, device=before.device))
        spread = torch.ceil(torch.log(away.clamp(min=near) / near) / steps * (near - 1)).long() + near
        return (torch.where(away <= near, before, spread * before.sign()) + span).clamp(0, 2 * span - 1)


class NoPositions(nn.Module):
    """Adds nothing: positions are encoded elsewhere."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG002
        return x


class Rotary(nn.Module):
    """Rotates queries and keys by an angle proportional to the position (Su et al. 2021, arXiv:2104.09864).

    Features d and d + D/2 form a pair, as in GPT-NeoX and in every checkpoint of the Llama families.
    """

    frequency: Tensor

    def __init__(self, rotary_width: int, base: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.rotary_width, self.base, self.scaling = rotary_width, base, scaling
        self.magnitude = 1.0 if scaling is None else scaling.magnitude
        self.register_buffer("frequency", self.frequencies(), persistent=False)

    def frequencies(self) -> Tensor:
        """[R / 2] angles per position, in float32."""
        exponents = torch.arange(0, self.rotary_width, 2, device="cpu").float() / self.rotary_width
        frequency = 1.0 / (self.base**exponents)
        return frequency if self.scaling is None else scale_frequencies(frequency, self.base, self.scaling)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines for [T] positions as [T, 1, R / 2], computed once a forward pass and used in every
        layer."""
        angle = (positions.float().unsqueeze(-1) * self.frequency).unsqueeze(-2)
        cos, sin = angle.cos(), angle.sin()
        if self.magnitude != 1.0:
            cos, sin = cos * self.magnitude, sin * self.magnitude
        return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first R features of [T, H, D] queries or keys by [T, 1, R / 2] cosines and sines."""
    cos, sin = turns
    half = cos.size(-1)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def scale_frequencies(frequency: Tensor, base: float, scaling: RopeScaling) -> Tensor:
    """[R / 2] frequencies for a longer context; `base` is the one that they were computed from. See RopeScaling."""
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "listed":
        return frequency / torch.tensor(scaling.divisors, device=frequency.device)
    if scaling.kind == "share":
        kept = torch.arange(len(frequency), device=frequency.device) < int(scaling.share * len(frequency))
        return frequency / scaling.factor * kept
    if scaling.kind == "yarn":
        kept = 1 - yarn_ramp(len(frequency), base, scaling)
        return frequency / scaling.factor * (1 - kept) + frequency * kept
    wavelength = 2 * math.pi / frequency
    low = scaling.original_positions / scaling.low_frequency_factor
    high = scaling.original_positions / scaling.high_frequency_factor
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    smooth = (scaling.original_positions / wavelength - scaling.low_frequency_factor) / span
    blended = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    slowed = torch.where(wavelength > low, frequency / scaling.factor, frequency)
    return torch.where((wavelength >= high) & (wavelength <= low), blended, slowed)


def yarn_ramp(count: int, base: float, scaling: RopeScaling) -> Tensor:
    """[R / 2] from 0 for frequencies that are kept to 1 for those that are divided."""

    def index_of(rotations: float) -> float:
        """The index of the frequency with so many rotations over the original positions."""
        return count * math.log(scaling.original_positions / (rotations * 2 * math.pi)) / math.log(base)

    low, high = index_of(scaling.fast_rotations), index_of(scaling.slow_rotations)
    if scaling.whole_bounds:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    width = high - low or 0.001  # no division by zero where the bounds are equal
    return ((torch.arange(count, device="cpu").float() - low) / width).clamp(0, 1)


def build_embedding(config: ModelConfig) -> nn.Module:
    """The position encoding on embeddings."""
    width, offset = config.position_width, config.position_offset
    count = config.max_positions + config.two_streams  # a row that predicts is one position further
    if config.position == "learned":
        return LearnedPositions(count, width, offset)
    if config.has_sinusoidal_positions:
        halves, closed = config.position != "sinusoidal", config.position == "closed-sines-cosines"
        return SinusoidalPositions(count, width, halves=halves, closed=closed, offset=offset)
    return NoPositions()


def build_distances(config: ModelConfig) -> nn.Module:
    """The position encoding by distances on scores."""
    if config.position == "distance":
        return DistanceVectors(config)
    if config.position == "alibi":
        return LinearBias(config.heads, config.distance_scale)
    if config.distances and config.attention_kind not in ("layer_bias", "two_streams"):
        return DistanceBias(config.distances, config.farthest, config.heads, config.causal)
    return nn.Identity()


def build_rotary(config: ModelConfig, windowed: bool) -> Rotary:
    """The rotation of full or of windowed layers, whose heads have one width."""
    layers = (layer for layer in range(config.depth) if config.is_windowed(layer) == windowed)
    width = config.rotary_width or config.of_layer(next(layers, 0)).head_width
    if windowed and config.window_rope_base:
        return Rotary(width, config.window_rope_base)
    return Rotary(width, config.rope_base, config.rope_scaling)
