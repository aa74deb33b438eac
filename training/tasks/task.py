"""What examples teach, and the task of learning it.

It doesn't know where examples come from or how steps are taken.  The one idea: to label a text, to tag a word and to
find a passage are one thing, a choice: the scores of what there is to choose from are compared by cross-entropy with
what is right.  A lesson says what there is to choose from, and which figures tell how well it was learned.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.transformer import Transformer

from ..data.examples import Example
from .auxiliary import LanguageModelLoss
from .text_reader import TextReader

Item = TypeVar("Item")
Figures = dict[str, float]


@dataclass(frozen=True)
class TaskBatch:
    """A batch as the network reads it.

    `rows` are those of the head's scores that are looked at; they are divided evenly among the `right` choices, each a
    number among its scores.  `each`: they number not rows but scores, row after row; -1 is none, which is never chosen.
    Where a text is read in several `orders`, the rows of each stand together and are added.
    """

    sequences: list[list[int]]
    segments: list[list[int]]
    rows: list[int]
    targets: list[int]
    rows_are_scores: bool = False
    order_count: int = 1


class Task(Protocol[Item]):
    """What is learned of examples of one shape."""

    @property
    def kind(self) -> Literal["classify", "tag", "span"]:
        """Of the head that answers."""

    def items(self, examples: Sequence[Example[Any]], read: TextReader) -> list[Item]:
        """One an example."""

    def truncated_count(self, items: Sequence[Item]) -> int:
        """How many of them were not read to their end."""

    def pack(self, items: Sequence[Item], read: TextReader, learning: bool) -> TaskBatch:
        """A batch, `learning` from it or measuring."""

    def figures(self, items: Sequence[Item], scores: Tensor) -> Figures:
        """How well a head does, by its [choices, options] scores for all of the items, in their order."""

    def baselines(self, learned: Sequence[Item], items: Sequence[Item], embed: "EmbedTexts") -> Figures:
        """How well something simple does on the same items."""


class EmbedTexts(Protocol):
    """Texts to their [N, W] vectors, as the trunk makes them before anything is learned."""

    def __call__(self, texts: Sequence[str]) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class TaskTraining(Generic[Item]):
    """The task (`trainer.Task`): `train` in shuffled batches of `batch` items, measured on `validation`.

    `beside` is what else is learned of the same texts.
    """

    task: Task[Item]
    network: Transformer
    head: nn.Module
    reader: TextReader
    train: Sequence[Item]
    validation: Sequence[Item]
    batch: int
    seed: int
    auxiliary: tuple[LanguageModelLoss, ...] = ()

    def modules(self) -> list[nn.Module]:
        return [self.network, self.head]

    def batches(self, epoch: int) -> list[TaskBatch]:
        order = list(range(len(self.train)))
        random.Random(f"{self.seed} {epoch}").shuffle(order)
        shuffled = [self.train[row] for row in order]
        return [self.task.pack(some, self.reader, learning=True) for some in split_batches(shuffled, self.batch)]

    def size(self, batch: TaskBatch) -> int:
        return sum(map(len, batch.sequences))

    def counts(self, batch: TaskBatch) -> tuple[int, ...]:
        return (len(batch.targets), *(each.target_count(batch.sequences) for each in self.auxiliary))

    def losses(self, batch: TaskBatch) -> Tensor:
        states = batch_states(self.network, batch)
        raw = choice_scores(self.head, states, batch)
        chosen = F.cross_entropy(raw, torch.tensor(batch.targets, device=raw.device))
        return torch.stack([chosen, *(each.loss(self.network, states, batch.sequences) for each in self.auxiliary)])

    def evaluate(self) -> Figures:
        return measure_task(self.task, self.network, self.head, self.reader, self.validation)


def split_batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[first : first + size] for first in range(0, len(items), size))


def score_batch(network: Transformer, head: nn.Module, batch: TaskBatch) -> Tensor:
    """[choices, options], before the head's closing function."""
    return choice_scores(head, batch_states(network, batch), batch)


def batch_states(network: Transformer, batch: TaskBatch) -> Tensor:
    """[T, W]"""
    segments = batch.segments if any(map(any, batch.segments)) else None
    states: Tensor = network(RaggedBatch.of(batch.sequences, segments, device=network.tokens.weight.device))
    return states


def choice_scores(head: nn.Module, states: Tensor, batch: TaskBatch) -> Tensor:
    """What the head says of a batch's [T, W] states: [choices, options]."""
    raw: Tensor = head(states, list(accumulate(map(len, batch.sequences), initial=0)))
    if batch.rows_are_scores:
        raw = F.pad(raw.reshape(-1, 1), (0, 0, 0, 1), value=-math.inf)
    shown = raw[torch.tensor(batch.rows, device=raw.device)]
    return shown.reshape(-1, batch.order_count, shown.size(-1)).sum(dim=1).reshape(len(batch.targets), -1)


@torch.no_grad()
def measure_task(
    lesson: Task[Item], network: Transformer, head: nn.Module, read: TextReader, items: Sequence[Item]
) -> Figures:
    """Mean cross-entropy ("loss"), and the lesson's own figures."""
    found: list[Tensor] = []
    right: list[int] = []
    for some in split_batches(items, 16):
        batch = lesson.pack(some, read, learning=False)
        found.append(score_batch(network, head, batch).cpu())
        right += batch.targets
    widest = max(each.size(1) for each in found)
    raw = torch.cat([F.pad(each, (0, widest - each.size(1)), value=-math.inf) for each in found])
    return {"loss": F.cross_entropy(raw, torch.tensor(right)).item(), **lesson.figures(items, raw)}
