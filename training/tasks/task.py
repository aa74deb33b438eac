"""The protocol of tasks with labelled examples, and their training.

Labelling texts, tagging words and finding answers are all choices: scores of some options are compared with the right
one by cross-entropy.  A task defines the options and the figures.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead.models.network.heads import read_rows
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.transformer import Transformer

from ..data.examples import Example
from .auxiliary import LanguageModelLoss
from .text_reader import TextReader

Item = TypeVar("Item")
Figures = dict[str, float]


@dataclass(frozen=True)
class TaskBatch:
    """A batch of a task.

    `rows` select rows of the head's scores, equally many for each of the `targets`; a target is an index among its
    scores.  With `rows_are_scores` they select single scores of the flattened matrix, and -1 is a score of minus
    infinity.  A text that is read in several orders has the rows of each next to each other, and their scores are
    added.
    """

    sequences: list[list[int]]
    segments: list[list[int]]
    rows: list[int]
    targets: list[int]
    rows_are_scores: bool = False
    order_count: int = 1


class Task(Protocol[Item]):
    """A task with labelled examples."""

    @property
    def kind(self) -> Literal["classify", "tag", "span"]:
        """The kind of the task's head."""

    def items(self, examples: Sequence[Example[Any]], read: TextReader) -> list[Item]:
        """Return an item for each example."""

    def truncated_count(self, items: Sequence[Item]) -> int:
        """Return how many items were truncated."""

    def pack(self, items: Sequence[Item], read: TextReader, learning: bool) -> TaskBatch:
        """Return a batch, for training (`learning`) or measuring."""

    def figures(self, items: Sequence[Item], scores: Tensor) -> Figures:
        """Return figures from scores [choices, options] of all items, in their order."""

    def baselines(self, trained: Sequence[Item], items: Sequence[Item], embed: "EmbedTexts") -> Figures:
        """Return figures of simple methods on the same items."""


class EmbedTexts(Protocol):
    """Returns vectors [N, W] of texts from the base model before training."""

    def __call__(self, texts: Sequence[str]) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class TaskTraining(Generic[Item]):
    """Training on a task (`trainer.Trainable`): `train` in shuffled batches of `batch` items, measured on `validation`.

    `auxiliary` are further losses on the same texts.
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
    """Return scores [choices, options] before the head's activation."""
    return choice_scores(head, batch_states(network, batch), batch)


def batch_states(network: Transformer, batch: TaskBatch) -> Tensor:
    """Return the network's states [T, W] of a batch."""
    segments = batch.segments if any(map(any, batch.segments)) else None
    states: Tensor = network(RaggedBatch.of(batch.sequences, segments, device=network.tokens.weight.device))
    return states


def choice_scores(head: nn.Module, states: Tensor, batch: TaskBatch) -> Tensor:
    """Return scores [choices, options] from a batch's states [T, W]."""
    rows, starts = read_rows(head, batch.sequences)
    raw: Tensor = head(states if len(rows) == len(states) else states[rows], starts)
    if batch.rows_are_scores:
        raw = F.pad(raw.reshape(-1, 1), (0, 0, 0, 1), value=-math.inf)
    selected = raw[torch.tensor(batch.rows, device=raw.device)]
    return selected.reshape(-1, batch.order_count, selected.size(-1)).sum(dim=1).reshape(len(batch.targets), -1)


@torch.no_grad()
def measure_task(
    task: Task[Item], network: Transformer, head: nn.Module, read: TextReader, items: Sequence[Item]
) -> Figures:
    """Return the mean cross-entropy ("loss") and the task's figures."""
    found: list[Tensor] = []
    targets: list[int] = []
    for some in split_batches(items, 16):
        batch = task.pack(some, read, learning=False)
        found.append(score_batch(network, head, batch).cpu())
        targets += batch.targets
    widest = max(each.size(1) for each in found)
    raw = torch.cat([F.pad(each, (0, widest - each.size(1)), value=-math.inf) for each in found])
    return {"loss": F.cross_entropy(raw, torch.tensor(targets)).item(), **task.figures(items, raw)}
