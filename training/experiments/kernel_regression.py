"""Kernel regression as attention (Nadaraya 1964, Watson 1964): a value at x is the mean of observed ones, weighted by
distance.

x is a query, the observations are keys and values, and a kernel is a score (models.literature.score_functions).
`python -m polyhead.training.experiments.kernel_regression` draws three kernels into docs/.
"""

import math
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from polyhead.models.literature.score_functions import (
    Gaussian,
    LearnedGaussian,
    ScoreFunction,
    ScoreWidths,
    weighted_sum,
)

from ..loop.descent import descend

HAS_MATPLOTLIB = find_spec("matplotlib") is not None
if HAS_MATPLOTLIB:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

FIGURE_FILE = Path(__file__).resolve().parents[2] / "docs" / "kernel-regression.svg"
X_END = 5.0  # end of the range of x, which begins at 0
SCALAR_WIDTHS = ScoreWidths(query=1, key=1)


class UniformScore(ScoreFunction):
    """The same score for all keys: the plain mean."""

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return query.new_zeros(query.size(-2), keys.size(-2))


KERNELS: dict[str, type[ScoreFunction]] = {
    "average": UniformScore,
    "Gaussian kernel": Gaussian,
    "learned width": LearnedGaussian,
}


def true_function(x: Tensor) -> Tensor:
    return 2 * x.sin() + x**0.8


@dataclass(frozen=True)
class Observations:
    """Places [K, 1] in order, and the values observed there."""

    x: Tensor
    y: Tensor

    @classmethod
    def sample(cls, count: int, generator: torch.Generator, noise: float = 0.5) -> "Observations":
        x = (torch.rand(count, 1, generator=generator) * X_END).sort(dim=0).values
        return cls(x, true_function(x) + noise * torch.randn(count, 1, generator=generator))


def predict(score: ScoreFunction, observed: Observations, x: Tensor) -> Tensor:
    """Return predicted values [Q, 1] at places [Q, 1]."""
    mixed, _ = weighted_sum(x, observed.x, observed.y, score, torch.ones(1, dtype=torch.bool))
    return mixed


def leave_one_out_loss(score: ScoreFunction, observed: Observations) -> Tensor:
    """Return the mean squared error of each observation, predicted from the others.

    With itself included, the narrowest kernel would always be best.
    """
    mixed, _ = weighted_sum(observed.x, observed.x, observed.y, score, ~torch.eye(len(observed.x), dtype=torch.bool))
    return (mixed - observed.y).square().mean()


def learn_width(score: ScoreFunction, observed: Observations, steps: int = 100) -> list[float]:
    """Train the kernel's width by leave-one-out, and return the losses."""
    return descend(score, lambda: leave_one_out_loss(score, observed), steps, 0.1)


def mean_squared_error(score: ScoreFunction, observed: Observations) -> float:
    """Return the mean squared error over the whole range."""
    x = torch.linspace(0, X_END, 101)[:, None]
    with torch.no_grad():
        return float((predict(score, observed, x) - true_function(x)).square().mean())


def fit_kernels(observed: Observations) -> dict[str, ScoreFunction]:
    """Return each kernel, trained if it has a parameter."""
    scores = {name: kernel(SCALAR_WIDTHS) for name, kernel in KERNELS.items()}
    for score in scores.values():
        if list(score.parameters()):
            learn_width(score, observed)
    return scores


def draw_figure(observed: Observations, scores: dict[str, ScoreFunction], picture: Path) -> None:
    """Write the figure as an SVG, reproducible to the byte."""
    x = torch.linspace(0, X_END, 101)[:, None]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "polyhead"}), torch.no_grad():
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(observed.x.numpy(), observed.y.numpy(), ".", color="0.6", label="seen")
        axes.plot(x.numpy(), true_function(x).numpy(), "k--", linewidth=1, label="2 sin x + x^0.8")
        for name, score in scores.items():
            axes.plot(
                x.numpy(),
                predict(score, observed, x).numpy(),
                label=f"{name}: off by {root_mean_squared_error(score, observed):.2f}",
            )
        axes.set(xlabel="x", ylabel="y")
        axes.legend()
        figure.savefig(picture, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))


def root_mean_squared_error(score: ScoreFunction, observed: Observations) -> float:
    return math.sqrt(mean_squared_error(score, observed))


def main() -> None:
    torch.manual_seed(0)
    observed = Observations.sample(50, torch.Generator().manual_seed(0))
    scores = fit_kernels(observed)
    for name, score in scores.items():
        sys.stdout.write(f"{name}: off by {root_mean_squared_error(score, observed):.3f}\n")
    if not HAS_MATPLOTLIB:
        sys.stdout.write("no picture: drawing it needs an extra, pip install 'polyhead[explain]'\n")
        return
    draw_figure(observed, scores, FIGURE_FILE)
    sys.stdout.write(f"drawn: {FIGURE_FILE.name}\n")


if __name__ == "__main__":
    main()
