"""AWQ checkpoints, as AutoAWQ and GPTQModel write them: `qweight`, `qzeros` and `scales` of each module, codes of four
bits.

Version "gemm": qweight [K, N / 8] int32 has the codes of eight neighbouring outputs in a number, in the order of
PACKED_OUTPUTS; qzeros [G, N / 8] likewise; scales [G, N]. Version "gemv": qweight [N, K / 8] has eight neighbouring
inputs in their order; qzeros [N, Z] and scales [N, 8 Z] are padded (https://github.com/casper-hansen/AutoAWQ,
awq/modules/linear).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import CheckpointError
from ..tensor_files import TensorEntry
from .config_fields import Json, check_field, read_count
from .packed_codes import CodeLayout, row_layout, unpack_codes
from .quantized_entry import FLOAT_KINDS, GridEntry, ReportBytes, check_part, find_part
from .stored_kinds import integer_kind
from .unused_bias import mark_biases

CODES = "qweight"
LEAVES = (CODES, "qzeros", "scales")
CODES_IN_WORD = 8
PACKED_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight outputs, from the lowest bits of a number on


@dataclass(frozen=True)
class AwqScheme:
    """`version`: the order of packing; `group`: inputs that share a scale, 0: all."""

    version: str
    group: int


class GemvEntry(GridEntry):
    """A matrix in the order of "gemv", whose scales and zero points are padded with groups that have no inputs."""

    def read_scales(self, report_bytes: ReportBytes, role: str = "scales") -> Tensor:
        return super().read_scales(report_bytes, role)[:, : self.grid[1]]

    def read_zeros(self, report_bytes: ReportBytes) -> Tensor:
        words = self.read_part("zeros", report_bytes, torch.int32)
        return unpack_codes(words, 4)[:, : self.grid[1]].float()


def read_config(file: Path, config: Json) -> AwqScheme:
    """The scheme of the configuration. UnsupportedError if it is not supported."""
    bits = "w_bit" if "w_bit" in config else "bits"
    check_field(file, bits, config.get(bits), (4,))
    fields = [field for field in ("version", "checkpoint_format", "format") if config.get(field) is not None]
    versions = {field: str(config[field]).lower() for field in fields} or {"version": "gemm"}
    for field, version in versions.items():
        check_field(file, field, version, ("gemm", "gemv"))
    check_field(file, "zero_point", config.get("zero_point", True), (True,))
    name = "q_group_size" if "q_group_size" in config else "group_size"
    group = config.get(name, -1)
    size = 0 if group in (-1, None) else read_count(file, name, group)
    return AwqScheme(next(iter(versions.values())), size)


def combine_entries(scheme: AwqScheme, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries, with the tensors of each quantised matrix combined into one."""
    found: dict[str, TensorEntry] = {}
    combine = {"gemm": combine_gemm, "gemv": combine_gemv}[scheme.version]
    for name, entry in entries.items():
        module, _, leaf = name.rpartition(".")
        if f"{module}.{CODES}" not in entries or leaf not in (*LEAVES, "bias"):
            found[name] = entry
        elif leaf == CODES:
            parts = {
                role: find_part(entries, f"{module}.{each}", entry)
                for role, each in (("codes", CODES), ("scales", "scales"), ("zeros", "qzeros"))
            }
            check_part(entry, ("I32",))
            if len(entry.shape) != 2:
                message = f"its shape is {list(entry.shape)}, and a matrix has two sides"
                raise CheckpointError(message, file=str(entry.file), tensor=name)
            found[f"{module}.weight"] = combine(f"{module}.weight", parts, scheme)
        elif leaf == "bias":
            found[name] = mark_biases(entry)
    return found


def combine_gemm(name: str, parts: Mapping[str, TensorEntry], scheme: AwqScheme) -> GridEntry:
    codes = parts["codes"]
    inputs, outputs = codes.shape[0], codes.shape[1] * CODES_IN_WORD
    width = find_width(codes, inputs, scheme)
    place = (codes.source, name, integer_kind(4, True, width, inputs), (outputs, inputs), codes.start, codes.encoding)
    layout = CodeLayout("awq gemm", torch.int32, unpack_outputs)
    entry = GridEntry(*place, parts, layout, (width, 1), transposed=True, unpack_zeros=unpack_outputs)
    check_part(parts["scales"], FLOAT_KINDS, entry.grid)
    check_part(parts["zeros"], ("I32",), (entry.grid[0], codes.shape[1]))
    return entry


def combine_gemv(name: str, parts: Mapping[str, TensorEntry], scheme: AwqScheme) -> GridEntry:
    codes = parts["codes"]
    outputs, inputs = codes.shape[0], codes.shape[1] * CODES_IN_WORD
    width = find_width(codes, inputs, scheme)
    place = (codes.source, name, integer_kind(4, True, width, inputs), (outputs, inputs), codes.start, codes.encoding)
    entry = GemvEntry(*place, parts, row_layout(4, 0), (1, width))
    words = -(-entry.grid[1] // CODES_IN_WORD)
    multiple = {32: 4, 64: 2}.get(width, 1)
    words = -(-words // multiple) * multiple
    check_part(parts["scales"], FLOAT_KINDS, (outputs, words * CODES_IN_WORD))
    check_part(parts["zeros"], ("I32",), (outputs, words))
    return entry


def find_width(codes: TensorEntry, inputs: int, scheme: AwqScheme) -> int:
    """The inputs that share a scale. CheckpointError unless groups fill the matrix."""
    width = scheme.group or max(inputs, 1)
    if inputs % width:
        message = f"its {inputs} inputs are no multiple of {width}, so many share a scale"
        raise CheckpointError(message, file=str(codes.file), tensor=codes.name)
    return width


def unpack_outputs(words: Tensor) -> Tensor:
    """[K, 8 W] uint8 codes of `words` [K, W] in the order of the outputs."""
    packed = unpack_codes(words, 4).view(*words.shape, CODES_IN_WORD)
    order = torch.tensor(PACKED_OUTPUTS).argsort()
    return packed[..., order].flatten(1)
