"""Draws matrices and bars with tokens as labels, and saves figures.

Nothing depends on the machine: no window, no style file, no date, no system font.  The same numbers give the same
bytes, and letters are outlines.  The extra `explain` installs the plotting library.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from polyhead.models.core.errors import ModelError

HAS_MATPLOTLIB = find_spec("matplotlib") is not None
if HAS_MATPLOTLIB:
    import matplotlib as mpl
    from matplotlib import font_manager, style
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".pdf", ".png")
BUNDLED_FONT = "DejaVu Sans"  # comes with the library
FALLBACK_FONTS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans Devanagari", "Noto Sans Thai", "Noto Color Emoji")
LABEL_POINTS, MIN_POINTS = 7.0, 3.5  # points: font size, and the smallest that is drawn
CELL_INCHES, MAX_SIDE_INCHES = 0.125, 14.0  # inches: a cell, and the longest side that cells may fill
MAX_VECTOR_CELLS = 2000  # cells; a larger matrix is drawn as one picture, else a file has megabytes
GREY = "0.55"
EMPTY_METADATA: Mapping[str, dict[str, None]] = {  # metadata without date and program
    ".svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
    ".pdf": dict.fromkeys(("CreationDate", "Creator", "Producer")),
    ".png": {"Software": None},
}
Scale = Literal["share", "signed"]  # from 0 up, or on both sides of 0
COLOURS: Mapping[Scale, str] = {"share": "Blues", "signed": "RdBu_r"}


@dataclass(frozen=True, slots=True)
class AxisLabel:
    """A token as an axis label.  `is_special`: it is drawn in grey, since it is no part of the text."""

    text: str
    is_special: bool = False


@dataclass(frozen=True)
class LabelledMatrix:
    """A matrix [R, C] with labels.  `name` identifies it in an SVG; `map_count` maps are in the figure."""

    values: NDArray[np.float32]
    rows: Sequence[AxisLabel]
    columns: Sequence[AxisLabel]
    name: str
    title: str = ""
    map_count: int = 1


def check_plot_path(picture: Path) -> None:
    """Raise ModelError if no figure can be written to this path."""
    if picture.suffix.lower() not in SUFFIXES:
        raise ModelError(f"--plot: {picture} is to end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if not picture.absolute().parent.is_dir():
        raise ModelError(f"--plot: there is no folder {picture.absolute().parent} to write to")
    if not HAS_MATPLOTLIB:
        raise ModelError("--plot: drawing needs an extra: pip install 'polyhead[explain]'")


@contextmanager
def fixed_style() -> Iterator[None]:
    """Use fixed style settings."""
    fixed = {
        "svg.hashsalt": "polyhead",
        "svg.fonttype": "path",
        "pdf.fonttype": 42,
        "font.family": list(font_families()),
    }
    with style.context(["default", fixed | {"font.size": LABEL_POINTS, "axes.titlesize": LABEL_POINTS}]):
        yield


def save_figure(figure: "Figure", picture: Path) -> None:
    """Write a figure.  Raises ModelError if it cannot be written."""
    suffix = picture.suffix.lower()
    try:
        with fixed_style():
            figure.savefig(picture, format=suffix[1:], dpi=200, metadata=EMPTY_METADATA[suffix])
    except OSError as error:
        raise ModelError(f"--plot: {picture} cannot be written: {error}") from None


@cache
def font_families() -> tuple[str, ...]:
    present = {font.name for font in font_manager.fontManager.ttflist}
    return BUNDLED_FONT, *(name for name in FALLBACK_FONTS if name in present)


@cache
def drawable_letters() -> frozenset[int]:
    """Return the code points that the fonts can draw."""
    fonts = (font_manager.get_font(font_manager.findfont(name)) for name in font_families())
    return frozenset(code for font in fonts for code in font.get_charmap())


def escape_undrawable(text: str) -> str:
    """Return the text with undrawable letters escaped as in Python: \\n, \\u65e5."""
    return "".join(
        each if each.isprintable() and ord(each) in drawable_letters() else each.encode("unicode_escape").decode()
        for each in text
    )


def cell_inches(count: int) -> float:
    """Return the inches of a cell, with `count` of them in a row."""
    return min(CELL_INCHES, MAX_SIDE_INCHES / max(count, 1))


def label_axis(axes: Any, labels: Sequence[AxisLabel], axis: Literal["x", "y"], inches: float) -> None:
    """Label an axis whose cells have length 1 and this many inches.  Labels that would be too small are left out."""
    points = min(LABEL_POINTS, inches * 72 * 0.85)
    shown = labels if points >= MIN_POINTS else ()
    along = axes.xaxis if axis == "x" else axes.yaxis
    turned = {"rotation": 90} if axis == "x" else {}
    centres = [number + 0.5 for number in range(len(shown))]
    along.set_ticks(centres, [label.text for label in shown], fontsize=points, parse_math=False, **turned)
    along.set_tick_params(length=0, pad=2)
    for tick, label in zip(along.get_ticklabels(), shown, strict=True):
        tick.set_color(GREY if label.is_special else "black")


def shared_norm(values: Sequence[NDArray[np.float32]], scale: Scale) -> "Normalize":
    """Return one colour scale for all matrices of a figure."""
    most = max((float(np.abs(each).max(initial=0)) for each in values), default=0) or 1.0
    return Normalize(-most if scale == "signed" else 0.0, most)


def bar_colours(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return colours [N, 4] of numbers, on both sides of 0 if some are negative."""
    scale: Scale = "signed" if float(values.min(initial=0)) < 0 else "share"
    return np.asarray(mpl.colormaps[COLOURS[scale]](shared_norm([values], scale)(values)), np.float32)


