"""Attention before there were networks: a value at x is the mean of those seen, weighed by how near they were seen.

Nadaraya 1964, Watson 1964.  It doesn't know of batches or tokens.  The one idea: x is a query, what was seen are keys
and values, and a kernel is a score (models.literature.score_functions); so whatever else attention may be, it is this.
`python -m polyhead.training.experiments.kernel_regression` draws three ways to weigh into docs/.
"""

import math
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from polyhead.models.literature.score_functions import Gaussian, LearnedGaussian, Score, Widths, attend

from ..loop.descent import descend

PRESENT = find_spec("matplotlib") is not None
if PRESENT:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "kernel-regression.svg"
END = 5.0  # of what is seen and asked for, which begins at 0
ONE = Widths(query=1, key=1)


class Even(Score):
    """Near or far, all the same: the plain mean."""

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return query.new_zeros(query.size(-2), keys.size(-2))


WAYS: dict[str, type[Score]] = {"average": Even, "Gaussian kernel": Gaussian, "learned width": LearnedGaussian}


def truth(x: Tensor) -> Tensor:
    return 2 * x.sin() + x**0.8


@dataclass(frozen=True)
class Seen:
    """[K, 1] places, in order, and the values that were seen there."""

    x: Tensor
    y: Tensor

    @classmethod
    def drawn(cls, count: int, generator: torch.Generator, noise: float = 0.5) -> "Seen":
        x = (torch.rand(count, 1, generator=generator) * END).sort(dim=0).values
        return cls(x, truth(x) + noise * torch.randn(count, 1, generator=generator))


def foretold(score: Score, seen: Seen, x: Tensor) -> Tensor:
    """[Q, 1] values at [Q, 1] places."""
    mixed, _ = attend(x, seen.x, seen.y, score, torch.ones(1, dtype=torch.bool))
    return mixed


def left_out(score: Score, seen: Seen) -> Tensor:
    """The mean square of what is wrong about each value that was seen, foretold from the others: of itself a value is
    foretold best by the narrowest kernel there is."""
    mixed, _ = attend(seen.x, seen.x, seen.y, score, ~torch.eye(len(seen.x), dtype=torch.bool))
    return (mixed - seen.y).square().mean()


def learned(score: Score, seen: Seen, steps: int = 100) -> list[float]:
    """The width that foretells values from each other best; the losses."""
    return descend(score, lambda: left_out(score, seen), steps, 0.1)


def wrong(score: Score, seen: Seen) -> float:
    """The mean square of what is wrong at places all along."""
    x = torch.linspace(0, END, 101)[:, None]
    with torch.no_grad():
        return float((foretold(score, seen, x) - truth(x)).square().mean())


def fitted(seen: Seen) -> dict[str, Score]:
    """Each way to weigh, with its width learned where it has one."""
    scores = {name: way(ONE) for name, way in WAYS.items()}
    for score in scores.values():
        if list(score.parameters()):
            learned(score, seen)
    return scores


def draw(seen: Seen, scores: dict[str, Score], picture: Path) -> None:
    """An SVG that is the same whenever it is made of the same."""
    x = torch.linspace(0, END, 101)[:, None]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "polyhead"}), torch.no_grad():
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(seen.x.numpy(), seen.y.numpy(), ".", color="0.6", label="seen")
        axes.plot(x.numpy(), truth(x).numpy(), "k--", linewidth=1, label="2 sin x + x^0.8")
        for name, score in scores.items():
            axes.plot(x.numpy(), foretold(score, seen, x).numpy(), label=f"{name}: off by {off(score, seen):.2f}")
        axes.set(xlabel="x", ylabel="y")
        axes.legend()
        figure.savefig(picture, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))


def off(score: Score, seen: Seen) -> float:
    return math.sqrt(wrong(score, seen))


def main() -> None:
    torch.manual_seed(0)
    seen = Seen.drawn(50, torch.Generator().manual_seed(0))
    scores = fitted(seen)
    for name, score in scores.items():
        sys.stdout.write(f"{name}: off by {off(score, seen):.3f}\n")
    if not PRESENT:
        sys.stdout.write("no picture: drawing it needs an extra, pip install 'polyhead[explain]'\n")
        return
    draw(seen, scores, PICTURE)
    sys.stdout.write(f"drawn: {PICTURE.name}\n")


if __name__ == "__main__":
    main()
