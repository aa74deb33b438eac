"""Position-wise feed-forward networks."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .lora import LinearFunction, apply_linear
from .model_config import ModelConfig

GELU_SIGMOID = 1.702  # x * sigmoid(1.702 x) is close to GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415)
MLP_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "gelu_sigmoid": lambda x: x * torch.sigmoid(GELU_SIGMOID * x),
}


def logistic(x: Tensor) -> Tensor:
    """The logistic function; torch.sigmoid rounds the last elements of a batch differently."""
    return 1 / (1 + (-x).exp())


class LearnedSlopes(nn.Module):
    """xIELU: a parabola for positive numbers and an exponential for the others, with learned slopes
    (Huang and Schlag 2024, arXiv:2411.13010)."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = (nn.Parameter(torch.zeros(1)) for _ in range(2))
        self.linear, self.largest = (nn.Parameter(torch.zeros(()), requires_grad=False) for _ in range(2))

    def apply_to(self, x: Tensor) -> Tensor:
        """[T, W] to [T, W], element by element."""
        rising, falling = F.softplus(self.positive), self.linear + F.softplus(self.negative)
        below = (torch.expm1(torch.minimum(x, self.largest)) - x) * falling
        return torch.where(x > 0, rising * x * x, below) + self.linear * x


class MLP(nn.Module):
    """Position-wise feed-forward network, plain or gated (Shazeer 2020, arXiv:2002.05202).

    `width` counts its inner features; `bias`: None for that of the configuration.
    """

    def __init__(self, config: ModelConfig, width: int, *, bias: bool | None = None) -> None:
        super().__init__()
        self.width = width
        self.products = (3 if config.gated_mlp else 2) * config.width * width  # of a row
        has_bias = config.mlp_bias if bias is None else bias
        self.up = nn.Linear(config.width, width, bias=has_bias)
        self.gate = nn.Linear(config.width, width, bias=has_bias) if config.gated_mlp else None
        self.down = nn.Linear(width, config.width, bias=has_bias)
        self.activation = self.build_activation(config)

    def build_activation(self, config: ModelConfig) -> Callable[[Tensor], Tensor]:
        if config.activation != "xielu":
            return MLP_ACTIVATIONS[config.activation]
        self.slopes = LearnedSlopes()
        return self.slopes.apply_to

    def forward(self, x: Tensor, through: LinearFunction = apply_linear) -> Tensor:
        """[T, W] to [T, W]; `through` applies a linear layer to rows."""
        up = through(self.up, x)
        inner = self.activation(up) if self.gate is None else self.activation(through(self.gate, x)) * self.shift(up)
        return through(self.down, inner)

    def shift(self, up: Tensor) -> Tensor:
        """What the gate is multiplied by."""
        return up


class ClampedMLP(MLP):
    """A gated MLP whose inner features are clamped, and whose gate multiplies the other half plus one, as in gpt-oss
    (arXiv:2508.10925)."""

    def __init__(self, config: ModelConfig, width: int, *, bias: bool | None = None) -> None:
        super().__init__(config, width, bias=bias)
        assert config.experts is not None
        self.limit = config.experts.clamp
        self.activation = self.clamp_gate

    def clamp_gate(self, gate: Tensor) -> Tensor:
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(GELU_SIGMOID * gate)

    def shift(self, up: Tensor) -> Tensor:
        return up.clamp(-self.limit, self.limit) + 1