def draw_matrix(axes: Any, matrix: LabelledMatrix, colours: "Normalize", scale: Scale) -> Any:
    """Draw a matrix, first row on top.  Returns the mappable for a colour bar."""
    rows, columns = matrix.values.shape
    if matrix.values.size * matrix.map_count <= MAX_VECTOR_CELLS:
        drawn = axes.pcolormesh(matrix.values, cmap=COLOURS[scale], norm=colours, edgecolor="face", linewidth=0.2)
    else:
        drawn = axes.imshow(
            matrix.values, cmap=COLOURS[scale], norm=colours, extent=(0, columns, rows, 0), interpolation="none"
        )
    drawn.set_gid(matrix.name)
    axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="auto")
    axes.spines[:].set(linewidth=0.4, color=GREY)
    axes.tick_params(length=0)
    if matrix.title:
        axes.set_title(matrix.title, parse_math=False, pad=3)
    return drawn


def add_colour_bar(figure: "Figure", mapped: Any, axes: Any) -> None:
    """Draw the colour bar at the right of the axes, an eighth of an inch wide."""
    bar = figure.colorbar(mapped, ax=axes, fraction=0.125 / figure.get_figwidth(), pad=0.02, aspect=40)
    bar.ax.collections[0].set(rasterized=True, edgecolor="face")
    bar.outline.set(linewidth=0.4, edgecolor=GREY)
    bar.ax.tick_params(labelsize=LABEL_POINTS - 1, width=0.4, length=2)


def draw_bars(axes: Any, values: NDArray[np.float32], labels: Sequence[AxisLabel], shades: NDArray[np.float32]) -> None:
    """Draw a bar for each number, with its label below."""
    centres = np.arange(len(values)) + 0.5
    drawn = axes.bar(centres, values, width=0.86, color=shades, edgecolor=GREY, linewidth=0.3)
    for number, bar in enumerate(drawn):
        bar.set_gid(f"bar-{number}")
    axes.axhline(0, color="black", linewidth=0.5)
    label_axis(axes, labels, "x", CELL_INCHES)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set(linewidth=0.4)
    axes.tick_params(axis="y", labelsize=LABEL_POINTS - 1, width=0.4, length=2)
