"""The default precision of a checkpoint, from the formats its matrices are stored in.

Weights that are stored as floats are computed in float32.  Where most are stored in blocks of integers, the codes and
scales of the file are multiplied as they are, which takes a fraction of the time and memory.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

from .tensor_files import TensorEntry

PrecisionName = Literal["float32", "int8", "int4"]
FOUR = frozenset(("Q4_0", "Q4_1", "Q4_K", "int4"))  # what int4 takes as it is; it has what else there is in 8 bits


@dataclass(frozen=True)
class DefaultPrecision:
    """A precision, and a clause for people that says why it."""

    precision: PrecisionName
    reason: str


def choose_precision(entries: Iterable[TensorEntry]) -> DefaultPrecision:
    """Of a checkpoint's tensors, of which at least one is a matrix: integers if more than half of the numbers in
    matrices are stored as such, int4 if it takes any of them as they are."""
    numbers, shares = Counter[str](), Counter[PrecisionName]()
    for entry in entries:
        if len(entry.shape) == 2:
            numbers[entry.kind] += prod(entry.shape)
            shares[kind_precision(entry.kind)] += prod(entry.shape)
    if 2 * shares["float32"] >= shares.total():
        kind = next(kind for kind, _ in numbers.most_common() if kind_precision(kind) == "float32")
        return DefaultPrecision("float32", f"its weights are stored as {kind}")
    narrow = [kind for kind, _ in numbers.most_common() if kind_precision(kind) != "float32"]
    return DefaultPrecision("int4" if shares["int4"] else "int8", f"its weights are stored as {', '.join(narrow)}")


def kind_precision(kind: str) -> PrecisionName:
    """What a single format asks for.  Block formats of GGUF are Q, the bits of a number, and the scheme; see
    models.checkpoint.compressed_tensors for the others."""
    if kind in FOUR:
        return "int4"
    return "int8" if kind.startswith("Q") or kind == "int8" else "float32"
