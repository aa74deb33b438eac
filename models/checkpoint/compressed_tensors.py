"""Quantised matrices in the compressed-tensors format: the tensors of one matrix (codes, scales, shape) become one
entry, which is read as floats.

The weights of an output have one scale for each group of inputs, or one for all. Floats made by `quantize_int8` give
the same codes and scales again when models.native packs them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import CheckpointError, UnsupportedError, show_value
from .tensor_files import FLOAT_ENCODINGS, TensorEntry, ignore_bytes

Json = dict[str, Any]
CONFIG = "quantization_config"
METHOD = "compressed-tensors"
FORMAT_BITS = {"int-quantized": 8, "pack-quantized": 4}  # bits of a weight
KINDS = {8: "int8", 4: "int4"}  # of an entry
GROUP_SIZES = (32, 64, 128)  # inputs that may share a scale, unless all do
INT8_GROUP = 32  # inputs that share a scale in saved files, as in models.native
MAX_CODE = 127  # the largest code of eight bits
# The largest codes tried for a group that may be whole multiples of a scale already.
TRIED_CODES = (MAX_CODE, *range(16, 0, -1))
HALF_DIGITS = 2048  # a half-precision number is an integer below this times a power of two
PARTS = ("weight", "weight_packed", "weight_scale", "weight_shape")


@dataclass(frozen=True)
class Scheme:
    """`bits` of a weight, and how many inputs of an output share a scale; 0: all."""

    bits: int
    group: int


@dataclass(frozen=True)
class CompressedEntry(TensorEntry):
    """A matrix of which the file holds codes of `bits` bits, and scales."""

    bits: int
    codes: TensorEntry
    scales: TensorEntry

    @property
    def files(self) -> tuple[Path, ...]:
        return self.codes.file, self.scales.file

    @property
    def size(self) -> int:
        return self.codes.size + self.scales.size

    def read(
        self, dtype: torch.dtype, device: torch.device, report_bytes: Callable[[int], None] = ignore_bytes
    ) -> Tensor:
        """Codes times scales, multiplied in float32."""
        cpu = torch.device("cpu")
        codes = self.codes.read(torch.int8 if self.bits == 8 else torch.int32, cpu, report_bytes)
        scales = self.scales.read(torch.float32, cpu, report_bytes)
        if self.bits == 4:
            codes = unpack_int4(codes, self.shape[1])
        return dequantize(codes, scales).to(device, dtype)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """[N, K] float32 of int8 `codes` [N, K] and `scales` [N, G], each scale for K / G neighbouring inputs."""
    count, groups = scales.shape
    return codes.float().view(count, groups, -1).mul_(scales[:, :, None]).view(codes.shape)


def quantize_int8(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, K] int8 and scales [N, K / INT8_GROUP] float32 of weights [N, K], as models.native packs them.

    A group that is already whole multiples of a scale keeps that scale. Otherwise MAX_CODE scales are its largest
    weight, rounded up to the digits of half precision. Then codes times the scale are exact, and packing them again
    gives the same codes and scales whatever else is packed.

    The packer stores scales relative to a unit of the whole matrix in the range of half precision. So this holds for
    groups whose largest weight is at least 2^-22 of the largest of all; in smaller groups a code may differ by one. A
    group with an infinite or NaN weight has the scale NaN.
    """
    count = len(weights)
    groups = weights.float().view(-1, INT8_GROUP)
    most = groups.abs().amax(1, keepdim=True)
    finite = most.isfinite()
    exponents = torch.frexp(most.where(finite, 1))[1].double()
    # The largest is scaled to between 1/2 and 1, so that nothing is subnormal.
    groups = (groups.where(finite, 0) * torch.exp2(-exponents)).float()
    scales = choose_scales(groups)
    inverse = torch.where(scales > 0, 1 / scales, 0)
    # Products of two float32 are exact in float64, so they are rounded once, as by a fused multiply-add.  Without
    # that the packer would sometimes round a tie the other way.
    codes = (groups.double() * inverse.double()).round().to(torch.int8)
    scales = (scales * torch.exp2(exponents)).float().where(finite, torch.nan)
    return codes.view(count, -1), scales.view(count, -1)


def choose_scales(groups: Tensor) -> Tensor:
    """Scales [G, 1] for groups [G, INT8_GROUP]; see `quantize_int8`."""
    most = groups.abs().amax(1, keepdim=True)
    digits, exponent = torch.frexp(most / MAX_CODE)
    scales = torch.ldexp((digits * HALF_DIGITS).ceil() / HALF_DIGITS, exponent)
    left = most[:, 0] > 0
    for level in TRIED_CODES:
        tried = most / level
        which = (left & ((torch.frexp(tried)[0] * HALF_DIGITS) % 1 == 0)[:, 0]).nonzero()[:, 0]
        some, scale = groups[which], tried[which]
        made = which[((some / scale).round() * scale == some).all(1)]
        scales[made], left[made] = tried[made], False
    return scales


def pack_int4(codes: Tensor) -> Tensor:
    """[N, K / 8] int32 of `codes` [N, K] uint8 from 0 to 15: eight codes in a number, the first in the lowest bits."""
    pairs = codes.view(len(codes), -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)


def unpack_int4(numbers: Tensor, inputs: int) -> Tensor:
    """[N, K] int8 from -8 to 7 of `numbers` [N, ceil(K / 8)] int32."""
    pairs = numbers.view(torch.uint8)
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)[:, :inputs]
    return codes.to(torch.int8) - 8


