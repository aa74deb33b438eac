"""What a whole network is taught, and the task of learning it.

It doesn't know which network it is.  The one idea: an objective turns examples into items of so many tokens each, and a
few items into losses; batches, bounded by tokens, and chance are the same for all.
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
    """What is learned of examples of one shape."""

    def modules(self) -> list[nn.Module]:
        """What is trained."""

    def items(self, examples: Sequence[Example[Any]]) -> list[Item]:
        """What is learned of examples, in pieces; RecipeError if one is too long."""

    def size(self, item: Item) -> int:
        """How many tokens it has."""

    def loss_parts(self, items: Sequence[Item], draw: random.Random) -> Mapping[str, "LossPart"]:
        """The parts of the loss, by name; what is left to chance is drawn from `draw` alone."""

    def counts(self, items: Sequence[Item]) -> tuple[int, ...]:
        """How many choices each part will be a mean of, known before anything is computed."""

    def figures(self, means: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
        """How well it does, by the mean of each part over many items, and the share of choices that were right."""


@dataclass(frozen=True)
class LossPart:
    """Choices of one kind: [M, W] states, what makes [M, V] scores of them, and the [M] right ones among these."""

    states: Tensor
    output_layer: OutputLayer
    targets: Tensor
    smoothing: float = 0.0

    def mean_loss(self) -> Tensor:
        """The mean cross-entropy; with smoothing, the target is spread over all."""
        return mean_entropy(self.states, self.output_layer, self.targets, self.smoothing)

    def loss_and_hits(self) -> tuple[float, int]:
        """The sum of the cross-entropies, without smoothing, and how many are right."""
        return entropy_and_hits(self.states, self.output_layer, self.targets)


@dataclass(frozen=True)
class ObjectiveBatch(Generic[Item]):
    """A few items, and what chance of theirs is drawn from."""

    items: list[Item]
    seed: str


@dataclass(frozen=True, kw_only=True)
class ObjectiveTraining(Generic[Item]):
    """The task (`trainer.Task`): batches of at most `tokens`, measured on `validation`."""

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
    """Figures of `items`; what is left to chance is the same every time."""
    modules = objective.modules()
    learning = [module.training for module in modules]
    for module in modules:
        module.eval()
    losses: Counter[str] = Counter()
    right: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for batch in make_batches(objective, items, tokens, "measured"):
        for name, part in objective.loss_parts(batch.items, random.Random(batch.seed)).items():
            loss, hits = part.loss_and_hits()
            losses[name], right[name] = losses[name] + loss, right[name] + hits  # type: ignore[assignment]
            counts[name] += len(part.targets)
    for module, was in zip(modules, learning, strict=True):
        module.train(was)
    known = {name: max(1, count) for name, count in counts.items()}
    return objective.figures(
        {name: losses[name] / known[name] for name in known}, {name: right[name] / known[name] for name in known}
    )
