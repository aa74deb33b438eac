"""The result of `polyhead calibrate`: as text with reliability diagrams, as JSON, as a figure."""

from collections.abc import Iterator, Sequence
from typing import Any

from ..decisions.calibration_file import MAX_TEMPERATURE, FileBin, FileMap, name_target
from ..decisions.calibration_fit import Fit
from ..decisions.calibration_measures import find_threshold, lower_bound
from . import plotting as canvas
from .plotting import HAS_MATPLOTLIB

MAX_SHOWN_BIASES = 10

if HAS_MATPLOTLIB:
    from matplotlib.figure import Figure

BAR_WIDTH = 40  # characters of a bar from 0 to 1
MEASURES = (("accuracy", "accuracy"), ("Brier", "brier"), ("ECE", "ece"), ("log loss", "log_loss"))
PANEL_INCHES = 2.6


def format_fits(fits: Sequence[Fit], precisions: Sequence[float]) -> str:
    return "\n\n".join("\n".join(fit_lines(fit, precisions)) for fit in fits)


def fit_lines(fit: Fit, precisions: Sequence[float]) -> Iterator[str]:
    """The lines about one kind of question, or one question."""
    yield f"{name_target(fit.kind, fit.question)}: {describe_map(fit)}"
    yield f"fitted on {fit.fitted_answers} answers, measured on {len(fit.right)} answers about other texts"
    yield f"{'':<10}{'before':>9}{'after':>9}"
    for title, name in MEASURES:
        note = f"   ({fit.chance:.4f} by chance, if exactly calibrated)" if name == "ece" else ""
        yield f"{title:<10}{getattr(fit.before, name):>9.4f}{getattr(fit.after, name):>9.4f}{note}"
    losses = ", ".join(f"{method} {loss:.4f}" for method, loss in fit.losses.items())
    yield f"cross-validated log loss on the first half: {losses}"
    yield from (threshold_line(fit, precision) for precision in precisions)
    for title, measures in (("before", fit.before), ("after", fit.after)):
        if title == "before" or fit.map is not None:
            yield f"confidence  right  {title}; a bar is the share that is right, | the confidence"
            yield from map(bin_line, measures.bins)


def describe_map(fit: Fit) -> str:
    if fit.map is None:
        return "a map makes the log loss higher by over one standard error, so probabilities stay as they are"
    if fit.map.method == "isotonic":
        return f"isotonic, {len(fit.map.x)} knots"
    if fit.map.method == "bias":
        biases = ", ".join(f"{bias:.3g}" for bias in fit.map.biases[:MAX_SHOWN_BIASES])
        more = ", ..." if len(fit.map.biases) > MAX_SHOWN_BIASES else ""
        return f"bias, temperature {fit.map.temperature:.4g}, biases of the options {biases}{more}"
    if fit.map.method == "temperature" and fit.map.temperature > 0.99 * MAX_TEMPERATURE:
        return f"temperature {MAX_TEMPERATURE:g}, the highest: the probabilities tell nothing about the right answers"
    names = ("temperature",) if fit.map.method == "temperature" else ("slope", "intercept")
    values = ", ".join(f"{name} {value:.4g}" for name, value in zip(names, fit.map.parameters, strict=True))
    return values if fit.map.method == "temperature" else f"{fit.map.method}, {values}"


def threshold_line(fit: Fit, precision: float) -> str:
    found = find_threshold(fit.confidences, fit.right, precision)
    if found is None:
        return f"for a precision of {precision:g}: no confidence is high enough"
    count = round(found.share * len(fit.right))
    bound = lower_bound(found.right, count)
    return (
        f"for a precision of {precision:g}: confidence of at least {found.confidence:.4f}, which {found.share:.1%} of "
        f"decisions have; {found.right:.4f} of these are right (at least {bound:.4f} with a certainty of 95 %)"
    )


def bin_line(each: FileBin) -> str:
    bar = list(("=" * round(each.accuracy * BAR_WIDTH)).ljust(BAR_WIDTH + 1))
    bar[round(each.confidence * BAR_WIDTH)] = "|"
    return f"{each.confidence:>10.4f} {each.accuracy:>6.4f}  {''.join(bar).rstrip()}"


def fits_as_json(fits: Sequence[Fit], maps: Sequence[FileMap | None]) -> list[dict[str, Any]]:
    """A dict for each fit; `map` is null where probabilities stay as they are."""
    return [
        {
            "kind": fit.kind,
            "question": fit.question.model_dump() if fit.question else None,
            "map": None if found is None else found.map.model_dump(),
            "fitted_answers": fit.fitted_answers,
            "held_out_answers": len(fit.right),
            "before": fit.before.model_dump(),
            "after": fit.after.model_dump(),
            "ece_by_chance": fit.chance,
            "cross_validated_log_loss": dict(fit.losses),
            "thresholds": [] if found is None else [each.model_dump() for each in found.thresholds],
        }
        for fit, found in zip(fits, maps, strict=True)
    ]


def draw_fits(fits: Sequence[Fit]) -> "Figure":
    """Reliability diagrams: a row for each fit, before and after."""
    with canvas.fixed_style():
        figure = Figure(figsize=(2 * PANEL_INCHES, PANEL_INCHES * len(fits)), layout="constrained")
        rows = figure.subplots(len(fits), 2, squeeze=False)
        for number, (fit, panels) in enumerate(zip(fits, rows, strict=True)):
            parts = (("before", fit.before), ("after", fit.after))
            for axes, (title, measures) in zip(panels, parts, strict=True):
                axes.plot((0, 1), (0, 1), color=canvas.GREY, linewidth=0.5, linestyle="dashed")
                [drawn] = axes.plot(
                    [each.confidence for each in measures.bins],
                    [each.accuracy for each in measures.bins],
                    marker="o",
                    markersize=2.5,
                    linewidth=0.8,
                    color="black",
                )
                drawn.set_gid(f"reliability-{number}-{title}")
                axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="confidence", ylabel="share that is right")
                target = canvas.escape_undrawable(name_target(fit.kind, fit.question))
                axes.set_title(f"{target}, {title}: ECE {measures.ece:.3f}", parse_math=False, pad=3)
                axes.spines[["top", "right"]].set_visible(False)
        return figure
