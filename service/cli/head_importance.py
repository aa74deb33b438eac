"""`polyhead heads`: the importance of each attention head, by ablation (Michel et al. 2019, arXiv:1905.10650).

One head's output is set to zero, and the figures on the same texts are compared with those of the whole network.
Differences are taken text by text, so most of the variance between texts cancels.
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
from polyhead.models.explain.explain_types import AttentionPart, InputTokens
from polyhead.models.explain.instrumented_network import InstrumentedNetwork
from polyhead.models.network.heads import count_read_tokens

from . import explain_figures as figures
from . import labelled_files as labelled
from . import plotting as canvas
from .checkpoint_source import open_checkpoint
from .head_accuracy import CROSS_ENTROPY, SPEARMAN, Figures, choose_metric
from .labelled_files import LabelledRow

BATCH_TOKENS = 2048  # of texts that are computed together
SIGNIFICANT_ERRORS = 3.0  # standard errors; of a thousand heads without effect, about three exceed them
ProgressCallback = Callable[[str, int, int], None]


@dataclass(frozen=True)
class FigureChange:
    """The change of a figure without a head, and its standard error."""

    change: float
    error: float

    @property
    def is_significant(self) -> bool:
        return abs(self.change) > SIGNIFICANT_ERRORS * self.error


@dataclass(frozen=True)
class HeadImportance:
    """The changes of all figures without one head."""

    part: AttentionPart
    layer: int
    head: int
    changes: Mapping[str, FigureChange]

    @property
    def importance(self) -> float:
        """How much worse the network is, by its finest figure."""
        return self.changes[CROSS_ENTROPY].change if CROSS_ENTROPY in self.changes else -self.changes[SPEARMAN].change

    @property
    def is_significant(self) -> bool:
        return self.changes[CROSS_ENTROPY if CROSS_ENTROPY in self.changes else SPEARMAN].is_significant


@dataclass(frozen=True)
class HeadsArguments:
    """The arguments of `polyhead heads`."""

    model: str
    data: Path
    limit: int
    plot: Path | None
    as_json: bool


def rank_heads(
    arguments: HeadsArguments, print_text: Callable[[str], object], report_progress: ProgressCallback
) -> None:
    """Print the figures of the whole network, then the importance of each head; write the figure.  Raises
    ModelError.
    """
    if arguments.plot:
        canvas.check_plot_path(arguments.plot)
    rows = labelled.read_rows(arguments.data, arguments.limit)
    trial = HeadAblation(open_checkpoint(arguments.model), rows)
    if not arguments.as_json:
        print_text(format_summary(trial))
    results = trial.ablate_heads(report_progress)
    result = as_dict(trial, results)
    print_text(json.dumps(result, ensure_ascii=False) if arguments.as_json else format_table(results))
    if arguments.plot:
        canvas.save_figure(figures.draw_importance(result, figures.short_name(arguments.model)), arguments.plot)


class HeadAblation:
    """A network and the samples it is measured on.  `baseline` are the figures of the whole network."""

    def __init__(self, loaded: Checkpoint, rows: Sequence[LabelledRow]) -> None:
        """Raises ModelError for a wrong row, UnsupportedError for a network without heads."""
        self.loaded, self.metric = loaded, choose_metric(loaded)
        read = [self.metric.read_sample(row) for row in rows]
        self.samples = [sample for sample in read if sample is not None]
        self.skipped_rows = len(read) - len(self.samples)
        if len(self.samples) < 2:
            raise ModelError(f"at least two rows that can be judged are needed; {len(self.samples)} of {len(read)} can")
        self.instrumented = InstrumentedNetwork(loaded.network, loaded.head)
        if not self.instrumented.probes:
            raise UnsupportedError("its attention has no separate heads", file=loaded.source)
        self.counts = np.array([self.metric.unit_count(sample) for sample in self.samples], np.float64)
        self._batches = list(batch_by_length([text for sample in self.samples for text in sample.texts]))
        self._baseline_figures = self._measure_figures()
        self.baseline = dict(zip(self.metric.names, self._mean_figures(self._baseline_figures), strict=True))

    def ablate_heads(self, report_progress: ProgressCallback) -> list[HeadImportance]:
        """Measure the network without each head; the most important head comes first."""
        every = [
            (part, layer, head)
            for part, (depth, heads) in self.instrumented.layout.items()
            for layer in range(depth)
            for head in range(heads)
        ]
        results = []
        for number, head_key in enumerate(every):
            report_progress("heads ablated", number, len(every))
            results.append(HeadImportance(*head_key, self._ablate({head_key})))
        report_progress("heads ablated", len(every), len(every))
        return sorted(results, key=lambda head: -head.importance)

    def _ablate(self, head_keys: set[tuple[AttentionPart, int, int]]) -> dict[str, FigureChange]:
        self.instrumented.silenced = head_keys
        try:
            now = self._measure_figures()
        finally:
            self.instrumented.silenced = set()
        changes = compare_figures(self._baseline_figures, now, self.counts)
        return dict(zip(self.metric.names, changes, strict=True))

    def _mean_figures(self, figures: Figures) -> list[float]:
        return [float(mean) for mean in figures.sum(0) / self.counts.sum()]

    def _measure_figures(self) -> Figures:
        """Return the figures of all samples, [N, F]."""
        owners = [(sample, number) for sample in self.samples for number in range(len(sample.texts))]
        reduced: list[Any] = [None] * len(owners)
        for indexes, texts in self._batches:
            states = self.instrumented.states(texts)
            for index, text, each in zip(indexes, texts, states, strict=True):
                read = each[: count_read_tokens(self.instrumented.head, text.tokens)]
                reduced[index] = self.metric.reduce_states(owners[index][0], read)
        sums, at = [], 0
        for sample in self.samples:
            sums.append(self.metric.sample_sums(sample, reduced[at : at + len(sample.texts)]))
            at += len(sample.texts)
        return self.metric.figures(self.samples, np.array(sums, np.float64))


def batch_by_length(texts: Sequence[InputTokens]) -> Iterator[tuple[list[int], list[InputTokens]]]:
    """Yield batches of texts of equal lengths, with their indexes."""
    by_length: dict[tuple[int, int], list[int]] = {}
    for index, text in enumerate(texts):
        by_length.setdefault((len(text.source), len(text.tokens)), []).append(index)
    for lengths, indexes in by_length.items():
        count = max(1, BATCH_TOKENS // sum(lengths))
        for at in range(0, len(indexes), count):
            batch = indexes[at : at + count]
            yield batch, [texts[index] for index in batch]


def compare_figures(before: Figures, after: Figures, counts: Figures) -> list[FigureChange]:
    """Return the change of each figure, from [N, F] sums over `counts` [N] units.

    The error is that of a ratio of means (Cochran 1977, chapter 6); it is the usual error of paired differences if each
    text counts once.
    """
    added, number = after - before, len(before)
    mean = added.sum(0) / counts.sum()
    rest = added - mean * counts[:, None]
    error = np.sqrt((rest**2).sum(0) * number / (number - 1)) / counts.sum()
    return [FigureChange(*each) for each in zip(mean.tolist(), error.tolist(), strict=True)]


def format_summary(trial: HeadAblation) -> str:
    """Format the figures of the whole network.  Labels in a wrong order show here."""
    figures = [f"{name} {value:.4f}" for name, value in trial.baseline.items()]
    if trial.loaded.task in ("fill", "generate", "translate"):
        figures.append(f"perplexity {math.exp(min(trial.baseline[CROSS_ENTROPY], 700)):.2f}")
    left_out = f", {trial.skipped_rows} left out" if trial.skipped_rows else ""
    return f"as it is: {', '.join(figures)} ({len(trial.samples)} rows{left_out}){describe_majority(trial)}"


def describe_majority(trial: HeadAblation) -> str:
    """Describe the accuracy of always predicting the most frequent label."""
    labels = [label for sample in trial.samples for label in sample.targets]
    if trial.loaded.task not in ("classify", "tag") or not labels:
        return ""
    majority = max(set(labels), key=lambda label: (labels.count(label), -label))
    share = labels.count(majority) / trial.counts.sum()
    return f"; always {trial.loaded.labels[majority]} would be right in {share:.4f}"


def format_table(heads: Sequence[HeadImportance]) -> str:
    """Format a table, the most important head first."""
    names = list(heads[0].changes)
    rows = [("layer", "head", *(f"{name}" for name in names))]
    several = len({head.part for head in heads}) > 1
    for head in heads:
        place = f"{head.part} {head.layer}" if several else str(head.layer)
        rows.append((place, str(head.head), *(format_change(head.changes[name]) for name in names)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    note = "the change of each figure without the head, and its standard error; "
    note += f"*: more than {SIGNIFICANT_ERRORS:.0f} of these"
    return "\n".join([*lines, note])


def format_change(change: FigureChange) -> str:
    return f"{change.change:+.4f} ± {change.error:.4f}{' *' if change.is_significant else ''}"


def as_dict(trial: HeadAblation, heads: Sequence[HeadImportance]) -> dict[str, Any]:
    """Return the result for JSON."""
    return {
        "model": trial.loaded.source,
        "task": trial.loaded.task,
        "rows": len(trial.samples),
        "left_out": trial.skipped_rows,
        "baseline": trial.baseline,
        "heads": [asdict(head) | {"importance": head.importance, "sure": head.is_significant} for head in heads],
    }
