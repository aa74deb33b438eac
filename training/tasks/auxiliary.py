"""What is learned beside a lesson: every token of its texts from those before it (Radford et al. 2018, section 3.2).

It doesn't know the lesson.  The one idea: what is lost is L2 + weight * L1, L2 the lesson's and L1 what pretraining
lost, a mean over the texts' own tokens; those that stand round texts are nobody's to tell.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.models.network.transformer import Transformer
from polyhead.models.tokenizer import Tokenizer

from ..loop.entropy import mean_entropy


def special_tokens(words: Tokenizer) -> frozenset[int]:
    """The tokens that no text has."""
    return frozenset(token for token in range(words.vocab_size) if words.is_special(token))


@dataclass(frozen=True)
class LanguageModelLoss:
    """What weighs so much beside the lesson; tokens `apart` need not be told."""

    weight: float
    excluded_tokens: frozenset[int]

    def target_count(self, sequences: Sequence[Sequence[int]]) -> int:
        return len(self.next_token_targets(sequences)[1])

    def next_token_targets(self, sequences: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """Of sequences laid end to end the rows behind which a token of a text comes, and those tokens."""
        rows: list[int] = []
        right: list[int] = []
        start = 0
        for sequence in sequences:
            for row, token in enumerate(sequence[1:], start):
                if token not in self.excluded_tokens:
                    rows.append(row)
                    right.append(token)
            start += len(sequence)
        return rows, right

    def loss(self, network: Transformer, states: Tensor, sequences: Sequence[Sequence[int]]) -> Tensor:
        """From the [T, W] states of sequences laid end to end; what tells a word is the matrix that it is read by."""
        rows, right = (
            torch.tensor(each, dtype=torch.long, device=states.device) for each in self.next_token_targets(sequences)
        )
        return self.weight * mean_entropy(states[rows], (network.tokens.weight, None), right)
