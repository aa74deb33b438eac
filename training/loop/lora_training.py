"""Low-rank adaptation for training (Hu et al. 2022, arXiv:2106.09685): adapters around a network's linear layers.

The frozen matrix W becomes W + (alpha / rank) B A, and only the small matrices A and B are trained and saved.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from .errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The adapters of a recipe: `targets` are ends of module names such as "attention.query"."""

    rank: PositiveInt
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...]


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter.  B starts at zero, so the output is unchanged at first."""

    def __init__(self, linear: nn.Linear, shape: LoraConfig) -> None:
        super().__init__()
        self.linear, self.dropout, self.scale = linear, nn.Dropout(shape.dropout), shape.alpha / shape.rank
        self.a = nn.Parameter(torch.empty(shape.rank, linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, shape.rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., out] from [..., in]."""
        out: Tensor = self.linear(x)
        return out + F.linear(F.linear(self.dropout(x), self.a), self.scale * self.b)

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        """Return the linear layer with the adapter added to its weight."""
        self.linear.weight += self.scale * self.b @ self.a
        return self.linear


def add_adapters(network: nn.Module, shape: LoraConfig) -> dict[str, LoraLinear]:
    """Freeze the network and put adapters around the target layers, in place.  Returns them by module name."""
    linears = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    for target in shape.targets:
        if not any(has_suffix(name, target) for name in linears):
            known = ", ".join(sorted({".".join(name.split(".")[2:]) or name for name in linears}))
            raise RecipeError(f"lora.targets: no linear layer ends in {target!r}; there are {known}")
    network.requires_grad_(False)
    adapted = {
        name: LoraLinear(linear, shape)
        for name, linear in linears.items()
        if any(has_suffix(name, target) for target in shape.targets)
    }
    replace_modules(network, adapted)
    return adapted


def merge_adapters(network: nn.Module, adapted: dict[str, LoraLinear]) -> None:
    """Replace the adapters by linear layers with merged weights."""
    replace_modules(network, {name: layer.merge() for name, layer in adapted.items()})


def replace_modules(network: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        network.set_submodule(name, module)


def has_suffix(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")
