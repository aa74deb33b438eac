"""The compressed-tensors format: integers and floats of 8 bits, packed integers of 4 and 2, NVFP4, MXFP4 and MXFP8
(https://github.com/vllm-project/compressed-tensors).

A module is quantised if the file holds `weight_scale` for it, whatever the lists of targets and ignored modules say. Of
several schemes the first applies whose dtypes and shapes the module has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.errors import CheckpointError, UnsupportedError
from ..tensor_files import TensorEntry
from .config_fields import CONFIG, Json, check_field, dict_or_empty, read_count, read_name
from .packed_codes import FLOAT_LAYOUT, FP4_LAYOUT, INT8_LAYOUT, CodeLayout, row_layout, unpack_codes
from .quantized_entry import CPU, FLOAT_KINDS, GridEntry, check_part, find_part, is_reordered
from .stored_kinds import integer_kind

PACKED = "pack-quantized"
# The bits and the type of weights that a format may have.
FORMAT_WEIGHTS: Mapping[str, tuple[tuple[int, str], ...]] = {
    "int-quantized": ((8, "int"),),
    "naive-quantized": ((8, "int"), (8, "float")),
    "float-quantized": ((8, "float"),),
    PACKED: ((4, "int"), (8, "int"), (2, "int")),
    "nvfp4-pack-quantized": ((4, "float"),),
    "mxfp4-pack-quantized": ((4, "float"),),
    "mxfp8-quantized": ((8, "float"),),
}
MIXED = "mixed-precision"  # each of the config_groups has a format of its own
MX_FORMATS = ("mxfp4-pack-quantized", "mxfp8-quantized")  # whose scales are exponents
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
PARTS = (
    *("weight", "weight_packed", "weight_scale", "weight_shape"),
    *("weight_zero_point", "weight_g_idx", "weight_global_scale"),
)
# Scales of activations that are rounded to floats of 8 or 4 bits.  Activations are not rounded here.
ACTIVATION_PARTS = ("input_scale", "input_global_scale")
FLOAT8_KINDS = ("F8_E4M3", "F8_E5M2")
MAX_SIDE = 1 << 31  # of a matrix


@dataclass(frozen=True)
class WeightScheme:
    """How the weights of a module are stored. `group` inputs share a scale in the strategies of groups, `block` rows
    and columns in that of blocks; they are 0 in others."""

    format: str
    bits: int
    type: str
    strategy: str
    symmetric: bool
    group: int
    block: tuple[int, int]

    @property
    def code_part(self) -> str:
        return "weight_packed" if "pack" in self.format else "weight"

    def find_block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The rows and columns of a matrix that share a scale."""
        rows, columns = (max(side, 1) for side in shape)
        blocks = {"tensor": (rows, columns), "channel": (1, columns), "block": self.block}
        return blocks.get(self.strategy, (1, self.group))


def read_config(file: Path, config: Json) -> "tuple[WeightScheme, ...]":
    """The schemes of the configuration. UnsupportedError if one of them is not supported."""
    check_field(file, "format", config.get("format"), (*FORMAT_WEIGHTS, MIXED))
    for field in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        check_field(file, field, config.get(field) or None, (None,))
    groups = [dict_or_empty(each) for each in dict_or_empty(config.get("config_groups")).values()]
    if not groups:
        raise UnsupportedError(f"{CONFIG}.config_groups: it describes no weights", file=str(file))
    return tuple(dict.fromkeys(read_scheme(file, config["format"], group) for group in groups))


def read_scheme(file: Path, format: str, group: Json) -> WeightScheme:
    """The scheme of one of the config_groups."""
    known = tuple(FORMAT_WEIGHTS) if format == MIXED else (None, *FORMAT_WEIGHTS)
    check_field(file, "format", group.get("format"), known)
    format = group.get("format") or format
    check_field(file, "output_activations", group.get("output_activations"), (None,))
    weights = dict_or_empty(group.get("weights"))
    check_activations(file, group.get("input_activations"))
    check_field(file, "weights.num_bits", weights.get("num_bits"), tuple(bits for bits, _ in FORMAT_WEIGHTS[format]))
    kinds = tuple(type for bits, type in FORMAT_WEIGHTS[format] if bits == weights["num_bits"])
    check_field(file, "weights.type", weights.get("type"), kinds)
    symmetric = weights.get("symmetric", True)
    check_field(file, "weights.symmetric", symmetric, (True, False) if weights["type"] == "int" else (True,))
    check_field(
        file, "weights.actorder", weights.get("actorder"), (None, False, "group", "dynamic", "weight", "static")
    )
    strategy = read_name(file, "weights.strategy", weights.get("strategy"), STRATEGIES)
    size = read_count(file, "weights.group_size", weights.get("group_size")) if "group" in strategy else 0
    block = read_block(file, weights.get("block_structure")) if strategy == "block" else (0, 0)
    return WeightScheme(format, weights["num_bits"], weights["type"], strategy, symmetric, size, block)


