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
from .work_pieces import ATTENDING_ROWS, PIECE_PRODUCTS, Pieces, finish, map_rows, split_range

KINDS = 3  # of questions
HEAD_FEATURES = 64  # of an attention head of the layers above the network


class DecisionHead(nn.Module):
    """What both heads have in common. `score` computes one sequence, and `score_in_pieces` with pauses; the rows of its
    options and the number of its questions' kind are given by the request."""

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """All rows."""
        return list(range(starts[-1])), starts

    def score_in_pieces(self, states: Tensor, option_rows: Sequence[int], kind: int) -> Pieces[Tensor]:
        """The states [T, W] of one sequence and the rows of its C options, to raw scores [C]."""
        raise NotImplementedError

    def score(self, states: Tensor, option_rows: Sequence[int], kind: int) -> Tensor:
        return finish(self.score_in_pieces(states, option_rows, kind))

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
        return finish(self.read(x))

    def read(self, x: Tensor) -> Pieces[Tensor]:
        width = x.size(1)
        fused = yield from map_rows(self._project, x, 3 * width**2)
        mixed = yield from attend_in_pieces(*fused.reshape(len(x), 3, self.heads, -1).permute(1, 2, 0, 3))  # [H, T, D]
        x = x + (yield from map_rows(self.output, mixed.transpose(0, 1).flatten(1), width**2))
        return x + (yield from map_rows(self._transform, x, self.mlp.products))

    def _project(self, rows: Tensor) -> Tensor:
        return self.fused(self.attention_norm(rows))  # type: ignore[no-any-return]

    def _transform(self, rows: Tensor) -> Tensor:
        return self.mlp(self.mlp_norm(rows))  # type: ignore[no-any-return]


def attend_in_pieces(query: Tensor, key: Tensor, value: Tensor) -> Pieces[Tensor]:
    """Full attention of H heads over T rows, [H, T, D] each, to [H, T, D]: some heads, or some rows of a head, in a
    piece of work."""
    heads, count, width = query.shape
    together = max(PIECE_PRODUCTS // (2 * count**2 * width), 1)
    mixed = torch.empty_like(query)
    for first in range(0, heads, together):
        some = slice(first, first + together)
        for start, end in split_range(count, ATTENDING_ROWS):
            rows = query[None, some, start:end]
            mixed[some, start:end] = F.scaled_dot_product_attention(rows, key[None, some], value[None, some])[0]
            yield
    return mixed


class OptionMarkHead(DecisionHead):
    """Layers over the whole sequence, with a vector for the kind of the question added to each state, and then a score
    of each option's mark."""

    def __init__(self, config: ModelConfig, depth: int) -> None:
        super().__init__()
        width = config.state_width
        self.kinds = nn.Embedding(KINDS, width)
        self.stack = nn.ModuleList(OptionLayer(width) for _ in range(depth))
        self.norm, self.layers = nn.LayerNorm(width), TwoLayers(width, width, 1, "gelu")

    def score_in_pieces(self, states: Tensor, option_rows: Sequence[int], kind: int) -> Pieces[Tensor]:
        kinds = self.kinds.weight
        x = states.to(kinds.dtype) + kinds[kind]
        for layer in self.stack:
            assert isinstance(layer, OptionLayer)
            x = yield from layer.read(x)
        marks = x[torch.tensor(option_rows, device=x.device)]  # [C, W]
        return (yield from self.layers.map(self.norm(marks)))[:, 0].float()


class LabelSchemaHead(DecisionHead):
    """A score of each label's mark, whatever the kind of its question."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = TwoLayers(config.state_width, 2 * config.state_width, 1)

    def score_in_pieces(self, states: Tensor, option_rows: Sequence[int], kind: int) -> Pieces[Tensor]:  # noqa: ARG002
        marks = states[torch.tensor(option_rows, device=states.device)]  # [C, W]
        return (yield from self.layers.map(marks.to(self.layers.out.weight.dtype)))[:, 0].float()


def count_heads(width: int) -> int:
    """Attention heads of a layer of states of this width."""
    return max(1, width // HEAD_FEATURES)
