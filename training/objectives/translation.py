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

from polyhead.models.network.ragged import Ragged
from polyhead.models.seq2seq.protocol import Seq2Seq
from polyhead.models.tokenizer import Tokenizer

from ..data.examples import Example
from .objective import Part


@dataclass(frozen=True)
class Sentence:
    """What is read and what is to be written, each with its end."""

    source: list[int]
    target: list[int]


@dataclass(frozen=True, kw_only=True)
class Translation:
    """Pairs of which a side has more than `limit` tokens are left out.

    `smoothing`: the share of the target that is spread over all words.
    """

    network: Seq2Seq
    tokenizer: Tokenizer
    limit: int
    smoothing: float = 0.1

    def modules(self) -> list[nn.Module]:
        return [cast(nn.Module, self.network)]

    def items(self, examples: Sequence[Example[Any]]) -> list[Sentence]:
        sources = self.encoded([example.text for example in examples])
        targets = self.encoded([example.label for example in examples])
        pairs = zip(sources, targets, strict=True)
        return [Sentence(*pair) for pair in pairs if max(map(len, pair)) <= self.limit]

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        return [each.ids for each in self.tokenizer.encode_batch(texts, untrusted=True, offsets=False)]

    def size(self, item: Sentence) -> int:
        return len(item.source) + len(item.target)

    def counts(self, items: Sequence[Sentence]) -> tuple[int, ...]:
        return (sum(len(item.target) for item in items),)

    def parts(self, items: Sequence[Sentence], draw: random.Random) -> dict[str, Part]:  # noqa: ARG002 - no chance
        device = self.device
        sources = Ragged.of([item.source for item in items], device=device)
        given = Ragged.of([[self.network.start, *item.target[:-1]] for item in items], device=device)
        right = torch.tensor([token for item in items for token in item.target], device=device)
        return {"written": Part(self.network.readout(sources, given), self.network.last, right, self.smoothing)}

    def figures(self, means: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
        """Of tokens, given what stands before them: cross-entropy in nats, perplexity, the share told rightly."""
        return {"loss": means["written"], "perplexity": math.exp(means["written"]), "accuracy": right["written"]}

    @property
    def device(self) -> torch.device:
        return next(self.modules()[0].parameters()).device
