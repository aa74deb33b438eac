"""The objective of generators: predicting every token from those before it (Radford et al. 2018).

A document is its tokens with an end token on both sides, cut into pieces of the context's length.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.transformer import Transformer
from polyhead.models.tokenizer import Tokenizer

from ..data.examples import Example
from .objective import LossPart


@dataclass(frozen=True, kw_only=True)
class CausalObjective:
    """Next-token prediction over sequences of `limit` tokens."""

    network: Transformer
    head: LanguageHead
    tokenizer: Tokenizer
    limit: int

    def modules(self) -> list[nn.Module]:
        return [self.network, self.head]

    def items(self, examples: Sequence[Example[Any]]) -> list[list[int]]:
        """Return pieces of documents.  Neighbouring pieces share one token: the last target of one is the first input
        of the next.
        """
        end = self.tokenizer.eos_id
        assert end is not None
        texts = self.tokenizer.encode_batch([e.text for e in examples], special=False, untrusted=True, offsets=False)
        documents = ([end, *text.ids, end] for text in texts)
        return [
            document[at : at + self.limit + 1]
            for document in documents
            for at in range(0, len(document) - 1, self.limit)
        ]

    def size(self, item: list[int]) -> int:
        return len(item) - 1

    def counts(self, items: Sequence[list[int]]) -> tuple[int, ...]:
        return (sum(map(self.size, items)),)

    def loss_parts(self, items: Sequence[list[int]], rng: random.Random) -> dict[str, LossPart]:  # noqa: ARG002 - no chance
        device = self.network.tokens.weight.device
        states = self.network(RaggedBatch.of([item[:-1] for item in items], device=device))
        targets = torch.tensor([token for item in items for token in item[1:]], device=device)
        return {"next": LossPart(states, (self.head.output.weight, None), targets)}

    def figures(self, means: Mapping[str, float], accuracies: Mapping[str, float]) -> dict[str, float]:
        """Return cross-entropy in nats, perplexity, and the share of right predictions."""
        return {"loss": means["next"], "perplexity": math.exp(means["next"]), "accuracy": accuracies["next"]}
