"""Which heads a network needs: the work of `polyhead heads`.

Knows figures and silence, no task.  The one idea is Michel et al.'s (2019, arXiv:1905.10650): take one head away, its
mixed values zero, and see how much worse the answers to the same texts become.  Since they are the same, differences
are compared text by text, and so most of what makes texts easy or hard is not in their error.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyhead.models.checkpoint import Checkpoint
from polyhead.models.core.errors import ModelError, UnsupportedError
from polyhead.models.explain.explain_types import Part, Text
from polyhead.models.explain.instrumented_network import Watched

from . import explain_figures as figures
from . import labelled_files as labelled
from . import plotting as canvas
from .head_accuracy import LIKENESS, LOSS, Figures, measure
from .labelled_files import Row
from .opened_checkpoint import opened

TOKENS = 2048  # of texts that are computed together
SURE = 3.0  # standard errors; of a thousand heads that do nothing, three seem to do so much
Say = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Change:
    """Of a figure, without a head: what is added to it, and how far off that may be (one standard error)."""

    change: float
    error: float

    @property
    def sure(self) -> bool:
        return abs(self.change) > SURE * self.error


@dataclass(frozen=True)
class Head:
    """What becomes of each figure without it."""

    part: Part
    layer: int
    head: int
    changes: Mapping[str, Change]

    @property
    def importance(self) -> float:
        """How much worse it is: by the figure that says so most finely."""
        return self.changes[LOSS].change if LOSS in self.changes else -self.changes[LIKENESS].change

    @property
    def sure(self) -> bool:
        return self.changes[LOSS if LOSS in self.changes else LIKENESS].sure


@dataclass(frozen=True)
class Wanted:
    """What `polyhead heads` was asked for."""

    model: str
    data: Path
    limit: int
    plot: Path | None
    as_json: bool


def ranked(wanted: Wanted, tell: Callable[[str], object], say: Say) -> None:
    """Tell of the network as it is, then of each head; write the figure.  ModelError where it cannot be done."""
    if wanted.plot:
        canvas.check(wanted.plot)
    rows = labelled.rows(wanted.data, wanted.limit)
    trial = Trial(opened(wanted.model), rows)
    if not wanted.as_json:
        tell(summary(trial))
    found = trial.heads(say)
    told = as_object(trial, found)
    tell(json.dumps(told, ensure_ascii=False) if wanted.as_json else table(found))
    if wanted.plot:
        canvas.save(figures.important(told, figures.short_name(wanted.model)), wanted.plot)


class Trial:
    """A network and texts that it is tried on.  `baseline` are its figures as it is."""

    def __init__(self, loaded: Checkpoint, rows: Sequence[Row]) -> None:
        """ModelError for a row that is not as it should be; UnsupportedError for a network that has no heads."""
        self.loaded, self.measure = loaded, measure(loaded)
        read = [self.measure.sample(row) for row in rows]
        self.samples = [sample for sample in read if sample is not None]
        self.left_out = len(read) - len(self.samples)
        if len(self.samples) < 2:
            raise ModelError(f"two rows at least are wanted that can be judged; {len(self.samples)} of {len(read)} can")
        self.watched = Watched(loaded.network, loaded.head)
        if not self.watched.lenses:
            raise UnsupportedError("its attention has no heads that could be told apart", file=loaded.source)
        self.counts = np.array([self.measure.counted(sample) for sample in self.samples], np.float64)
        self._batches = list(batches([text for sample in self.samples for text in sample.texts]))
        self._as_it_is = self._figures()
        self.baseline = dict(zip(self.measure.names, self._means(self._as_it_is), strict=True))

    def heads(self, say: Say) -> list[Head]:
        """All, the most important first."""
        every = [
            (part, layer, head)
            for part, (depth, heads) in self.watched.layout.items()
            for layer in range(depth)
            for head in range(heads)
        ]
        found = []
        for number, silent in enumerate(every):
            say("heads silenced", number, len(every))
            found.append(Head(*silent, self._without({silent})))
        say("heads silenced", len(every), len(every))
        return sorted(found, key=lambda head: -head.importance)

    def _without(self, silent: set[tuple[Part, int, int]]) -> dict[str, Change]:
        self.watched.silenced = silent
        try:
            now = self._figures()
        finally:
            self.watched.silenced = set()
        changes = changed(self._as_it_is, now, self.counts)
        return dict(zip(self.measure.names, changes, strict=True))

    def _means(self, figures: Figures) -> list[float]:
        return [float(mean) for mean in figures.sum(0) / self.counts.sum()]

    def _figures(self) -> Figures:
        """[N, F]"""
        owners = [(sample, number) for sample in self.samples for number in range(len(sample.texts))]
        seen: list[Any] = [None] * len(owners)
        for places, texts in self._batches:
            states = self.watched.states(texts)
            for place, each in zip(places, states, strict=True):
                seen[place] = self.measure.seen(owners[place][0], each)
        told, at = [], 0
        for sample in self.samples:
            told.append(self.measure.told(sample, seen[at : at + len(sample.texts)]))
            at += len(sample.texts)
        return self.measure.figures(self.samples, np.array(told, np.float64))


def batches(texts: Sequence[Text]) -> Iterator[tuple[list[int], list[Text]]]:
    """Texts of equal lengths, and where each of them stands."""
    alike: dict[tuple[int, int], list[int]] = {}
    for place, text in enumerate(texts):
        alike.setdefault((len(text.source), len(text.tokens)), []).append(place)
    for lengths, places in alike.items():
        count = max(1, TOKENS // sum(lengths))
        for at in range(0, len(places), count):
            some = places[at : at + count]
            yield some, [texts[place] for place in some]


def changed(before: Figures, after: Figures, counts: Figures) -> list[Change]:
    """Of means of [N, F] sums over `counts` [N]; their error is that of a ratio of means (Cochran 1977, chapter 6),
    which is the usual one of paired differences where each text counts once."""
    added, number = after - before, len(before)
    mean = added.sum(0) / counts.sum()
    rest = added - mean * counts[:, None]
    error = np.sqrt((rest**2).sum(0) * number / (number - 1)) / counts.sum()
    return [Change(*each) for each in zip(mean.tolist(), error.tolist(), strict=True)]


def summary(trial: Trial) -> str:
    """The figures before anything is silenced: where labels are mixed up, it is seen here."""
    figures = [f"{name} {value:.4f}" for name, value in trial.baseline.items()]
    if trial.loaded.task in ("fill", "generate", "translate"):
        figures.append(f"perplexity {math.exp(min(trial.baseline[LOSS], 700)):.2f}")
    left_out = f", {trial.left_out} left out" if trial.left_out else ""
    return f"as it is: {', '.join(figures)} ({len(trial.samples)} rows{left_out}){usual(trial)}"


def usual(trial: Trial) -> str:
    """What is right most often of all, where that is a label."""
    right = [label for sample in trial.samples for label in sample.right]
    if trial.loaded.task not in ("classify", "tag") or not right:
        return ""
    most = max(set(right), key=lambda label: (right.count(label), -label))
    share = right.count(most) / trial.counts.sum()
    return f"; always {trial.loaded.labels[most]} would be right in {share:.4f}"


def table(heads: Sequence[Head]) -> str:
    """For people, the most important first."""
    names = list(heads[0].changes)
    rows = [("layer", "head", *(f"{name}" for name in names))]
    several = len({head.part for head in heads}) > 1
    for head in heads:
        place = f"{head.part} {head.layer}" if several else str(head.layer)
        rows.append((place, str(head.head), *(said(head.changes[name]) for name in names)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    note = f"what is added to each figure without the head, and its standard error; *: more than {SURE:.0f} of these"
    return "\n".join([*lines, note])


def said(change: Change) -> str:
    return f"{change.change:+.4f} ± {change.error:.4f}{' *' if change.sure else ''}"


def as_object(trial: Trial, heads: Sequence[Head]) -> dict[str, Any]:
    """For programs."""
    return {
        "model": trial.loaded.source,
        "task": trial.loaded.task,
        "rows": len(trial.samples),
        "left_out": trial.left_out,
        "baseline": trial.baseline,
        "heads": [asdict(head) | {"importance": head.importance, "sure": head.sure} for head in heads],
    }