def check_activations(file: Path, activations: Any) -> None:
    """UnsupportedError for integer activations with fixed scales; those of floats lose little, and are not rounded."""
    if activations is None:
        return
    fields = dict_or_empty(activations)
    check_field(file, "input_activations.num_bits", fields.get("num_bits"), (8, 4))
    check_field(file, "input_activations.type", fields.get("type"), ("int", "float"))
    if fields["type"] == "int":
        check_field(file, "input_activations.dynamic", fields.get("dynamic"), (True,))


def read_block(file: Path, value: Any) -> tuple[int, int]:
    sides = value if isinstance(value, list) and len(value) == 2 else [None, None]
    height, width = (read_count(file, "weights.block_structure", side) for side in sides)
    return height, width


def combine_entries(schemes: tuple[WeightScheme, ...], entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries, with the parts of each quantised matrix combined into one."""
    found: dict[str, TensorEntry] = {}
    floats = all(scheme.type == "float" for scheme in schemes)
    for name, entry in entries.items():
        module, _, leaf = name.rpartition(".")
        if f"{module}.weight_scale" not in entries or not leaf.startswith(("weight", "input", "output")):
            found[name] = entry
        elif leaf in ("weight", "weight_packed"):
            parts = {part: entries[f"{module}.{part}"] for part in PARTS if f"{module}.{part}" in entries}
            found[f"{module}.weight"] = choose_entry(f"{module}.weight", leaf, parts, schemes)
        elif leaf not in PARTS and not (floats and leaf in ACTIVATION_PARTS):
            message = "fixed scales of integer activations are not read; save it without"
            raise UnsupportedError(message, file=str(entry.file), tensor=name)
    return found


def choose_entry(
    name: str, leaf: str, parts: Mapping[str, TensorEntry], schemes: tuple[WeightScheme, ...]
) -> GridEntry:
    """The matrix under the first scheme that fits. CheckpointError if none does."""
    codes, failed = parts[leaf], list[CheckpointError]()
    for scheme in schemes:
        if scheme.code_part == leaf:
            try:
                entry = combine_parts(name, parts, scheme)
            except CheckpointError as error:
                failed.append(error)
            else:
                return add_order(entry, scheme, parts)
    if failed:
        raise failed[0]
    message = f"{CONFIG}.config_groups has no scheme with the tensor {leaf}"
    raise CheckpointError(message, file=str(codes.file), tensor=codes.name)


def combine_parts(name: str, parts: Mapping[str, TensorEntry], scheme: WeightScheme) -> GridEntry:
    """The matrix of these tensors. CheckpointError if one of them has not the dtype and shape of the scheme."""
    codes, scales = parts[scheme.code_part], parts["weight_scale"]
    shape, layout = find_layout(codes, parts, scheme)
    block = scheme.find_block(shape)
    if shape[1] % block[1] and scheme.strategy != "block":
        message = f"its {shape[1]} inputs are no multiple of {block[1]}, so many share a scale"
        raise CheckpointError(message, file=str(codes.file), tensor=codes.name)
    roles = {"codes": codes, "scales": scales, **find_extra_parts(parts, scheme)}
    kind = find_kind(scheme, block, shape, roles)
    place = (codes.source, name, kind, shape, codes.start, codes.encoding)
    entry = GridEntry(*place, roles, layout, block)
    (rows, columns), flat = entry.grid, find_flat_shapes(entry.grid)
    check_part(scales, scale_kinds(scheme), entry.grid, *flat)
    if "zeros" not in roles:
        return entry
    if scheme.format != PACKED or scheme.symmetric or scheme.strategy == "tensor":
        check_part(roles["zeros"], ("I8",), entry.grid, *flat)
        return entry
    check_part(roles["zeros"], ("I32",), (-(-rows * scheme.bits // 32), columns))
    return replace(entry, unpack_zeros=partial(unpack_zero_points, bits=scheme.bits, rows=rows))


def add_order(entry: GridEntry, scheme: WeightScheme, parts: Mapping[str, TensorEntry]) -> GridEntry:
    """The matrix with the groups of its inputs if they are reordered. CheckpointError if there is no such group."""
    groups = parts.get("weight_g_idx")
    if groups is None:
        return entry
    check_part(groups, ("I32", "I64"), entry.shape[1:])
    if not is_reordered(groups, entry.block[1]):
        return entry
    roles = {**entry.parts, "order": groups}
    return replace(entry, kind=find_kind(scheme, entry.block, entry.code_shape, roles), parts=roles)


def find_extra_parts(parts: Mapping[str, TensorEntry], scheme: WeightScheme) -> dict[str, TensorEntry]:
    """The tensors that only some schemes have, by their roles in a GridEntry."""
    codes, roles = parts[scheme.code_part], dict[str, TensorEntry]()
    if scheme.strategy == "tensor_group":
        roles["divisor"] = find_part(parts, "weight_global_scale", codes)
        check_part(roles["divisor"], FLOAT_KINDS, (1,), ())
    if "weight_zero_point" in parts or not scheme.symmetric:
        roles["zeros"] = find_part(parts, "weight_zero_point", codes)
    return roles


def find_flat_shapes(grid: tuple[int, int]) -> list[tuple[int, ...]]:
    """Shapes of fewer dimensions in which a grid of scales may be stored, too."""
    if grid == (1, 1):
        return [(1,), ()]
    return [grid[:1]] if grid[1] == 1 else []


def find_layout(
    codes: TensorEntry, parts: Mapping[str, TensorEntry], scheme: WeightScheme
) -> tuple[tuple[int, int], CodeLayout]:
    """The shape of the matrix, and how its codes are stored."""
    if scheme.format == PACKED:
        shape = read_shape(parts, codes)
        words = -(-shape[1] * scheme.bits // 32)
        check_part(codes, ("I32",), (shape[0], words))
        return shape, row_layout(scheme.bits, 1 << scheme.bits - 1)
    if len(codes.shape) != 2:
        message = f"its shape is {list(codes.shape)}, and a matrix has two sides"
        raise CheckpointError(message, file=str(codes.file), tensor=codes.name)
    rows, columns = codes.shape
    if scheme.code_part == "weight_packed":
        check_part(codes, ("U8",))
        return (rows, 2 * columns), FP4_LAYOUT
    check_part(codes, ("I8",) if scheme.type == "int" else FLOAT8_KINDS)
    return (rows, columns), INT8_LAYOUT if scheme.type == "int" else FLOAT_LAYOUT


def read_shape(parts: Mapping[str, TensorEntry], codes: TensorEntry) -> tuple[int, int]:
    """The shape of a matrix, which the file stores as two numbers: the last int32 of a row may be only partly used."""
    shape_entry = parts.get("weight_shape")
    if shape_entry is None or shape_entry.kind not in ("I32", "I64") or shape_entry.shape != (2,):
        message = "its weight_shape, two whole numbers, is missing"
        raise CheckpointError(message, file=str(codes.file), tensor=codes.name)
    rows, columns = shape_entry.read(torch.int64, CPU).tolist()
    if not (0 <= rows < MAX_SIDE and 0 <= columns < MAX_SIDE):
        message = f"it says {[rows, columns]}, and a side has from 0 to {MAX_SIDE - 1}"
        raise CheckpointError(message, file=str(shape_entry.file), tensor=shape_entry.name)
    return rows, columns


def scale_kinds(scheme: WeightScheme) -> tuple[str, ...]:
    if scheme.format in MX_FORMATS:
        return ("U8", "F8_E8M0")
    return ("F8_E4M3",) if scheme.strategy == "tensor_group" else FLOAT_KINDS


def find_kind(
    scheme: WeightScheme, block: tuple[int, int], shape: tuple[int, int], roles: Mapping[str, TensorEntry]
) -> str:
    """The name of the matrix's format; see models.checkpoint.default_precision."""
    if scheme.type == "float":
        return {4: "MXFP4" if scheme.format in MX_FORMATS else "NVFP4", 8: "FP8"}[scheme.bits]
    width = shape[1] if block[1] == shape[1] else gcd(block[1], shape[1])
    return integer_kind(scheme.bits, "zeros" in roles, 1 if "order" in roles else width, shape[1])


def unpack_zero_points(words: Tensor, bits: int, rows: int) -> Tensor:
    """[N, G] zero points of `words` [ceil(N * bits / 32), G]; as codes, they are stored without a sign."""
    return unpack_codes(words.t(), bits).t()[:rows].float() - (1 << bits - 1)
