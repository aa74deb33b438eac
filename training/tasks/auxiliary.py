"""The auxiliary loss of a task: predicting every token of its texts from those before it (Radford et al. 2018, section
3.2).

The total loss is L2 + weight * L1: L2 is the task's loss and L1 the language model's, a mean over the texts' own
tokens.  Special tokens are not predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.models.network.transformer import Transformer
from polyhead.models.tokenizer import Tokenizer

from ..loop.entropy import mean_entropy


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of special tokens."""
    return frozenset(token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token))


@dataclass(frozen=True)
class LanguageModelLoss:
    """A language model loss with a weight.  `excluded_tokens` are not predicted."""

    weight: float
    excluded_tokens: frozenset[int]

    def target_count(self, sequences: Sequence[Sequence[int]]) -> int:
        return len(self.next_token_targets(sequences)[1])

    def next_token_targets(self, sequences: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """Return the rows of concatenated sequences whose next token is predicted, and those tokens."""
        rows: list[int] = []
        targets: list[int] = []
        start = 0
        for sequence in sequences:
            for row, token in enumerate(sequence[1:], start):
                if token not in self.excluded_tokens:
                    rows.append(row)
                    targets.append(token)
            start += len(sequence)
        return rows, targets

    def loss(self, network: Transformer, states: Tensor, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return the weighted loss from states [T, W] of concatenated sequences.  Scores use the embedding matrix."""
        rows, targets = (
            torch.tensor(each, dtype=torch.long, device=states.device) for each in self.next_token_targets(sequences)
        )
        return self.weight * mean_entropy(states[rows], (network.tokens.weight, None), targets)
