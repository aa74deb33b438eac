"""Vectors of texts and of their tokens: poolings of a network's states, and the layers before and after them, as
sentence-transformers puts modules one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .heads import HEAD_ACTIVATIONS, SCORE_ACTIVATIONS, Pooler, Pooling

LAYER_ACTIVATIONS = {**HEAD_ACTIVATIONS, "sigmoid": SCORE_ACTIVATIONS["sigmoid"]}


@dataclass(frozen=True)
class DenseSpec:
    """A linear layer with an activation. `residual` adds the layer's input to its output, through a second matrix if
    the widths differ."""

    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "tanh"
    residual: bool = False


@dataclass(frozen=True)
class NormSpec:
    """A layer norm with weight and bias."""

    width: int


@dataclass(frozen=True)
class UnitSpec:
    """Vectors are scaled to length one."""


LayerSpec = DenseSpec | NormSpec | UnitSpec


class DenseLayer(nn.Module):
    """Rows [N, I] to [N, O]; see DenseSpec."""

    def __init__(self, spec: DenseSpec) -> None:
        super().__init__()
        self.linear = nn.Linear(spec.inputs, spec.outputs, bias=spec.bias)
        self.activation = LAYER_ACTIVATIONS[spec.activation]
        self.adds_input = spec.residual
        projected = spec.residual and spec.inputs != spec.outputs
        self.residual = nn.Linear(spec.inputs, spec.outputs, bias=False) if projected else nn.Identity()

    def forward(self, rows: Tensor) -> Tensor:
        out = self.activation(self.linear(rows))
        return out + self.residual(rows) if self.adds_input else out


class UnitLayer(nn.Module):
    """Rows [N, W] to rows of length one; a row of zeros stays as it is."""

    def forward(self, rows: Tensor) -> Tensor:
        return F.normalize(rows, dim=-1)


class VectorLayers(nn.Sequential):
    """Rows [N, I] through layers to [N, O], in the dtype of the layers' weights."""

    def __init__(self, specs: Sequence[LayerSpec]) -> None:
        super().__init__(*map(build_layer, specs))

    def forward(self, rows: Tensor) -> Tensor:
        weight = next(self.parameters(), None)
        for layer in self:
            rows = layer(rows if weight is None else rows.to(weight.dtype))
        return rows.float()


def build_layer(spec: LayerSpec) -> nn.Module:
    match spec:
        case DenseSpec():
            return DenseLayer(spec)
        case NormSpec():
            return nn.LayerNorm(spec.width)
        case UnitSpec():
            return UnitLayer()


class TokenVectorHead(nn.Module):
    """A vector for each token (late interaction: Khattab and Zaharia 2020, arXiv:2004.12832)."""

    def __init__(self, specs: Sequence[LayerSpec]) -> None:
        super().__init__()
        self.layers = VectorLayers(specs)

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """All rows."""
        return list(range(starts[-1])), starts

    def forward(self, states: Tensor, starts: Sequence[int]) -> Tensor:  # noqa: ARG002 - each row is on its own
        """[T, W] states to [T, C]."""
        out: Tensor = self.layers(states)
        return out

    def postprocess(self, raw: Tensor) -> Tensor:
        """The vectors as they are: their length is that of the last layer."""
        return raw


class LaterTokensHead(TokenVectorHead):
    """A vector for each token but the first, which stands for the whole text."""

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """All rows but the first of each sequence; of a sequence of one row that one."""
        kept = [range(start + (end - start > 1), end) for start, end in pairwise(starts)]
        return [row for rows in kept for row in rows], list(accumulate(map(len, kept), initial=0))


class TokenWeightHead(nn.Module):
    """A weight for each token of a text, not negative (the sparse output of M3: Chen et al. 2024, arXiv:2402.03216).

    `skipped` are tokens that no text is about: those around a text, padding and unknown words.
    """

    def __init__(self, width: int, skipped: frozenset[int]) -> None:
        super().__init__()
        self.out = nn.Linear(width, 1)
        self.skipped = skipped

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """All rows."""
        return list(range(starts[-1])), starts

    def forward(self, states: Tensor, starts: Sequence[int]) -> Tensor:  # noqa: ARG002 - each row is on its own
        """[T, W] states to [T, 1]."""
        return torch.relu(self.out(states.to(self.out.weight.dtype))).float()

    def postprocess(self, raw: Tensor) -> Tensor:
        """The weights as they are."""
        return raw


class TokenTableHead(nn.Module):
    """A weight for each token of the vocabulary, whatever the text: of queries that no network reads (Geng et al. 2024,
    arXiv:2411.04403). `skipped` are the tokens around a text."""

    def __init__(self, vocab_size: int, skipped: frozenset[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size))
        self.skipped = skipped

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """No rows."""
        return [], [0] * len(starts)

    def forward(self, tokens: Tensor, starts: Sequence[int]) -> Tensor:  # noqa: ARG002 - each token is on its own
        """Tokens [T] to their weights [T]."""
        return self.weight[tokens].float()

    def postprocess(self, raw: Tensor) -> Tensor:
        """The weights as they are."""
        return raw


class EmbeddingHead(nn.Module):
    """One vector a text: the poolings of its states side by side, and the layers after them.

    `normalise`: the vector gets length one in the end.
    """

    def __init__(self, poolings: Sequence[Pooling], layers: Sequence[LayerSpec], *, normalise: bool) -> None:
        super().__init__()
        self.poolers = nn.ModuleList(Pooler(pooling, normalise=False) for pooling in poolings)
        self.layers = VectorLayers(layers)
        self.normalise = normalise

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """The rows that are read, and the start of each sequence among them: all rows if there are several poolings."""
        if len(self.poolers) == 1:
            first = self.poolers[0]
            assert isinstance(first, Pooler)
            return first.needed_rows(starts)
        return list(range(starts[-1])), starts

    def forward(self, states: Tensor, starts: Sequence[int]) -> Tensor:
        """[T, W] states of N sequences (`starts` [N + 1]) to [N, C]."""
        pooled = [pooler(states, starts) for pooler in self.poolers]
        out: Tensor = self.layers(pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=-1))
        return out

    def postprocess(self, raw: Tensor) -> Tensor:
        """[N, C] to unit length if the checkpoint sets it."""
        return F.normalize(raw, dim=-1) if self.normalise else raw


def output_width(specs: Sequence[LayerSpec], width: int) -> int:
    """The width of vectors of `width` after the layers. ValueError names the first layer whose input is not as wide."""
    for number, spec in enumerate(specs):
        expected = spec.inputs if isinstance(spec, DenseSpec) else spec.width if isinstance(spec, NormSpec) else width
        if expected != width:
            raise ValueError(f"layer {number} takes vectors of {expected} numbers and gets vectors of {width}")
        width = spec.outputs if isinstance(spec, DenseSpec) else width
    return width
