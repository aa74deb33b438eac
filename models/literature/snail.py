"""SNAIL: causal convolutions over time and attention (Mishra et al. 2018, arXiv:1707.03141).

Every block reads [..., T, C] and appends features of its own without changing the others, so later blocks see all of
them; no output depends on a later time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .score_functions import ScaledDot, ScoreWidths, weighted_sum


class CausalConvolution(nn.Module):
    """A convolution over the current time and the time `dilation` steps ago, with a matrix for each (van den Oord et
    al. 2016, arXiv:1609.03499); zeros stand before the first time."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.now, self.then = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)
        self.dilation = dilation

    def forward(self, x: Tensor) -> Tensor:
        """[..., T, inputs] to [..., T, outputs]."""
        earlier = F.pad(x, (0, 0, self.dilation, 0))[..., : x.size(-2), :]
        seen: Tensor = self.now(x) + self.then(earlier)
        return seen


class DenseBlock(nn.Module):
    """The features of a gated convolution, appended to its input."""

    def __init__(self, inputs: int, filters: int, dilation: int) -> None:
        super().__init__()
        self.value, self.gate = (CausalConvolution(inputs, filters, dilation) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[..., T, C] to [..., T, C + filters]."""
        return torch.cat((x, self.value(x).tanh() * self.gate(x).sigmoid()), dim=-1)


class TemporalBlock(nn.Sequential):
    """Dense blocks with doubling dilation, until all of `times` are covered."""

    def __init__(self, inputs: int, filters: int, times: int) -> None:
        count = max(1, (times - 1).bit_length())
        super().__init__(*(DenseBlock(inputs + n * filters, filters, 1 << n) for n in range(count)))
        self.outputs = inputs + count * filters


class AttentionBlock(nn.Module):
    """The output of one causal attention head, appended to its input."""

    def __init__(self, inputs: int, keys: int, values: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(inputs, width) for width in (keys, keys, values))
        self.score = ScaledDot(ScoreWidths(query=keys, key=keys))
        self.outputs = inputs + values

    def forward(self, x: Tensor) -> Tensor:
        """[..., T, C] to [..., T, C + values]."""
        past = torch.ones(x.size(-2), x.size(-2), dtype=torch.bool, device=x.device).tril()
        found, _ = weighted_sum(self.query(x), self.key(x), self.value(x), self.score, past)
        return torch.cat((x, found), dim=-1)


@dataclass(frozen=True, kw_only=True)
class SnailConfig:
    """`inputs` features at each of up to `times` steps, and `classes` scores.

    Each element of `attention`, widths of keys and of values, is one layer: a temporal block of `filters`, then
    attention.
    """

    inputs: int
    classes: int
    times: int
    filters: int = 16
    attention: Sequence[tuple[int, int]] = ((32, 32),)


class Snail(nn.Module):
    """Scores of classes at each time, from the inputs up to that time."""

    def __init__(self, config: SnailConfig) -> None:
        super().__init__()
        self.config = config
        width, blocks = config.inputs, []
        for keys, values in config.attention:
            gathered = TemporalBlock(width, config.filters, config.times)
            found = AttentionBlock(gathered.outputs, keys, values)
            blocks += [gathered, found]
            width = found.outputs
        self.blocks, self.out = nn.Sequential(*blocks), nn.Linear(width, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, inputs] to [N, T, classes]."""
        if x.size(-2) > self.config.times:
            message = f"{x.size(-2)} times are more than the {self.config.times} that this network looks back over"
            raise ValueError(message)
        scores: Tensor = self.out(self.blocks(x))
        return scores
