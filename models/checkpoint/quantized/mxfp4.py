"""Experts in MXFP4, `quant_method` "mxfp4" (transformers' integrations/mxfp4.py): `NAME_blocks` [E, N, G, 16] bytes of
two floats of four bits each, and `NAME_scales` [E, N, G], the exponent of two of each 32. The tensor is [E, 32 G, N].
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import CheckpointError
from ..tensor_files import TensorEntry, entry_rows
from .config_fields import Json
from .packed_codes import EXPONENT_BIAS, unpack_fp4
from .quantized_entry import CPU, SLICE_NUMBERS, Place, QuantizedEntry, ReportBytes, check_part, find_part

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_BYTES = 16  # of 32 numbers


@dataclass(frozen=True)
class BlockFloatEntry(QuantizedEntry):
    """Matrices of experts, transposed while they are read. Its parts are "codes" and "scales"."""

    def decode(self, report_bytes: ReportBytes) -> Iterator[tuple[Place, Tensor]]:
        experts, inputs, outputs = self.shape
        codes, scales = self.parts["codes"], self.parts["scales"]
        # Each output as a row of its own, so that slices of rows can be read.
        rows = [
            (flatten_rows(codes, experts * outputs), torch.uint8),
            (flatten_rows(scales, experts * outputs), torch.uint8),
        ]
        step = max(SLICE_NUMBERS // max(inputs, 1), 1)
        for expert in range(experts):
            for first in range(0, outputs, step):
                count = min(step, outputs - first)
                place = range(expert * outputs + first, expert * outputs + first + count)
                data, bytes = (entry_rows(part, place).read(dtype, CPU, report_bytes) for part, dtype in rows)
                exponents = bytes.int()[:, :, None] - EXPONENT_BIAS
                values = torch.ldexp(unpack_fp4(data).view(count, -1, 2 * BLOCK_BYTES), exponents).flatten(1)
                yield (expert, slice(None), slice(first, first + count)), values.t()


def flatten_rows(entry: TensorEntry, rows: int) -> TensorEntry:
    """The same numbers as a matrix of so many rows."""
    shape = (rows, entry.size // rows if rows else 0)
    return TensorEntry(entry.source, entry.name, entry.kind, shape, entry.start, entry.encoding)


def read_config(file: Path, config: Json) -> None:
    """Nothing: the format has no fields that change the numbers."""


def combine_entries(scheme: None, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:  # noqa: ARG001
    """The entries, with blocks and scales combined into one."""
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        base = name.removesuffix(SCALES)
        if name.endswith(BLOCKS):
            found[name.removesuffix(BLOCKS)] = combine_parts(entry, entries)
        elif base == name or f"{base}{BLOCKS}" not in entries:
            found[name] = entry
    return found


def combine_parts(codes: TensorEntry, entries: Mapping[str, TensorEntry]) -> BlockFloatEntry:
    name = codes.name.removesuffix(BLOCKS)
    scales = find_part(entries, f"{name}{SCALES}", codes)
    if len(codes.shape) != 4 or codes.shape[3] != BLOCK_BYTES:
        message = f"its shape {list(codes.shape)} should be [experts, outputs, groups, {BLOCK_BYTES}]"
        raise CheckpointError(message, file=str(codes.file), tensor=codes.name)
    check_part(codes, ("U8",))
    check_part(scales, ("U8",), codes.shape[:3])
    experts, outputs, groups, _ = codes.shape
    shape = (experts, groups * 2 * BLOCK_BYTES, outputs)
    place = (codes.source, name, "MXFP4", shape, codes.start, codes.encoding)
    return BlockFloatEntry(*place, {"codes": codes, "scales": scales})