def combine_entries(file: Path, config: Any, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries, with the parts of each quantised matrix combined into one. `config` is the quantisation
    configuration.

    UnsupportedError names the field that is not supported.
    """
    scheme = read_scheme(file, config)
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        module, _, leaf = name.rpartition(".")
        parts = {part: entries[f"{module}.{part}"] for part in PARTS if f"{module}.{part}" in entries}
        if "weight_scale" not in parts or not leaf.startswith(("weight", "input", "output")):
            found[name] = entry
        elif leaf == ("weight" if scheme.bits == 8 else "weight_packed"):
            found[f"{module}.weight"] = combine_parts(f"{module}.weight", parts, scheme)
        elif leaf not in PARTS:
            message = "zero points, reordered inputs and fixed scales of activations are not read; save it without"
            raise UnsupportedError(message, file=str(entry.file), tensor=name)
    return found


def combine_parts(name: str, parts: Mapping[str, TensorEntry], scheme: Scheme) -> CompressedEntry:
    scales, codes = parts["weight_scale"], parts["weight" if scheme.bits == 8 else "weight_packed"]
    shape = codes.shape if scheme.bits == 8 else read_shape(parts, codes)
    count, inputs = shape if len(shape) == 2 else (0, 0)
    expected = ("I8", shape) if scheme.bits == 8 else ("I32", (count, -(-inputs // 8)))
    if len(shape) != 2 or (codes.kind, codes.shape) != expected:
        message = f"{codes.kind} of shape {list(codes.shape)} should be {expected[0]} of {list(expected[1])}"
        raise CheckpointError(message, file=str(codes.file), tensor=codes.name)
    width = scheme.group or max(inputs, 1)
    if scales.kind not in FLOAT_ENCODINGS or inputs % width or scales.shape != (count, inputs // width):
        message = (
            f"{scales.kind} of shape {list(scales.shape)} should be floats, one for each {width} of {inputs} inputs"
        )
        raise CheckpointError(message, file=str(scales.file), tensor=scales.name)
    kind = KINDS[scheme.bits]
    return CompressedEntry(codes.file, name, kind, shape, codes.start, codes.encoding, scheme.bits, codes, scales)


def read_shape(parts: Mapping[str, TensorEntry], codes: TensorEntry) -> tuple[int, ...]:
    """The shape of a matrix, which the file stores as two numbers: the last int32 of a row may be only partly used."""
    shape_entry = parts.get("weight_shape")
    if shape_entry is None or shape_entry.kind not in ("I32", "I64") or shape_entry.shape != (2,):
        message = "its weight_shape, two whole numbers, is missing"
        raise CheckpointError(message, file=str(codes.file), tensor=codes.name)
    sides: list[int] = shape_entry.read(torch.int64, torch.device("cpu")).tolist()
    return tuple(sides)


def read_scheme(file: Path, config: Any) -> Scheme:
    """The scheme in the configuration. Raises UnsupportedError if it is not supported."""
    config = dict_or_empty(config)
    check_field(file, "quant_method", config.get("quant_method"), (METHOD,))
    check_field(file, "format", config.get("format"), tuple(FORMAT_BITS))
    for field in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        check_field(file, field, config.get(field) or None, (None,))
    groups = dict_or_empty(config.get("config_groups")).values()
    schemes = {read_group_scheme(file, FORMAT_BITS[config["format"]], dict_or_empty(each)) for each in groups}
    if len(schemes) != 1:
        message = f"{CONFIG}.config_groups: one kind of weights is read, not {len(schemes)}"
        raise UnsupportedError(message, file=str(file))
    return schemes.pop()


def read_group_scheme(file: Path, bits: int, group: Json) -> Scheme:
    """The scheme of one of the config_groups."""
    check_field(file, "format", group.get("format"), (None, *FORMAT_BITS))
    check_field(file, "output_activations", group.get("output_activations"), (None,))
    if group.get("input_activations") is not None:
        inputs = dict_or_empty(group["input_activations"])
        for field, known in (("num_bits", (8,)), ("type", ("int",)), ("dynamic", (True,))):
            check_field(file, f"input_activations.{field}", inputs.get(field), known)
    weights = dict_or_empty(group.get("weights"))
    known_values: Json = {"num_bits": (bits,), "type": ("int",), "symmetric": (True,), "actorder": (None, False)}
    known_values["strategy"] = ("group", "channel")
    for field, values in known_values.items():
        check_field(file, f"weights.{field}", weights.get(field), values)
    if weights["strategy"] == "channel":
        return Scheme(bits, 0)
    check_field(file, "weights.group_size", weights.get("group_size"), GROUP_SIZES)
    return Scheme(bits, weights["group_size"])


def dict_or_empty(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def check_field(file: Path, field: str, value: Any, known: tuple[Any, ...]) -> None:
    """UnsupportedError unless the field has one of the known values."""
    if value not in known:
        raise UnsupportedError(
            f"{CONFIG}.{field} is {show_value(value)}, and only {' or '.join(map(repr, known))} is read: "
            f"weights of {METHOD}, symmetric, of 8 or 4 bits, by channel or group; "
            "use the unquantised checkpoint or a GGUF file",
            file=str(file),
        )


def build_config(scheme: Scheme, ignored: list[str]) -> Json:
    """The quantization_config of matrices saved under `scheme`; `ignored` modules are stored as floats.

    The format cannot describe how activations are rounded here, and its rounding per token is less exact, so nothing is
    written about activations.
    """
    weights: Json = {"num_bits": scheme.bits, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group", "group_size": scheme.group} if scheme.group else {"strategy": "channel"}
    format = next(name for name, bits in FORMAT_BITS.items() if bits == scheme.bits)
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": format,
    }
    return {
        "quant_method": METHOD,
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }
