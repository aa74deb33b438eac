"""The objective of whatever reads one sequence and writes another: each token of a translation from those before it.

Knows no network but by what all have in common (models.seq2seq.protocol).  What was written so far is given (teacher
forcing, Williams and Zipser 1989), and the loss is a mean over tokens, not over sentences."""

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
    """What is read and what is to be written, each with its end."""

    source: list[int]
    target: list[int]


@dataclass(frozen=True, kw_only=True)
class TranslationObjective:
    """Pairs of which a side has more than `limit` tokens are left out.

    `smoothing`: the share of the target that is spread over all words.
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

    def loss_parts(self, items: Sequence[TranslationPair], draw: random.Random) -> dict[str, LossPart]:  # noqa: ARG002 - no chance
        device = self.device
        sources = RaggedBatch.of([item.source for item in items], device=device)
        given = RaggedBatch.of([[self.network.start_token, *item.target[:-1]] for item in items], device=device)
        right = torch.tensor([token for item in items for token in item.target], device=device)
        return {
            "written": LossPart(self.network.readout(sources, given), self.network.output_layer, right, self.smoothing)
        }

    def figures(self, means: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
        """Of tokens, given what stands before them: cross-entropy in nats, perplexity, the share told rightly."""
        return {"loss": means["written"], "perplexity": math.exp(means["written"]), "accuracy": right["written"]}

    @property
    def device(self) -> torch.device:
        return next(self.modules()[0].parameters()).device
