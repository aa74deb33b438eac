"""Learning to label texts: packed batches through the network and a sequence head, cross-entropy against labels.

It doesn't know where texts come from or how steps are taken; the trainer and the recipe do.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.heads import SequenceHead
from models.ragged import Ragged
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from training.data import Example
from training.errors import RecipeError


@dataclass(frozen=True)
class Labelled:
    """Texts as token ids with their labels."""

    sequences: list[list[int]]
    labels: list[int]
    domains: list[str]

    @classmethod
    def of(cls, examples: Sequence[Example], tokenizer: Tokenizer, max_tokens: int) -> "Labelled":
        """RecipeError if a text is too long: nothing is cut off silently."""
        sequences = [encoding.ids for encoding in tokenizer.encode_batch([example.text for example in examples])]
        for sequence, example in zip(sequences, examples, strict=True):
            if len(sequence) > max_tokens:
                raise RecipeError(f"{example.domain} {example.source}: {len(sequence)} tokens, at most {max_tokens}")
        return cls(sequences, [example.label for example in examples], [example.domain for example in examples])

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, rows: Sequence[int]) -> "Labelled":
        """Some of them."""
        picked = ([values[row] for row in rows] for values in (self.sequences, self.labels, self.domains))
        return Labelled(*picked)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """The task (`trainer.Task`) of a classifier: `train` in shuffled batches of `batch` texts, scored on `test`."""

    network: Transformer
    head: SequenceHead
    train: Labelled
    test: Labelled
    batch: int
    seed: int

    def modules(self) -> list[nn.Module]:
        return [self.network, self.head]

    def batches(self, epoch: int) -> list[Labelled]:
        order = list(range(len(self.train)))
        random.Random(f"{self.seed} {epoch}").shuffle(order)
        return [self.train.at(order[first : first + self.batch]) for first in range(0, len(order), self.batch)]

    def size(self, batch: Labelled) -> int:
        return sum(map(len, batch.sequences))

    def loss(self, batch: Labelled) -> Tensor:
        raw = scores(self.network, self.head, batch)
        return F.cross_entropy(raw, torch.tensor(batch.labels, device=raw.device))

    def evaluate(self) -> dict[str, float]:
        return accuracy(self.network, self.head, self.test)


def scores(network: Transformer, head: nn.Module, batch: Labelled) -> Tensor:
    """[N, labels], before the head's closing function."""
    ragged = Ragged.of(batch.sequences, device=network.tokens.weight.device)
    raw: Tensor = head(network(ragged), ragged.starts)
    return raw


@torch.no_grad()
def accuracy(network: Transformer, head: nn.Module, texts: Labelled, batch: int = 64) -> dict[str, float]:
    """Mean cross-entropy ("loss"), and the share of texts labelled rightly: of all ("accuracy") and of each domain."""
    right: Counter[str] = Counter()
    loss = 0.0
    for first in range(0, len(texts), batch):
        some = texts.at(range(first, min(first + batch, len(texts))))
        raw = scores(network, head, some)
        loss += F.cross_entropy(raw, torch.tensor(some.labels, device=raw.device), reduction="sum").item()
        best = raw.argmax(dim=-1).tolist()
        right.update(
            domain for domain, label, said in zip(some.domains, some.labels, best, strict=True) if label == said
        )
    shares = {domain: right[domain] / count for domain, count in sorted(Counter(texts.domains).items())}
    return {"loss": loss / len(texts), "accuracy": right.total() / len(texts), **shares}
