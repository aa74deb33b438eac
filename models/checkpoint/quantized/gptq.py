"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them: `qweight`, `qzeros`, `scales` and `g_idx` of each module.

qweight [K * bits / 32, N] int32 has the codes of 32 / bits neighbouring inputs in a number, the first in the lowest
bits; codes of three bits go on in the next number. qzeros [G, N * bits / 32] is packed along the outputs, scales are
[G, N], and g_idx [K] names the group of each input. Format "gptq" stores zero points minus one, "gptq_v2" as they are
(https://github.com/ModelCloud/GPTQModel, gptqmodel/utils/model.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import CheckpointError
from ..tensor_files import TensorEntry
from .config_fields import Json, check_field, read_count
from .packed_codes import column_layout, unpack_codes
from .quantized_entry import FLOAT_KINDS, GridEntry, check_part, find_part, is_reordered
from .stored_kinds import integer_kind
from .unused_bias import mark_biases

BITS = (4, 8, 2, 3)
CODES = "qweight"
LEAVES = (CODES, "qzeros", "scales", "g_idx")
FORMATS = (None, "gptq", "gptq_v2")
# A one in each code of an int32.  Codes that overflow carry into the next one, as in GPTQModel.
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class GptqScheme:
    """`bits` of a code and `group` inputs that share a scale (0: all); `added`: to zero points. Where inputs are
    `reordered`, each module has to name their groups."""

    bits: int
    group: int
    added: int
    reordered: bool


def read_config(file: Path, config: Json) -> GptqScheme:
    """The scheme of the configuration. UnsupportedError if it is not supported."""
    check_field(file, "bits", config.get("bits"), BITS)
    for field in ("checkpoint_format", "format"):
        check_field(file, field, config.get(field), FORMATS)
    for field in ("is_marlin_format", "planar"):
        check_field(file, field, config.get(field) or None, (None,))
    check_field(file, "pack_dtype", config.get("pack_dtype"), (None, "int32"))
    group = config.get("group_size", -1)
    size = 0 if group in (-1, None) else read_count(file, "group_size", group)
    version = config.get("checkpoint_format") or config.get("format")
    return GptqScheme(config["bits"], size, 0 if version == "gptq_v2" else 1, bool(config.get("desc_act")))


def combine_entries(scheme: GptqScheme, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries, with the tensors of each quantised matrix combined into one."""
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        module, _, leaf = name.rpartition(".")
        if f"{module}.{CODES}" not in entries or leaf not in (*LEAVES, "bias"):
            found[name] = entry
        elif leaf == CODES:
            found[f"{module}.weight"] = combine_parts(module, entries, scheme)
        elif leaf == "bias":
            found[name] = mark_biases(entry)
    return found


def combine_parts(module: str, entries: Mapping[str, TensorEntry], scheme: GptqScheme) -> GridEntry:
    """The matrix of a module. CheckpointError if a tensor is missing, or has a wrong dtype or shape."""
    codes = entries[f"{module}.{CODES}"]
    zeros, scales = (find_part(entries, f"{module}.{leaf}", codes) for leaf in ("qzeros", "scales"))
    check_part(codes, ("I32",))
    rows, outputs = codes.shape if len(codes.shape) == 2 else (0, 0)
    groups = entries.get(f"{module}.g_idx")
    if groups is None and scheme.reordered:
        groups = find_part(entries, f"{module}.g_idx", codes)
    inputs = groups.shape[0] if groups is not None and len(groups.shape) == 1 else rows * 32 // scheme.bits
    bits = next((bits for bits in BITS if inputs and rows * 32 == inputs * bits), 0)
    if not bits or outputs * bits % 32:
        message = f"its shape {list(codes.shape)} is not that of codes for {inputs} inputs"
        raise CheckpointError(message, file=str(codes.file), tensor=codes.name)
    width = scheme.group or inputs
    roles = {"codes": codes, "scales": scales, "zeros": zeros}
    if groups is not None:
        check_part(groups, ("I32", "I64"), (inputs,))
    kind = integer_kind(bits, True, width, inputs)
    place = (codes.source, f"{module}.weight", kind, (outputs, inputs), codes.start, codes.encoding)
    unpack = partial(unpack_zero_points, bits=bits, added=scheme.added)
    entry = GridEntry(*place, roles, column_layout(bits), (width, 1), transposed=True, unpack_zeros=unpack)
    check_part(scales, FLOAT_KINDS, entry.grid)
    check_part(zeros, ("I32",), (entry.grid[0], outputs * bits // 32))
    if groups is None or not is_reordered(groups, width):
        return entry
    return replace(entry, kind=integer_kind(bits, True, 1, inputs), parts={**roles, "order": groups})


def unpack_zero_points(words: Tensor, bits: int, added: int) -> Tensor:
    """[G, N] zero points of `words` [G, N * bits / 32] int32, to each of which `added` is added."""
    if bits in ONES:
        return unpack_codes(words + added * ONES[bits], bits).float()
    return (unpack_codes(words, bits) + added & (1 << bits) - 1).to(torch.float32)
