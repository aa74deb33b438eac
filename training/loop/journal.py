"""The journal of a training run: a line of JSON for every figure, and a progress line on the terminal."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

WRITE_EVERY = 20  # steps of which one is written
SHOWN_FIGURES = 4  # figures of an evaluation that are shown; the file has all


@dataclass
class Progress:
    """The progress of a run, saved with it.  `seconds` are those of steps, without evaluations."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # index in the epoch
    tokens: int = 0
    seconds: float = 0.0
    loss: float = 0.0  # a running mean over about twenty steps
    written: int = 0  # bytes of the journal

    def add_step(self, loss: float, tokens: int, seconds: float) -> None:
        """Count a step."""
        self.loss = loss if not self.step else 0.95 * self.loss + 0.05 * loss
        self.step += 1
        self.tokens += tokens
        self.seconds += seconds


class Journal:
    """Writes every figure as a line of JSON to `path`, and shows the latest on `stream`.

    Lines beyond `progress.written` are deleted: they are of a run that ended before it was saved.
    """

    def __init__(self, path: Path, progress: Progress, stream: TextIO | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.progress, self.stream = path, progress, stream or sys.stderr
        with path.open("ab") as file:
            progress.written = min(progress.written, file.tell())
            file.truncate(progress.written)

    def write_step(self, loss: float, rate: float, left: Callable[[], float], last: bool) -> None:
        """Write the progress after a step; `left` returns the remaining seconds."""
        now = self.progress
        if now.step % WRITE_EVERY and not last:
            return
        self.write_record({"step": now.step, "loss": loss, "rate": rate, "tokens": now.tokens, "seconds": now.seconds})
        if self.stream.isatty():
            speed = f"{now.tokens / max(now.seconds, 1e-9):,.0f} tokens/s"
            self.show(f"\rstep {now.step}  loss {now.loss:.4f}  {speed}  {left():.0f} s left   ")

    def write_figures(self, epoch: int, figures: dict[str, float]) -> None:
        """Write an evaluation, and show its first figures."""
        now = self.progress
        self.write_record({"epoch": epoch, "step": now.step, **figures})
        shown = "  ".join(f"{name} {value:.4f}" for name, value in islice(figures.items(), SHOWN_FIGURES))
        self.show(f"\repoch {epoch}  step {now.step}  loss {now.loss:.4f}  {shown}\n")

    def write_record(self, record: dict[str, float]) -> None:
        line = json.dumps({name: round(value, 6) for name, value in record.items()}) + "\n"
        with self.path.open("a") as file:
            file.write(line)
        self.progress.written += len(line)

    def show(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
