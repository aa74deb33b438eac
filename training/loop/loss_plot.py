"""Draws the loss of a run from its journal. The extra `explain` installs the plotting library.

The journal of a run that was resumed may be a stranger's: it is read line by line, up to MAX_BYTES, and one that cannot
be drawn is reported in a sentence, since the run itself is complete by then.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, TypeGuard

from polyhead.models.core.errors import CheckpointError, show_value
from polyhead.models.core.files import open_member
from polyhead.models.core.json_files import parse_json

from .errors import RecipeError

MAX_BYTES = 8 << 20  # bytes of a journal that are drawn; a line of 100 is written every 20 steps
MAX_LINE_BYTES = 1 << 16
MAX_SHOWN = 1e15  # of a step or a loss; the library fails to divide an axis of numbers near the largest
KINDS = {"rate": "learned from", "epoch": "validation"}  # by a field that only such a line has

HAS_MATPLOTLIB = find_spec("matplotlib") is not None
if HAS_MATPLOTLIB:
    from matplotlib.figure import Figure


def draw_loss(journal: Path, picture: Path) -> str:
    """Write `picture`, a PNG, from the lines of `journal`.  Returns a sentence on the result, also if there is none."""
    if not HAS_MATPLOTLIB:
        return f"no {picture.name}: drawing it needs an extra, pip install 'polyhead[explain]'; all figures are kept"
    try:
        points = read_points(journal)
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for kind, label in KINDS.items():
            if points[kind]:
                axes.plot(*zip(*points[kind], strict=True), label=label, marker="." if kind == "epoch" else "")
        axes.set(xlabel="step", ylabel="loss")
        if any(points.values()):
            axes.legend()
        figure.savefig(picture, dpi=120)
    except (RecipeError, CheckpointError, OSError) as error:
        return f"no {picture.name}: {error}"
    return f"{picture.name}: the loss over the steps"


def read_points(journal: Path) -> dict[str, list[tuple[float, float]]]:
    """Return step and loss of the lines of each kind in a journal, up to MAX_BYTES of it.

    Raises RecipeError for a line that is too long or no object of JSON, CheckpointError and OSError as `open_member`.
    """
    points: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for number, line in read_lines(journal):
        try:
            record: Any = parse_json(line, lenient=True)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise RecipeError(f"{journal.name}, line {number}: {show_value(line)} is no object of JSON")
        step, loss = record.get("step"), record.get("loss")
        if is_shown(step) and is_shown(loss):
            for kind in KINDS.keys() & record.keys():
                points[kind].append((step, loss))
    return points


def read_lines(journal: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of the first MAX_BYTES with their numbers.  Raises as `read_points`."""
    with open_member(journal) as file:
        for number in count(1):
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line or file.tell() > MAX_BYTES:
                return
            if len(line) > MAX_LINE_BYTES:
                raise RecipeError(f"{journal.name}, line {number}: is longer than {MAX_LINE_BYTES >> 10} KiB")
            yield number, line


def is_shown(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_SHOWN
