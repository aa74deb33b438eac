"""Weights as floats of eight bits with scales: `quant_method` "fp8" and "fbgemm_fp8" (transformers'
integrations/finegrained_fp8.py; DeepSeek-V3, arXiv:2412.19437).

A weight is multiplied by `weight_scale_inv` or `weight_scale`: one for the matrix, one for each output, or one for each
block of `weight_block_size` outputs and inputs, the last of which may be smaller. Scales of activations are ignored, as
activations are not rounded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import CheckpointError
from ..tensor_files import TensorEntry
from .config_fields import Json, check_field, read_count
from .packed_codes import FLOAT_LAYOUT
from .quantized_entry import FLOAT_KINDS, GridEntry, check_part

FLOAT8_KINDS = ("F8_E4M3", "F8_E5M2")
SCALE_SUFFIXES = ("_scale_inv", "_scale")
SCALE_KINDS = (*FLOAT_KINDS, "F8_E8M0", "U8")
ACTIVATION_LEAVES = ("input_scale", "activation_scale", "input_scale_ub")


@dataclass(frozen=True)
class Float8Scheme:
    """`block`: outputs and inputs that share a scale; (0, 0): a scale is for a matrix or for an output."""

    block: tuple[int, int]


def read_config(file: Path, config: Json) -> Float8Scheme:
    """The scheme of the configuration. UnsupportedError if it is not supported."""
    check_field(file, "activation_scheme", config.get("activation_scheme"), (None, "dynamic", "static"))
    check_field(file, "scale_fmt", config.get("scale_fmt"), (None, "float", "ue8m0"))
    check_field(file, "expert_dtype", config.get("expert_dtype"), (None, "fp8"))
    check_field(file, "fmt", config.get("fmt"), (None, "e4m3", "e5m2"))
    block = config.get("weight_block_size")
    if block is None:
        return Float8Scheme((0, 0))
    sides = block if isinstance(block, list) and len(block) == 2 else [None, None]
    height, width = (read_count(file, "weight_block_size", side) for side in sides)
    return Float8Scheme((height, width))


def combine_entries(scheme: Float8Scheme, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries, with each matrix and its scales combined into one."""
    used = {
        f"{name}{suffix}"
        for name, entry in entries.items()
        for suffix in SCALE_SUFFIXES
        if entry.kind in FLOAT8_KINDS and f"{name}{suffix}" in entries
    }
    modules = {name.rpartition(".")[0] for name in used}
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        module, _, leaf = name.rpartition(".")
        if name in used or (module in modules and leaf in ACTIVATION_LEAVES):
            continue
        found[name] = combine_parts(entry, entries, scheme) if entry.kind in FLOAT8_KINDS else entry
    return found


def combine_parts(codes: TensorEntry, entries: Mapping[str, TensorEntry], scheme: Float8Scheme) -> GridEntry:
    """A matrix and its scales. CheckpointError if scales are missing, or are not as many as the scheme says."""
    scales = next((entries[name] for suffix in SCALE_SUFFIXES if (name := f"{codes.name}{suffix}") in entries), None)
    if scales is None or len(codes.shape) != 2:
        message = (
            "its scales are missing" if scales is None else f"its shape {list(codes.shape)} is not that of a matrix"
        )
        raise CheckpointError(message, file=str(codes.file), tensor=codes.name)
    outputs, inputs = codes.shape
    block = scheme.block
    if not block[0]:
        is_single = scales.shape in ((), (1,), (1, 1))
        block = (max(outputs, 1) if is_single else 1, max(inputs, 1))
    roles = {"codes": codes, "scales": scales}
    place = (codes.source, codes.name, "FP8", codes.shape, codes.start, codes.encoding)
    entry = GridEntry(*place, roles, FLOAT_LAYOUT, block)
    rows, columns = entry.grid
    flat = ((), (1,)) if rows * columns == 1 else ((rows,),) if columns == 1 else ()
    check_part(scales, SCALE_KINDS, entry.grid, *flat)
    return entry
