"""bitsandbytes checkpoints: NF4 and FP4 in blocks, and integers of 8 bits with a scale for each output (Dettmers et al.
2023, arXiv:2305.14314; 2022, arXiv:2208.07339).

Of four bits: `weight` holds the bytes, two codes each, the first in the high half; `weight.absmax` the scale of each
block, in bytes if it is quantised itself; `weight.quant_state.bitsandbytes__nf4` is JSON with the shape. Of eight bits:
`weight` holds codes, `SCB` the largest magnitude of each output, which is 127 codes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TypeGuard

import orjson
import torch
from torch import Tensor

from ...core.errors import CheckpointError, UnsupportedError, show_value
from ..tensor_files import INTEGER_ENCODINGS, TensorEntry, entry_rows
from .config_fields import CONFIG, REMEDY, Json, check_field
from .packed_codes import INT8_LAYOUT
from .quantized_entry import (
    CPU,
    SLICE_NUMBERS,
    GridEntry,
    Place,
    QuantizedEntry,
    ReportBytes,
    check_part,
    find_part,
)
from .stored_kinds import integer_kind

# The values of a code, from bitsandbytes.functional.get_4bit_type.
NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4_UNITS = (0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0, -0, -0.0625, -8.0, -12.0, -4.0, -6.0, -2.0, -3.0)
VALUES = {"nf4": NF4_VALUES, "fp4": tuple(unit / 12 for unit in FP4_UNITS)}
KINDS = {"nf4": "NF4", "fp4": "FP4"}
STATE = ".quant_state.bitsandbytes__"
LEAVES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", *(STATE + format for format in VALUES))
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
INVERSE_127 = 7.874015718698502e-3
MAX_STATE_BYTES = 4096  # of the JSON of a matrix
MAP_TOLERANCE = 1e-5
MAX_SIDE = 1 << 31


@dataclass(frozen=True)
class BlockwiseEntry(QuantizedEntry):
    """A matrix of codes for `values`, in blocks of `block` numbers, row after row, that share a scale.

    Its parts are "codes" (bytes), "scales" and "map"; quantised scales have "nested scales" and "nested map", too: each
    is its value in the map times the scale of `nested_block` of them, plus `offset`.
    """

    values: tuple[float, ...]
    block: int
    nested_block: int
    offset: float

    @property
    def decoded_shape(self) -> tuple[int, ...]:
        return (prod(self.shape),)

    def decode(self, report_bytes: ReportBytes) -> Iterator[tuple[Place, Tensor]]:
        table = torch.tensor(self.values)
        found = self.read_part("map", report_bytes)
        if not torch.allclose(found, table, rtol=0, atol=MAP_TOLERANCE):
            part = self.parts["map"]
            raise CheckpointError("its values are not those of the format", file=str(part.file), tensor=part.name)
        scales, count = self._read_block_scales(report_bytes), prod(self.shape)
        for first in range(0, count, SLICE_NUMBERS):  # a multiple of every block size
            last = min(first + SLICE_NUMBERS, count)
            data = entry_rows(self.parts["codes"], range(first // 2, -(-last // 2))).read(
                torch.uint8, CPU, report_bytes
            )
            codes = torch.stack((data >> 4, data & 15), -1).flatten()[: last - first]
            spread = scales[first // self.block : -(-last // self.block)].repeat_interleave(self.block)
            yield (slice(first, last),), table[codes.int()] * spread[: last - first]

    def _read_block_scales(self, report_bytes: ReportBytes) -> Tensor:
        """[B] scales in float32."""
        if "nested scales" not in self.parts:
            return self.read_part("scales", report_bytes)
        codes = self.read_part("scales", report_bytes, torch.uint8)
        outer = self.read_part("nested scales", report_bytes).repeat_interleave(self.nested_block)[: len(codes)]
        return self.read_part("nested map", report_bytes)[codes.int()] * outer + self.offset


def read_config(file: Path, config: Json) -> None:
    """UnsupportedError unless weights have 8 or 4 bits; the rest is in the tensors."""
    eight, four = (bool(config.get(field) or config.get(f"_{field}")) for field in ("load_in_8bit", "load_in_4bit"))
    if eight == four:
        message = f"{CONFIG}: one of load_in_8bit and load_in_4bit should be true; {REMEDY}"
        raise UnsupportedError(message, file=str(file))
    check_field(file, "llm_int8_has_fp16_weight", config.get("llm_int8_has_fp16_weight") or None, (None,))
    if four:
        check_field(file, "bnb_4bit_quant_type", config.get("bnb_4bit_quant_type"), (None, *VALUES))


def combine_entries(scheme: None, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:  # noqa: ARG001
    """The entries, with the tensors of each quantised matrix combined into one."""
    states = {name: format for name in entries for format in VALUES if f"{name}{STATE}{format}" in entries}
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        module, _, leaf = name.rpartition(".")
        if name in states:
            found[name] = combine_blocks(entry, states[name], entries)
        elif f"{module}.SCB" in entries and leaf in ("weight", "SCB", "weight_format"):
            if leaf == "weight":
                found[name] = combine_rows(entry, entries)
        elif not any(name.endswith(each) and name.removesuffix(each) in states for each in LEAVES):
            found[name] = entry
    return found


def combine_rows(codes: TensorEntry, entries: Mapping[str, TensorEntry]) -> GridEntry:
    """A matrix of eight bits."""
    module = codes.name.rpartition(".")[0]
    scales = entries[f"{module}.SCB"]
    check_part(codes, ("I8",))
    if len(codes.shape) != 2:
        message = f"its shape is {list(codes.shape)}, and a matrix has two sides"
        raise CheckpointError(message, file=str(codes.file), tensor=codes.name)
    if (order := entries.get(f"{module}.weight_format")) is not None:
        check_part(order, ("U8",), (), (1,))
        if bool(order.read(torch.uint8, CPU).any()):
            raise UnsupportedError(
                "only weights in the order of rows are read", file=str(order.file), tensor=order.name
            )
    outputs, inputs = codes.shape
    kind = integer_kind(8, False, inputs, inputs)
    place = (codes.source, codes.name, kind, codes.shape, codes.start, codes.encoding)
    parts = {"codes": codes, "scales": scales}
    entry = GridEntry(*place, parts, INT8_LAYOUT, (1, max(inputs, 1)), factor=INVERSE_127)
    check_part(scales, ("F32",), (outputs,))
    return entry


def combine_blocks(codes: TensorEntry, format: str, entries: Mapping[str, TensorEntry]) -> BlockwiseEntry:
    """A matrix of four bits. CheckpointError if its tensors do not have the sizes that its state says."""
    state_entry = entries[f"{codes.name}{STATE}{format}"]
    state = read_state(state_entry)
    shape, block = state.get("shape"), state.get("blocksize")
    if not isinstance(shape, list) or len(shape) != 2 or not all(is_count(side) for side in shape):
        raise state_error(state_entry, "shape", shape, "two whole numbers")
    if not is_count(block) or block not in BLOCK_SIZES:
        raise state_error(state_entry, "blocksize", block, f"one of {', '.join(map(str, BLOCK_SIZES))}")
    count = prod(shape)
    if codes.encoding is None or codes.size != -(-count // 2):
        message = f"{codes.kind} of shape {list(codes.shape)} are not the {-(-count // 2)} bytes of shape {shape}"
        raise CheckpointError(message, file=str(codes.file), tensor=codes.name)
    stored = replace(codes, kind="U8", shape=(codes.size,), encoding=INTEGER_ENCODINGS["U8"])
    blocks = -(-count // block)
    parts = {"codes": stored, "scales": find_part(entries, f"{codes.name}.absmax", codes)}
    parts["map"] = find_part(entries, f"{codes.name}.quant_map", codes)
    check_part(parts["map"], ("F32",), (16,))
    nested, offset = 0, 0.0
    if f"{codes.name}.nested_absmax" in entries:
        nested, offset = read_nesting(state_entry, state)
        check_part(parts["scales"], ("U8",), (blocks,))
        parts["nested scales"] = entries[f"{codes.name}.nested_absmax"]
        parts["nested map"] = find_part(entries, f"{codes.name}.nested_quant_map", codes)
        check_part(parts["nested scales"], ("F32",), (-(-blocks // nested),))
        check_part(parts["nested map"], ("F32",), (256,))
    else:
        check_part(parts["scales"], ("F32",), (blocks,))
    place = (codes.source, codes.name, KINDS[format], tuple(shape), codes.start, stored.encoding)
    return BlockwiseEntry(*place, parts, VALUES[format], block, nested, offset)


def read_nesting(entry: TensorEntry, state: Json) -> tuple[int, float]:
    """How many scales share a scale, and what is added to each."""
    block, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if not is_count(block) or block not in BLOCK_SIZES:
        raise state_error(entry, "nested_blocksize", block, f"one of {', '.join(map(str, BLOCK_SIZES))}")
    if not isinstance(offset, int | float):
        raise state_error(entry, "nested_offset", offset, "a number")
    return block, float(offset)


def read_state(entry: TensorEntry) -> Json:
    """The JSON object that describes a matrix."""
    check_part(entry, ("U8",))
    if len(entry.shape) != 1 or entry.shape[0] > MAX_STATE_BYTES:
        message = f"its shape is {list(entry.shape)}, and {MAX_STATE_BYTES} bytes are the most"
        raise CheckpointError(message, file=str(entry.file), tensor=entry.name)
    try:
        state = orjson.loads(entry.read(torch.uint8, CPU).numpy().tobytes())
    except orjson.JSONDecodeError as error:
        raise CheckpointError(f"is no valid JSON: {error}", file=str(entry.file), tensor=entry.name) from None
    if not isinstance(state, dict):
        raise CheckpointError("should hold a JSON object", file=str(entry.file), tensor=entry.name)
    return state


def is_count(value: object) -> TypeGuard[int]:
    """Whether the value is a whole number from 0 on, as the side of a matrix is."""
    return type(value) is int and 0 <= value < MAX_SIDE


def state_error(entry: TensorEntry, field: str, value: object, wanted: str) -> CheckpointError:
    message = f"{field} is {show_value(value)}, which should be {wanted}"
    return CheckpointError(message, file=str(entry.file), tensor=entry.name)
