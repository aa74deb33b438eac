"""The training loop: batches in, smaller losses out.

It doesn't know what is learned: a task hands it batches, a loss and an evaluation.  AdamW, a learning rate that warms
up and decays linearly to zero, clipped gradients, an evaluation per epoch, and a journal of all of it.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol, TextIO, TypeVar

import torch
from torch import Tensor, nn

SHOWN = 4  # figures of an evaluation; the file has all
Batch = TypeVar("Batch")


class Task(Protocol[Batch]):
    """What is learned and how well it is known."""

    def modules(self) -> list[nn.Module]:
        """What is trained: parameters that require a gradient are updated."""

    def batches(self, epoch: int) -> Sequence[Batch]:
        """The batches of an epoch in their order, equally many in every epoch."""

    def size(self, batch: Batch) -> int:
        """How many tokens a batch has."""

    def loss(self, batch: Batch) -> Tensor:
        """A scalar to be made smaller."""

    def evaluate(self) -> dict[str, float]:
        """Figures by name; called without gradients and in evaluation mode."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a task is trained.  `warm_up` is the share of steps over which the rate rises to `rate`."""

    epochs: int
    rate: float
    warm_up: float = 0.06
    weight_decay: float = 0.01
    clip: float = 1.0

    def factor(self, step: int, steps: int) -> float:
        """What the rate is multiplied by in `step` of `steps`: up to 1, then down towards 0."""
        rise = max(1, round(self.warm_up * steps))
        return min((step + 1) / rise, (steps - step) / max(1, steps - rise))


class Journal:
    """Keeps every figure as a line of JSON in `path` and shows the latest on `stream`."""

    def __init__(self, path: Path, steps: int, stream: TextIO = sys.stderr, every: int = 20) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.steps, self.stream, self.every = path, steps, stream, every
        self.path.write_text("")
        self.started, self.step_count, self.tokens, self.loss = time.monotonic(), 0, 0, 0.0

    def step(self, loss: float, tokens: int, rate: float) -> None:
        """One more step; the loss shown is a running mean over some twenty steps."""
        self.loss = loss if not self.step_count else 0.95 * self.loss + 0.05 * loss
        self.step_count += 1
        self.tokens += tokens
        if self.step_count % self.every and self.step_count != self.steps:
            return
        seconds = time.monotonic() - self.started
        left = seconds / self.step_count * (self.steps - self.step_count)
        speed = self.tokens / max(seconds, 1e-9)
        self.write({"step": self.step_count, "loss": loss, "rate": rate, "tokens": self.tokens, "seconds": seconds})
        line = f"step {self.step_count}/{self.steps}  loss {self.loss:.4f}  {speed:,.0f} tokens/s  {left:.0f} s left"
        self.show(f"\r{line}   " if self.stream.isatty() else "")

    def figures(self, epoch: int, figures: dict[str, float]) -> None:
        """An evaluation, of which the first few figures are shown."""
        self.write({"epoch": epoch, "step": self.step_count, **figures})
        shown = "  ".join(f"{name} {value:.4f}" for name, value in islice(figures.items(), SHOWN))
        self.show(f"\repoch {epoch}  loss {self.loss:.4f}  {shown}\n")

    def write(self, record: dict[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({name: round(value, 6) for name, value in record.items()}) + "\n")

    def show(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


def train(task: Task[Batch], plan: Plan, path: Path) -> dict[str, float]:
    """Run the plan, journal to `path`, and return the last evaluation."""
    parameters = [p for module in task.modules() for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=plan.rate, weight_decay=plan.weight_decay)
    journal = Journal(path, plan.epochs * len(task.batches(0)))
    figures: dict[str, float] = {}
    for epoch in range(plan.epochs):
        for module in task.modules():
            module.train()
        for batch in task.batches(epoch):
            rate = plan.rate * plan.factor(journal.step_count, journal.steps)
            loss = advance(task.loss(batch), optimizer, rate, plan.clip)
            journal.step(loss, task.size(batch), rate)
        figures = evaluated(task)
        journal.figures(epoch + 1, figures)
    return figures


def advance(loss: Tensor, optimizer: torch.optim.Optimizer, rate: float, clip: float) -> float:
    """One step down the gradient."""
    torch.autograd.backward(loss)
    for group in optimizer.param_groups:
        group["lr"] = rate
        nn.utils.clip_grad_norm_(group["params"], clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def evaluated(task: Task[Batch]) -> dict[str, float]:
    for module in task.modules():
        module.eval()
    return task.evaluate()
