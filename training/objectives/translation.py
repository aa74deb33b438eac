"""The objective of encoder-decoders: predicting each token of a translation from the source and the tokens before it.

The tokens before are the right ones (teacher forcing, Williams and Zipser 1989).  The loss is a mean over tokens, not
over sentences.  It works with any network of models.seq2seq.protocol.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.seq2seq.protocol import Seq2Seq
from polyhead.models.tokenizer import Tokenizer

from ..data.examples import Example
from .objective import LossPart


@dataclass(frozen=True)
class TranslationPair:
    """Token ids of source and target, each with its end token."""

    source: list[int]
    target: list[int]


@dataclass(frozen=True, kw_only=True)
class TranslationObjective:
    """Next-token prediction of translations.  Pairs with more than `limit` tokens on a side are left out.

    `smoothing` is the share of the target that is spread over all tokens.
    """

    network: Seq2Seq
    tokenizer: Tokenizer
    limit: int
    smoothing: float = 0.1

    def modules(self) -> list[nn.Module]:
        return [cast(nn.Module, self.network)]

    def items(self, examples: Sequence[Example[Any]]) -> list[TranslationPair]:
        sources = self.encode([example.text for example in examples])
        targets = self.encode([example.label for example in examples])
        pairs = zip(sources, targets, strict=True)
        return [TranslationPair(*pair) for pair in pairs if max(map(len, pair)) <= self.limit]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [each.ids for each in self.tokenizer.encode_batch(texts, untrusted=True, offsets=False)]

    def size(self, item: TranslationPair) -> int:
        return len(item.source) + len(item.target)

    def counts(self, items: Sequence[TranslationPair]) -> tuple[int, ...]:
        return (sum(len(item.target) for item in items),)

    def loss_parts(self, items: Sequence[TranslationPair], rng: random.Random) -> dict[str, LossPart]:  # noqa: ARG002 - no chance
        device = self.device
        sources = RaggedBatch.of([item.source for item in items], device=device)
        decoder_inputs = RaggedBatch.of(
            [[self.network.start_token, *item.target[:-1]] for item in items], device=device
        )
        targets = torch.tensor([token for item in items for token in item.target], device=device)
        return {
            "written": LossPart(
                self.network.readout(sources, decoder_inputs), self.network.output_layer, targets, self.smoothing
            )
        }

    def figures(self, means: Mapping[str, float], accuracies: Mapping[str, float]) -> dict[str, float]:
        """Return cross-entropy in nats, perplexity, and the share of right predictions."""
        return {"loss": means["written"], "perplexity": math.exp(means["written"]), "accuracy": accuracies["written"]}

    @property
    def device(self) -> torch.device:
        return next(self.modules()[0].parameters()).device
