"""Where a token is.  An encoding acts in one of three places here: on embeddings, on queries and keys, on scores."""

import math

import torch
from torch import Tensor, nn

from .model_config import ModelConfig, RopeScaling


class LearnedPositions(nn.Module):
    """A vector per position, added to the embeddings (Gehring et al. 2017, arXiv:1705.03122).

    `offset` rows at the head of the table belong to no position (RoBERTa counts from its padding id).
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
    """A vector per position that nobody learns: sines and cosines of W / 2 frequencies, from once every 2 pi tokens
    down to a ten-thousandth of that (Vaswani et al. 2017, arXiv:1706.03762).

    A sine and its cosine stand side by side there; with `halves`, all sines before all cosines, as in Marian.
    """

    table: Tensor

    def __init__(self, count: int, width: int, halves: bool) -> None:
        super().__init__()
        self.register_buffer("table", sinusoids(count, width, halves), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[T, W] embeddings of tokens at [T] positions."""
        return x + self.table[positions].to(x.dtype)


def sinusoids(count: int, width: int, halves: bool) -> Tensor:
    """[count, W] in float32, computed in float64: an angle may be large."""
    exponents = torch.arange(0, width, 2, device="cpu", dtype=torch.float64) / width
    angles = torch.arange(count, device="cpu", dtype=torch.float64)[:, None] / 10_000.0**exponents  # [count, W / 2]
    both = (angles.sin(), angles.cos())
    return (torch.cat(both, dim=1) if halves else torch.stack(both, dim=2).flatten(1)).float()


