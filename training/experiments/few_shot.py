"""Few-shot learning of waves: new classes in every episode, shown a few times each, then to be classified.

Each time step has an item and the label of the one before (Santoro et al. 2016, arXiv:1605.06065).  Labels are shuffled
in every episode, so only comparing can be learned.  `python -m polyhead.training.experiments.few_shot` trains a SNAIL
(models.literature.snail).
"""

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead.models.literature.snail import Snail, SnailConfig

from ..loop.descent import descend

TEST_EPISODES = 500  # episodes that are measured
Batch = tuple[Tensor, Tensor]  # [E, T, inputs] items and previous labels; [E, T] labels


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """Episodes of `ways` classes, `shots` items of each in random order, then one item whose label is to be predicted.

    A class is a wave of `harmonics` with an amplitude and a phase each.  Its items vary by `spread`.  An item is
    sampled at `points` places with `noise`, and its level drifts linearly between two random values of scale `drift`,
    which do not depend on the class.
    """

    ways: int = 5
    shots: int = 2
    points: int = 16
    harmonics: int = 3
    spread: float = 0.2
    noise: float = 0.1
    drift: float = 1.5

    @property
    def length(self) -> int:
        return self.ways * self.shots + 1

    @property
    def inputs(self) -> int:
        return self.points + self.ways

    def sample_batch(self, count: int, generator: torch.Generator) -> Batch:
        """Return `count` episodes with new classes."""
        labels = self._sample_labels(count, generator)
        classes = torch.randn(count, self.ways, 2 * self.harmonics, generator=generator)
        kinds = classes.gather(1, labels[..., None].expand(-1, -1, 2 * self.harmonics))
        kinds = kinds + self.spread * torch.randn(kinds.shape, generator=generator)
        items = kinds @ self._wave_table() / math.sqrt(self.harmonics)
        items = items + self.noise * torch.randn(items.shape, generator=generator)
        ends = self.drift * torch.randn(count, self.length, 2, generator=generator)
        items = items + torch.lerp(ends[..., :1], ends[..., 1:], torch.linspace(0, 1, self.points))
        before = F.one_hot(labels, self.ways).float().roll(1, dims=1)
        before[:, 0] = 0
        return torch.cat((items, before), dim=-1), labels

    def _sample_labels(self, count: int, generator: torch.Generator) -> Tensor:
        """Return labels [E, T]: all shots in random order, and the label to be predicted."""
        order = torch.rand(count, self.length - 1, generator=generator).argsort(dim=1)
        last = torch.randint(self.ways, (count, 1), generator=generator)
        return torch.cat((order % self.ways, last), dim=1)

    def _wave_table(self) -> Tensor:
        """Return sines and cosines, [2 * harmonics, points]."""
        angle = 2 * math.pi * torch.arange(self.points) / self.points
        return torch.stack([made((n + 1) * angle) for n in range(self.harmonics) for made in (torch.sin, torch.cos)])


def is_class_seen(labels: Tensor) -> Tensor:
    """Return [E, T] whether a label's class was shown before; only then can it be predicted."""
    shown = F.one_hot(labels)
    return (shown.cumsum(dim=1) - shown).gather(2, labels[..., None])[..., 0] > 0


def episode_loss(network: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss over all labels that can be predicted."""
    inputs, labels = batch
    known = is_class_seen(labels)
    return F.cross_entropy(network(inputs)[known], labels[known])


@torch.no_grad()
def accuracy(network: nn.Module, batch: Batch) -> float:
    """Return the accuracy of the last labels."""
    inputs, labels = batch
    right = network(inputs)[:, -1].argmax(dim=-1) == labels[:, -1]
    return float(right.float().mean())


def nearest_accuracy(batch: Batch, points: int) -> float:
    """Return the accuracy of the nearest item's label."""
    items, labels = batch[0][..., :points], batch[1]
    closest = (items[:, -1:] - items[:, :-1]).square().sum(dim=-1).argmin(dim=1, keepdim=True)
    return float((labels.gather(1, closest)[:, 0] == labels[:, -1]).float().mean())


def train_network(episodes: Episodes, network: nn.Module, steps: int, size: int = 32, seed: int = 0) -> list[float]:
    """Train on `steps` batches of `size` episodes, and return the losses."""
    generator = torch.Generator().manual_seed(seed)
    return descend(
        network, lambda: episode_loss(network, episodes.sample_batch(size, generator)), steps, 0.01, sys.stderr.write
    )


def main() -> None:
    torch.manual_seed(0)
    episodes = Episodes()
    shape = SnailConfig(inputs=episodes.inputs, classes=episodes.ways, times=episodes.length)
    network, test_batch = Snail(shape), episodes.sample_batch(TEST_EPISODES, torch.Generator().manual_seed(1))
    train_network(episodes, network, steps=2000)
    figures = (
        f"SNAIL {accuracy(network, test_batch):.3f}  nearest item {nearest_accuracy(test_batch, episodes.points):.3f}"
    )
    sys.stdout.write(f"{episodes.ways} ways, {episodes.shots} shots: {figures}  chance {1 / episodes.ways:.3f}\n")


if __name__ == "__main__":
    main()
