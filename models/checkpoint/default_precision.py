"""Chooses the default precision of a checkpoint from the formats of its matrices.

Weights stored as floats are computed in float32. If most are stored in blocks of integers, the codes and scales of the
file are multiplied directly, which takes a fraction of the time and memory.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

from .tensor_files import TensorEntry

PrecisionName = Literal["float32", "int8", "int4"]
# int4 stores the codes of these exactly (of Q4_K nearly), and others in 8 bits. Of "int4 with zero points" the offset
# of a group is rounded to a half, which adds 0.002 to 0.006 of the error that the format itself made.
INT4_FORMATS = frozenset(("Q4_0", "Q4_1", "Q4_K", "Q1_0", "TQ1_0", "TQ2_0", "int4", "int4 with zero points"))
# Stored exactly, or rounded to 8 bits in groups of 32. As a fraction of the error that the format itself made, that
# adds nothing for MXFP4, 0.04 to 0.08 for the others of four bits, and 0.2 to 0.3 for FP8.
INT8_FORMATS = frozenset(
    (
        *("Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"),
        *("int8", "int4 in small groups", "FP8", "NF4", "FP4"),
    )
)


@dataclass(frozen=True)
class DefaultPrecision:
    """A precision, and a clause for people that gives the reason."""

    precision: PrecisionName
    reason: str


def choose_precision(entries: Iterable[TensorEntry]) -> DefaultPrecision:
    """The default precision of a checkpoint: integers if more than half of the matrices' weights are stored so, int4 if
    any of them keeps its stored codes in int4."""
    numbers, shares = Counter[str](), Counter[PrecisionName]()
    for entry in entries:
        if len(entry.shape) in (2, 3):  # 3: the matrices of all experts of a layer
            numbers[entry.kind] += prod(entry.shape)
            shares[kind_precision(entry.kind)] += prod(entry.shape)
    if not numbers:
        return DefaultPrecision("float32", "it has no matrices")
    if 2 * shares["float32"] >= shares.total():
        kind = next(kind for kind, _ in numbers.most_common() if kind_precision(kind) == "float32")
        return DefaultPrecision("float32", f"its weights are stored as {kind}")
    narrow = [kind for kind, _ in numbers.most_common() if kind_precision(kind) != "float32"]
    return DefaultPrecision("int4" if shares["int4"] else "int8", f"its weights are stored as {', '.join(narrow)}")


def kind_precision(kind: str) -> PrecisionName:
    """The precision for a single format of GGUF or of models.checkpoint.quantized.

    IQ1, IQ2 and IQ3 are computed in float32: their numbers are no whole multiples of a scale, and rounded to 8 bits
    they cost up to 0.0075 nats on networks with outliers, several times as much as the formats of INT8_FORMATS do.
    """
    if kind in INT4_FORMATS:
        return "int4"
    return "int8" if kind in INT8_FORMATS else "float32"
