"""A relevance score from a generator's logits at the last token: rerankers that answer yes or no."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .heads import SCORE_ACTIVATIONS, Pooler, ScoreActivation
from .model_config import ModelConfig


class LogitScoreHead(nn.Module):
    """The logit of one token after a text, or its difference from the logit of another: log-odds of yes against no.

    `output` holds the rows of the output matrix of these tokens only, so that no other logit is computed.
    """

    def __init__(self, config: ModelConfig, rows: int, closing: ScoreActivation) -> None:
        super().__init__()
        self.pooler = Pooler("last", normalise=False)
        self.output = nn.ParameterList(nn.Parameter(torch.empty(1, config.state_width)) for _ in range(rows))
        self.logit_scale, self.logit_cap = config.logit_scale, config.logit_cap
        self.score_activation = closing

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """The last row of each sequence."""
        return self.pooler.needed_rows(starts)

    def forward(self, states: Tensor, starts: Sequence[int]) -> Tensor:
        """[T, W] states of N sequences (`starts` [N + 1]) to [N, 1] scores."""
        last = self.pooler(states, starts)
        logits = [self._logits(last, row) for row in self.output]
        return logits[0] if len(logits) == 1 else logits[0] - logits[1]

    def _logits(self, last: Tensor, row: Tensor) -> Tensor:
        """[N, 1] logits. Each row is summed on its own, so that a text's score does not depend on the others."""
        logits = (last.to(row.dtype) * row).float().sum(dim=-1, keepdim=True) * self.logit_scale
        return torch.tanh(logits / self.logit_cap) * self.logit_cap if self.logit_cap else logits

    def postprocess(self, raw: Tensor) -> Tensor:
        """[N, 1] scores to probabilities."""
        return SCORE_ACTIVATIONS[self.score_activation](raw)
