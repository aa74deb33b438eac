"""In what a checkpoint is computed where nobody says, from the formats its matrices are stored in.

Knows no settings and no devices.  The one idea: numbers that are stored whole are computed whole; where most have been
rounded already, arithmetic in integers loses little more and takes a fraction of the time and memory.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

from models.checkpoint.tensors import Entry

Precision = Literal["float32", "int8", "int4"]
FOUR = frozenset(("Q4_0", "Q4_1", "int4"))  # what int4 takes as it is; it has what else there is in 8 bits


@dataclass(frozen=True)
class Suited:
    """A precision, and a clause for people that says why it."""

    precision: Precision
    reason: str


def suited(entries: Iterable[Entry]) -> Suited:
    """Of a checkpoint's tensors, of which at least one is a matrix: integers if more than half of the numbers in
    matrices are stored as such, those of 4 bits if most of these can be kept."""
    numbers, shares = Counter[str](), Counter[Precision]()
    for entry in entries:
        if len(entry.shape) == 2:
            numbers[entry.kind] += prod(entry.shape)
            shares[precision_of(entry.kind)] += prod(entry.shape)
    narrow: Precision = "int4" if shares["int4"] > shares["int8"] else "int8"
    chosen: Precision = "float32" if 2 * shares["float32"] >= shares.total() else narrow
    kind = next(kind for kind, _ in numbers.most_common() if precision_of(kind) == chosen)
    stored = f"as {kind}" if chosen == "float32" else f"in {next(filter(str.isdecimal, kind))} bits ({kind})"
    return Suited(chosen, f"its weights are stored {stored}")


def precision_of(kind: str) -> Precision:
    """What a single format asks for.  Block formats of GGUF are Q, the bits of a number, and the scheme; see
    models.checkpoint.compressed for the others."""
    if kind in FOUR:
        return "int4"
    return "int8" if kind.startswith("Q") or kind == "int8" else "float32"
