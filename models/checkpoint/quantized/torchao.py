"""torchao's tensors in safetensors files, of the kinds that hold plain codes: Int8Tensor, IntxUnpackedToInt8Tensor and
Float8Tensor (torchao.prototype.safetensors).

The metadata of a file has for each tensor its kind and the sides of the block that shares a scale. The tensors of
`NAME.weight` are `NAME._weight_qdata`, `NAME._weight_scale` and `NAME._weight_zero_point`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

import orjson

from ...core.errors import CheckpointError, UnsupportedError, show_value
from ..tensor_files import TensorEntry, read_metadata
from .config_fields import Json, dict_or_empty
from .packed_codes import FLOAT_LAYOUT, INT8_LAYOUT, CodeLayout
from .quantized_entry import FLOAT_KINDS, GridEntry, check_part, find_part
from .stored_kinds import integer_kind

DATA = "_qdata"
LEAVES = (DATA, "_scale", "_zero_point")
FLOAT8_KINDS = ("F8_E4M3", "F8_E5M2")
MAX_TEXT_LENGTH = 4096  # characters of the JSON of a matrix
SMALL_TYPES = ("int1", "int2", "int3", "int4")


@dataclass(frozen=True)
class TensorKind:
    """A class of torchao: the dtypes of its codes, and how they are stored."""

    codes: tuple[str, ...]
    layout: CodeLayout


TENSOR_KINDS: Mapping[str, TensorKind] = {
    "Int8Tensor": TensorKind(("I8",), INT8_LAYOUT),
    "IntxUnpackedToInt8Tensor": TensorKind(("I8",), INT8_LAYOUT),
    "Float8Tensor": TensorKind(FLOAT8_KINDS, FLOAT_LAYOUT),
}


def read_config(file: Path, config: Json) -> None:
    """Nothing: the kind of each tensor is in the metadata of its file."""


def combine_entries(scheme: None, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:  # noqa: ARG001
    """The entries, with the tensors of each quantised matrix combined into one."""
    metadata = cache(read_metadata)
    bases = {name.removesuffix(DATA) for name in entries if name.endswith(DATA)}
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        base = next((name.removesuffix(leaf) for leaf in LEAVES if name.endswith(leaf)), name)
        if base not in bases:
            found[name] = entry
        elif name.endswith(DATA):
            module, _, leaf = base.rpartition(".")
            tensor = f"{module}.{leaf.removeprefix('_')}"
            found[tensor] = combine_parts(tensor, base, entries, metadata(entry.file))
    return found


def combine_parts(tensor: str, base: str, entries: Mapping[str, TensorEntry], metadata: Mapping[str, Any]) -> GridEntry:
    """The matrix `tensor`, whose tensors have names that begin with `base`."""
    codes, fields = entries[f"{base}{DATA}"], read_fields(entries[f"{base}{DATA}"], metadata.get(tensor))
    kind, data = str(fields.get("_type")), dict_or_empty(fields.get("_data"))
    if kind not in TENSOR_KINDS:
        message = f"its kind is {show_value(kind)}, and only {', '.join(TENSOR_KINDS)} are read"
        raise UnsupportedError(message, file=str(codes.file), tensor=codes.name)
    if data.get("act_pre_scale") is not None or f"{base}_act_pre_scale" in entries:
        raise UnsupportedError("scales of activations are not read", file=str(codes.file), tensor=codes.name)
    check_part(codes, TENSOR_KINDS[kind].codes)
    block = data.get("block_size")
    if len(codes.shape) != 2 or not isinstance(block, list) or not is_block(block, codes.shape):
        message = f"block_size is {show_value(block)}, which does not divide its shape {list(codes.shape)}"
        raise CheckpointError(message, file=str(codes.file), tensor=codes.name)
    inputs, (height, width) = codes.shape[1], block
    parts = {"codes": codes, "scales": find_part(entries, f"{base}_scale", codes)}
    names = fields.get("_tensor_data_names")
    if f"{base}_zero_point" in entries or (isinstance(names, list) and "zero_point" in names):
        parts["zeros"] = find_part(entries, f"{base}_zero_point", codes)
    type = dict_or_empty(data.get("target_dtype")).get("_data")
    bits = 4 if type in SMALL_TYPES else 8
    stored = "FP8" if kind == "Float8Tensor" else integer_kind(bits, "zeros" in parts, gcd(width, inputs), inputs)
    place = (codes.source, tensor, stored, codes.shape, codes.start, codes.encoding)
    entry = GridEntry(*place, parts, TENSOR_KINDS[kind].layout, (height, width))
    rows, columns = entry.grid
    flat = ((rows,),) if columns == 1 else ()
    single = ((), (1,)) if rows * columns == 1 else ()
    check_part(parts["scales"], FLOAT_KINDS, entry.grid, *flat, *single)
    if "zeros" in parts:
        check_part(parts["zeros"], ("I8", "I32", "I64"), entry.grid, *flat, *single)
    return entry


def read_fields(codes: TensorEntry, text: Any) -> Json:
    """What the metadata says of a tensor."""
    if isinstance(text, str) and len(text) > MAX_TEXT_LENGTH:
        message = f"its metadata has {len(text)} characters; {MAX_TEXT_LENGTH} are the most"
        raise CheckpointError(message, file=str(codes.file), tensor=codes.name)
    try:
        return dict_or_empty(orjson.loads(text) if isinstance(text, str) else None)
    except orjson.JSONDecodeError as error:
        message = f"its metadata is no valid JSON: {error}"
        raise CheckpointError(message, file=str(codes.file), tensor=codes.name) from None


def is_block(block: list[Any], shape: tuple[int, ...]) -> bool:
    """Whether blocks of these sides fill a matrix."""
    return len(block) == 2 and all(
        type(side) is int and side > 0 and whole % side == 0 for side, whole in zip(block, shape, strict=True)
    )
