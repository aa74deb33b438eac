"""The protocol of objectives for networks trained from scratch, and their training.

An objective turns examples into items with a number of tokens, and a few items into losses.  Batching and random
numbers are the same for all objectives.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..data.examples import Example
from ..loop.entropy import OutputLayer, entropy_and_hits, mean_entropy
from ..loop.packing import pack_items

Item = TypeVar("Item")


class Objective(Protocol[Item]):
    """A training objective for examples of one form."""

    def modules(self) -> list[nn.Module]:
        """Return the modules to train."""

    def items(self, examples: Sequence[Example[Any]]) -> list[Item]:
        """Return items of examples.  Raises RecipeError if one is too long."""

    def size(self, item: Item) -> int:
        """Return an item's number of tokens."""

    def loss_parts(self, items: Sequence[Item], rng: random.Random) -> Mapping[str, "LossPart"]:
        """Return the parts of the loss, by name; random numbers come from `rng` only."""

    def counts(self, items: Sequence[Item]) -> tuple[int, ...]:
        """Return the number of choices in each part, before anything is computed."""

    def figures(self, means: Mapping[str, float], accuracies: Mapping[str, float]) -> dict[str, float]:
        """Return figures from the mean of each part over many items, and the share of right choices."""


@dataclass(frozen=True)
class LossPart:
    """One part of a loss: states [M, W], the layer that makes scores [M, V] of them, and the targets [M]."""

    states: Tensor
    output_layer: OutputLayer
    targets: Tensor
    smoothing: float = 0.0

    def mean_loss(self) -> Tensor:
        """Return the mean cross-entropy; with smoothing, the target is spread over all classes."""
        return mean_entropy(self.states, self.output_layer, self.targets, self.smoothing)

    def loss_and_hits(self) -> tuple[float, int]:
        """Return the sum of cross-entropies, without smoothing, and the number of right predictions."""
        return entropy_and_hits(self.states, self.output_layer, self.targets)


@dataclass(frozen=True)
class ObjectiveBatch(Generic[Item]):
    """A batch of items, and the seed of its random numbers."""

    items: list[Item]
    seed: str


@dataclass(frozen=True, kw_only=True)
class ObjectiveTraining(Generic[Item]):
    """Training on an objective (`trainer.Trainable`): batches of at most `tokens`, measured on `validation`."""

    objective: Objective[Item]
    train: Sequence[Item]
    validation: Sequence[Item]
    tokens: int
    seed: int

    def modules(self) -> list[nn.Module]:
        return self.objective.modules()

    def batches(self, epoch: int) -> list[ObjectiveBatch[Item]]:
        return make_batches(self.objective, self.train, self.tokens, f"{self.seed} {epoch}")

    def size(self, batch: ObjectiveBatch[Item]) -> int:
        return sum(map(self.objective.size, batch.items))

    def counts(self, batch: ObjectiveBatch[Item]) -> tuple[int, ...]:
        return self.objective.counts(batch.items)

    def losses(self, batch: ObjectiveBatch[Item]) -> Tensor:
        parts = self.objective.loss_parts(batch.items, random.Random(batch.seed))
        return torch.stack([part.mean_loss() for part in parts.values()])

    def evaluate(self) -> dict[str, float]:
        return measure_objective(self.objective, self.validation, self.tokens)


def make_batches(
    objective: Objective[Item], items: Sequence[Item], tokens: int, seed: str
) -> list[ObjectiveBatch[Item]]:
    sizes = [objective.size(item) for item in items]
    cut = pack_items(items, sizes, tokens, random.Random(seed))
    return [ObjectiveBatch(some, f"{seed} {number}") for number, some in enumerate(cut)]


@torch.no_grad()
def measure_objective(objective: Objective[Item], items: Sequence[Item], tokens: int) -> dict[str, float]:
    """Return the figures of `items`, with the same random numbers every time."""
    modules = objective.modules()
    learning = [module.training for module in modules]
    for module in modules:
        module.eval()
    losses: Counter[str] = Counter()
    hits_by_part: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for batch in make_batches(objective, items, tokens, "measured"):
        for name, part in objective.loss_parts(batch.items, random.Random(batch.seed)).items():
            loss, hits = part.loss_and_hits()
            losses[name], hits_by_part[name] = losses[name] + loss, hits_by_part[name] + hits  # type: ignore[assignment]
            counts[name] += len(part.targets)
    for module, was in zip(modules, learning, strict=True):
        module.train(was)
    known = {name: max(1, count) for name, count in counts.items()}
    return objective.figures(
        {name: losses[name] / known[name] for name in known}, {name: hits_by_part[name] / known[name] for name in known}
    )
