"""Episodes that teach to learn: waves of classes that nobody has seen before, shown a few times each, then asked for.

It doesn't know who learns.  The one idea (Santoro et al. 2016, arXiv:1605.06065): at each time stands an item and
beside it the label of the one before.  Labels are dealt anew in every episode, so that nothing can be remembered
from one to the next but how to compare.  `python -m polyhead.training.experiments.few_shot` trains a SNAIL
(models.literature.snail) on them."""

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead.models.literature.snail import Snail, SnailConfig

from ..loop.descent import descend

TEST_EPISODES = 500  # episodes that are measured
Batch = tuple[Tensor, Tensor]  # [E, T, inputs] items and labels before; [E, T] labels


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """`ways` classes, `shots` items of each in any order, then one more item, whose label is asked for.

    A class is a wave, of `harmonics` with an amplitude and a phase each.  Of an item those differ a little (`spread`),
    it is read at `points` places with some `noise`, and its level drifts, as that of every sensor does: by as much at
    its start and at its end as `drift` says, which is of no class.
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
        """So many episodes, all of whose classes are new."""
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
        """[E, T]: all shots in some order, and one label more."""
        order = torch.rand(count, self.length - 1, generator=generator).argsort(dim=1)
        asked = torch.randint(self.ways, (count, 1), generator=generator)
        return torch.cat((order % self.ways, asked), dim=1)

    def _wave_table(self) -> Tensor:
        """[2 * harmonics, points] of sines and cosines."""
        angle = 2 * math.pi * torch.arange(self.points) / self.points
        return torch.stack([made((n + 1) * angle) for n in range(self.harmonics) for made in (torch.sin, torch.cos)])


def is_class_seen(labels: Tensor) -> Tensor:
    """[E, T] whether a label's class was shown before: only then can it be known."""
    shown = F.one_hot(labels)
    return (shown.cumsum(dim=1) - shown).gather(2, labels[..., None])[..., 0] > 0


def episode_loss(network: nn.Module, batch: Batch) -> Tensor:
    """Of all labels that can be known."""
    inputs, labels = batch
    known = is_class_seen(labels)
    return F.cross_entropy(network(inputs)[known], labels[known])


@torch.no_grad()
def accuracy(network: nn.Module, batch: Batch) -> float:
    """Of the labels asked for at the end."""
    inputs, labels = batch
    right = network(inputs)[:, -1].argmax(dim=-1) == labels[:, -1]
    return float(right.float().mean())


def nearest_accuracy(batch: Batch, points: int) -> float:
    """How often the item that is nearest to the one asked for is of its class."""
    items, labels = batch[0][..., :points], batch[1]
    closest = (items[:, -1:] - items[:, :-1]).square().sum(dim=-1).argmin(dim=1, keepdim=True)
    return float((labels.gather(1, closest)[:, 0] == labels[:, -1]).float().mean())


def train_network(episodes: Episodes, network: nn.Module, steps: int, size: int = 32, seed: int = 0) -> list[float]:
    """Train on `steps` batches of `size` episodes; the losses."""
    generator = torch.Generator().manual_seed(seed)
    return descend(
        network, lambda: episode_loss(network, episodes.sample_batch(size, generator)), steps, 0.01, sys.stderr.write
    )


def main() -> None:
    torch.manual_seed(0)
    episodes = Episodes()
    shape = SnailConfig(inputs=episodes.inputs, classes=episodes.ways, times=episodes.length)
    network, asked = Snail(shape), episodes.sample_batch(TEST_EPISODES, torch.Generator().manual_seed(1))
    train_network(episodes, network, steps=2000)
    figures = f"SNAIL {accuracy(network, asked):.3f}  nearest item {nearest_accuracy(asked, episodes.points):.3f}"
    sys.stdout.write(f"{episodes.ways} ways, {episodes.shots} shots: {figures}  chance {1 / episodes.ways:.3f}\n")


if __name__ == "__main__":
    main()
