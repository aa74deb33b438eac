"""Draws the loss of a run from its journal. The extra `explain` installs the plotting library."""

import json
from importlib.util import find_spec
from pathlib import Path

HAS_MATPLOTLIB = find_spec("matplotlib") is not None
if HAS_MATPLOTLIB:
    from matplotlib.figure import Figure


def draw_loss(journal: Path, picture: Path) -> str:
    """Write `picture`, a PNG, from the lines of `journal`.  Returns a sentence on the result."""
    if not HAS_MATPLOTLIB:
        return f"no {picture.name}: drawing it needs an extra, pip install 'polyhead[explain]'; all figures are kept"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, kind in (("learned from", "rate"), ("validation", "epoch")):
        points = [(line["step"], line["loss"]) for line in lines if kind in line and "loss" in line]
        axes.plot(*zip(*points, strict=True), label=label, marker="." if kind == "epoch" else "") if points else None
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(picture, dpi=120)
    return f"{picture.name}: the loss over the steps"
