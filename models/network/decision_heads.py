"""Heads that score the options of questions about a text, which are read in one sequence with it: that of the package
laya, and the classifier of GLiNER2 (Zaratiana et al. 2025, arXiv:2507.18546).

Each sequence is computed on its own, so others of the step change nothing.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .heads import SCORE_ACTIVATIONS
from .label_heads import TwoLayers
from .model_config import ModelConfig

KINDS = 3  # of questions
HEAD_FEATURES = 64  # of an attention head of the layers above the network


class DecisionHead(nn.Module):
    """What both heads have in common. `score` computes one sequence; the rows of its options and the number of its
    questions' kind are given by the request."""

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """All rows."""
        return list(range(starts[-1])), starts

    def score(self, states: Tensor, option_rows: Sequence[int], kind: int) -> Tensor:
        """The states [T, W] of one sequence and the rows of its C options, to raw scores [C]."""
        raise NotImplementedError

    def forward(self, states: Tensor, starts: Sequence[int]) -> Tensor:
        """[T, W] states of N sequences (`starts` [N + 1]) to scores [N, 2] of the first row and the last one as
        options, for a test without options."""
        return torch.stack([self.score(states[start:end], (0, end - start - 1), 0) for start, end in pairwise(starts)])

    def postprocess(self, raw: Tensor) -> Tensor:
        """Raw scores of one question to probabilities."""
        return SCORE_ACTIVATIONS["softmax"](raw)


class OptionLayer(nn.Module):
    """A pre-norm layer with full attention over the rows of one sequence, [T, W] to [T, W] (nn.TransformerEncoderLayer
    with norm_first)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = count_heads(width)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fused, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = TwoLayers(width, 4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.fused(self.attention_norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(0, 1)[None] for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value)[0]  # [H, T, D]
        x = x + self.output(mixed.transpose(0, 1).flatten(1))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class OptionMarkHead(DecisionHead):
    """Layers over the whole sequence, with a vector for the kind of the question added to each state, and then a score
    of each option's mark."""

    def __init__(self, config: ModelConfig, depth: int) -> None:
        super().__init__()
        width = config.state_width
        self.kinds = nn.Embedding(KINDS, width)
        self.stack = nn.ModuleList(OptionLayer(width) for _ in range(depth))
        self.norm, self.layers = nn.LayerNorm(width), TwoLayers(width, width, 1, "gelu")

    def score(self, states: Tensor, option_rows: Sequence[int], kind: int) -> Tensor:
        kinds = self.kinds.weight
        x = states.to(kinds.dtype) + kinds[kind]
        for layer in self.stack:
            x = layer(x)
        marks = x[torch.tensor(option_rows, device=x.device)]  # [C, W]
        return self.layers(self.norm(marks))[:, 0].float()  # type: ignore[no-any-return]


class LabelSchemaHead(DecisionHead):
    """A score of each label's mark, whatever the kind of its question."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = TwoLayers(config.state_width, 2 * config.state_width, 1)

    def score(self, states: Tensor, option_rows: Sequence[int], kind: int) -> Tensor:  # noqa: ARG002
        marks = states[torch.tensor(option_rows, device=states.device)]  # [C, W]
        return self.layers(marks.to(self.layers.out.weight.dtype))[:, 0].float()  # type: ignore[no-any-return]


def count_heads(width: int) -> int:
    """Attention heads of a layer of states of this width."""
    return max(1, width // HEAD_FEATURES)