class DistanceBias(nn.Module):
    """A bias for each head's scores by how far a key is from its row, shared by all layers (Raffel et al. 2020,
    arXiv:1910.10683).

    Half of `kinds` are for keys before a row, half for those after it; all for those before, where a row sees no others
    (`causal`).  Near distances have one each, the others share what is left by their logarithm, up to `farthest`.
    """

    def __init__(self, kinds: int, farthest: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.table, self.farthest, self.causal = nn.Embedding(kinds, heads), farthest, causal

    def forward(self, before: Tensor) -> Tensor:
        """[N, H, Q, K] for keys that are [N, Q, K] tokens before rows."""
        bias: Tensor = self.table(self.bucket(before))  # [N, Q, K, H]
        return bias.permute(0, 3, 1, 2)

    def bucket(self, before: Tensor) -> Tensor:
        """Of distances, positive to keys before the row."""
        one_side = self.table.num_embeddings // (1 if self.causal else 2)
        near, away = one_side // 2, before.clamp(min=0) if self.causal else before.abs()
        spread = (away.clamp(min=1).float() / near).log() / math.log(self.farthest / near) * (one_side - near)
        far = (near + spread.long()).clamp(max=one_side - 1)
        kind = torch.where(away < near, away, far)
        return kind if self.causal else kind + one_side * (before < 0)


class LinearBias(nn.Module):
    """Scores lose in proportion to the distance, each head at a rate of its own, which nobody learns: ALiBi (Press et
    al. 2022, arXiv:2108.12409).

    It is the same to both sides, for networks that look to both.
    """

    rates: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("rates", linear_rates(heads), persistent=False)

    def forward(self, before: Tensor) -> Tensor:
        """[N, H, Q, K] for keys that are [N, Q, K] tokens before rows."""
        return -self.rates.float()[:, None, None] * before.abs()[:, None]


def linear_rates(heads: int) -> Tensor:
    """[H] from 2^(-8 / H) down to 2^-8, evenly by their logarithm, in float32.

    Of heads whose number is no power of two the last take every other rate of twice as many, as the authors do.
    """
    whole = 1 << (heads.bit_length() - 1)
    powers = [8 * (head + 1) / whole for head in range(whole)]
    powers += [8 * (2 * head + 1) / (2 * whole) for head in range(heads - whole)]
    return torch.tensor([2.0**-power for power in powers], device="cpu")


class RelativeVectors(nn.Module):
    """A layer's vectors for each distance up to `farthest`, before and after: one to add to a key, one to a value (Shaw
    et al. 2018, arXiv:1803.02155).  What is farther is clipped to that; the heads have the same.
    """

    def __init__(self, farthest: int, width: int) -> None:
        super().__init__()
        self.keys, self.values = (nn.Embedding(2 * farthest + 1, width) for _ in range(2))
        self.farthest = farthest

    def bucket(self, before: Tensor) -> Tensor:
        """Of distances, positive to keys before the row: which vector they have."""
        return (self.farthest - before).clamp(0, 2 * self.farthest)


class DistanceVectors(nn.Module):
    """A vector for each kind of distance, which attention looks at beside the tokens' (He et al. 2021,
    arXiv:2006.03654).

    Half of `kinds` are for keys before a row, half for those after it; of each half, the near half of the distances
    have one each, the others share what is left by their logarithm, up to `farthest`.
    """

    def __init__(self, kinds: int, farthest: int, width: int, eps: float) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(kinds, width), nn.LayerNorm(width, eps)
        self.farthest = farthest

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """[kinds, W] vectors, and [K, K] of which kind a key's distance from a row is, row by row."""
        kinds = self.bucket(token_distances(length, self.table.weight.device))
        return self.norm(self.table.weight), kinds

    def bucket(self, before: Tensor) -> Tensor:
        """Of distances, positive to keys before the row."""
        span = self.table.num_embeddings // 2
        near, away = span // 2, before.abs()
        steps = torch.log(torch.tensor((self.farthest - 1) / near, device=before.device))
        spread = torch.ceil(torch.log(away.clamp(min=near) / near) / steps * (near - 1)).long() + near
        return (torch.where(away <= near, before, spread * before.sign()) + span).clamp(0, 2 * span - 1)


def token_distances(length: int, device: torch.device) -> Tensor:
    """[K, K] from every row of a text to every key: how many tokens before it."""
    place = torch.arange(length, device=device)
    return place[:, None] - place


class NoPositions(nn.Module):
    """Adds nothing: the position is told elsewhere."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG002
        return x


class Rotary(nn.Module):
    """Turns queries and keys by an angle that grows with the position (Su et al. 2021, arXiv:2104.09864).

    Features d and d + D/2 form a pair, as in GPT-NeoX and in every checkpoint of the Llama line.
    """

    frequency: Tensor

    def __init__(self, head_width: int, base: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.head_width, self.base, self.scaling = head_width, base, scaling
        self.register_buffer("frequency", self.frequencies(), persistent=False)

    def frequencies(self) -> Tensor:
        """[D / 2] angles a step, in float32."""
        exponents = torch.arange(0, self.head_width, 2, device="cpu").float() / self.head_width
        frequency = 1.0 / (self.base**exponents)
        return frequency if self.scaling is None else scale_frequencies(frequency, self.scaling)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine for [T] positions as [T, 1, D / 2]: made once a forward, used in every layer."""
        angle = (positions.float().unsqueeze(-1) * self.frequency).unsqueeze(-2)
        return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Turn [T, H, D] queries or keys by [T, 1, D / 2] cosines and sines."""
    cos, sin = turns
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def scale_frequencies(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """[D / 2] frequencies for a longer context; see RopeScaling."""
    if scaling.kind == "linear":
        return frequency / scaling.factor
    wavelength = 2 * math.pi / frequency
    low = scaling.original_positions / scaling.low_frequency_factor
    high = scaling.original_positions / scaling.high_frequency_factor
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    smooth = (scaling.original_positions / wavelength - scaling.low_frequency_factor) / span
    blended = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    slowed = torch.where(wavelength > low, frequency / scaling.factor, frequency)
    return torch.where((wavelength >= high) & (wavelength <= low), blended, slowed)


def build_embedding(config: ModelConfig) -> nn.Module:
    """What the configuration adds to token embeddings."""
    width = config.embedding_width or config.width
    if config.position == "learned":
        return LearnedPositions(config.max_positions, width, config.position_offset)
    if config.position in ("sinusoidal", "sines-cosines"):
        return SinusoidalPositions(config.max_positions, width, halves=config.position == "sines-cosines")
    return NoPositions()


def build_distances(config: ModelConfig) -> nn.Module:
    """What the configuration makes of how far tokens are apart."""
    if config.position == "distance":
        return DistanceVectors(config.distances, config.farthest, config.width, config.norm_eps)
    if config.position == "alibi":
        return LinearBias(config.heads)
    if config.distances:
        return DistanceBias(config.distances, config.farthest, config.heads, config.causal)
    return nn.Identity()


def build_rotary(config: ModelConfig, windowed: bool) -> Rotary:
    """The rotation of full or of windowed layers."""
    if windowed and config.window_rope_base:
        return Rotary(config.head_width, config.window_rope_base)
    return Rotary(config.head_width, config.rope_base, config.rope_scaling)
