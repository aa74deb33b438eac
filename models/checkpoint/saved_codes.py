"""Codes and scales of matrices that are saved in the compressed-tensors format, and the configuration that describes
them.

Floats made by `quantize_int8` give the same codes and scales again when models.native packs them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Json = dict[str, Any]
METHOD = "compressed-tensors"
FORMATS = {8: "int-quantized", 4: "pack-quantized"}  # by the bits of a weight
INT8_GROUP = 32  # inputs that share a scale in saved files, as in models.native
WIDE_GROUP = 64  # the same in networks that models.native rounds to wide groups
MAX_CODE = 127  # the largest code of eight bits
# The largest codes tried for a group that may be whole multiples of a scale already.
TRIED_CODES = (MAX_CODE, *range(16, 0, -1))
HALF_DIGITS = 2048  # a half-precision number is an integer below this times a power of two


@dataclass(frozen=True)
class SavedScheme:
    """`bits` of a weight, and how many inputs of an output share a scale."""

    bits: int
    group: int


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """[N, K] float32 of int8 `codes` [N, K] and `scales` [N, G], each scale for K / G neighbouring inputs."""
    count, groups = scales.shape
    return codes.float().view(count, groups, -1).mul_(scales[:, :, None]).view(codes.shape)


def quantize_int8(weights: Tensor, group: int = INT8_GROUP) -> tuple[Tensor, Tensor]:
    """Codes [N, K] int8 and scales [N, K / group] float32 of weights [N, K], as models.native packs them.

    A group that is already whole multiples of a scale keeps that scale. Otherwise MAX_CODE scales are its largest
    weight, rounded up to the digits of half precision. Then codes times the scale are exact, and packing them again
    gives the same codes and scales whatever else is packed.

    The packer stores scales relative to a unit of the whole matrix in the range of half precision. So this holds for
    groups whose largest weight is at least 2^-22 of the largest of all; in smaller groups a code may differ by one. A
    group with an infinite or NaN weight has the scale NaN. Groups of WIDE_GROUP that keep a scale of their own here are
    rounded in memory, as those of the original are.
    """
    count = len(weights)
    groups = weights.float().view(-1, group)
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
    """Scales [G, 1] for groups [G, inputs]; see `quantize_int8`."""
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


def build_config(scheme: SavedScheme, ignored: list[str]) -> Json:
    """The quantization_config of matrices saved under `scheme`; `ignored` modules are stored as floats.

    The format cannot describe how activations are rounded here, and its rounding per token is less exact, so nothing is
    written about activations.
    """
    weights: Json = {"num_bits": scheme.bits, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group", "group_size": scheme.group}
    format = FORMATS[scheme.bits]
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
