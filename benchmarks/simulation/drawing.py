"""Figures of docs/scaling.md. Colours can be distinguished on white and on black; the background is transparent."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.simulation.runs import Line

INK = "#808080"  # readable on both
COLOURS = {
    "random": "#d1495b",
    "round-robin": "#b8860b",
    "shortest": "#8b6fc4",
    "two-choices": "#3a86c8",
    "affinity": "#2a9d6a",
    "by tokens": "#2a9d6a",
    "by requests": "#d1495b",
}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "scaling",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.labelcolor": INK,
    "legend.frameon": False,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "axes.grid": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "font.size": 9,
}


def curves(axes: Axes, lines: Sequence[Line], along: str, figure: str) -> None:
    """A curve for each policy."""
    for policy in dict.fromkeys(line.case["policy"] for line in lines):
        mine = [line for line in lines if line.case["policy"] == policy]
        across = [line.case[along] for line in mine]
        axes.plot(across, [line.figures[figure] for line in mine], "o-", ms=3, color=COLOURS[policy], label=policy)


def labelled(axes: Axes, title: str, across: str, up: str) -> None:
    axes.set(title=title, xlabel=across, ylabel=up)
    axes.set_ylim(bottom=0)


def sizes(figure: Figure, lines: Sequence[Line]) -> None:
    for axes, (name, title, unit) in zip(
        figure.subplots(1, 3),
        (
            ("wait_p95", "time to first token, p95", "s"),
            ("hit", "tokens found stored", "part of the prompts'"),
            ("gap_p95", "token to token, p95", "s"),
        ),
        strict=True,
    ):
        curves(axes, lines, "replicas", name)
        axes.set_xscale("log")
        labelled(axes, title, "replicas", unit)
    axes.legend()


def loads(figure: Figure, lines: Sequence[Line]) -> None:
    left, right = figure.subplots(1, 2)
    curves(left, lines, "load", "wait_p50")
    labelled(left, "time to first token, p50", "load, part of what ten replicas can do", "s")
    curves(right, lines, "load", "wait_p95")
    labelled(right, "time to first token, p95", "load, part of what ten replicas can do", "s")
    for axes in (left, right):
        axes.set_yscale("log")
    left.legend()


def reports(figure: Figure, lines: Sequence[Line]) -> None:
    axes = figure.subplots()
    curves(axes, lines, "report_s", "wait_p95")
    axes.set_xscale("log")
    labelled(axes, "eight ingresses before 32 replicas: time to first token, p95", "a replica reports every, s", "s")
    axes.legend()


def narrow(figure: Figure, lines: Sequence[Line]) -> None:
    left, right = figure.subplots(1, 2)
    across = [line.case["replicas"] for line in lines]
    left.plot(across, [line.figures["wait_p95"] for line in lines], "o-", ms=3, color=COLOURS["two-choices"])
    labelled(left, "one ingress: time to first token, p95", "replicas", "s")
    right.plot(across, [line.figures["ingress"] for line in lines], "o-", ms=3, color=COLOURS["random"])
    labelled(right, "part of the time that it is busy", "replicas", "")


def scaling(figure: Figure, lines: Sequence[Line]) -> None:
    """Replicas over time, and who waits."""
    left, right = figure.subplots(1, 2)
    for line in (line for line in lines if line.case["target"] in (600.0, 1.0)):
        policy = line.case["policy"]
        sizes, waits = (zip(*line.figures[name], strict=True) for name in ("replicas_over_time", "waits_over_time"))
        left.step(*sizes, where="post", color=COLOURS[policy], label=f"{policy}, {line.case['target']:.0f} each")
        right.plot(*waits, color=COLOURS[policy], label=policy)
    labelled(left, "replicas", "s", "")
    labelled(right, "time to first token, p95 of half a minute", "s", "s")
    left.legend()


DRAWN: dict[str, tuple[Callable[[Figure, Sequence[Line]], None], tuple[float, float]]] = {
    "sizes": (sizes, (10.5, 3.2)),
    "loads": (loads, (8.4, 3.4)),
    "reports": (reports, (5.4, 3.4)),
    "narrow": (narrow, (8.4, 3.2)),
    "scaling": (scaling, (8.4, 3.2)),
}


def draw(lines: Sequence[Line], folder: Path) -> None:
    """Those of which there are lines."""
    mpl.rcParams.update(STYLE)
    folder.mkdir(exist_ok=True, parents=True)
    for name, (plot, size) in DRAWN.items():
        if found := [line for line in lines if line.study == name]:
            figure = Figure(size, layout="constrained")
            plot(figure, found)
            nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(folder / f"{name}.svg", metadata=nothing, transparent=True)
