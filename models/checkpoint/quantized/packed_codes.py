"""How codes of few bits are packed into the numbers of a tensor, and how they are unpacked to floats."""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

# A sign, two bits of exponent and one of mantissa (E2M1 of the OCP Microscaling formats, version 1.0).
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127  # of E8M0: a byte that is an exponent of two


@dataclass(frozen=True)
class CodeLayout:
    """How a tensor of `dtype` holds codes: `rows` rows of codes are in `stored_rows` rows of the file.

    `unpack` makes codes, of any dtype, of stored rows. `name` identifies the layout.
    """

    name: str
    dtype: torch.dtype
    unpack: Callable[[Tensor], Tensor]
    stored_rows: int = 1
    rows: int = 1


def unpack_codes(words: Tensor, bits: int) -> Tensor:
    """[N, 32 * W / bits] uint8 of `words` [N, W] int32: each row is a string of bits, the first code in the lowest.

    32 * W has to be a multiple of `bits`, or the last code is left out.
    """
    count, width = words.shape
    data = words.reshape(-1).view(torch.uint8).view(count, 4 * width)  # the lowest byte of a word first
    if bits == 8:
        return data
    if bits in (2, 4):
        shifts = range(0, 8, bits)
        return torch.stack([data >> shift & (1 << bits) - 1 for shift in shifts], -1).flatten(1)
    eights = -(-4 * width // bits)  # of codes, in `bits` bytes each
    data = torch.nn.functional.pad(data, (0, eights * bits - 4 * width)).view(count, eights, bits)
    strings = sum(data[..., byte].long() << 8 * byte for byte in range(bits))
    assert isinstance(strings, Tensor)
    codes = torch.stack([strings >> bits * place & (1 << bits) - 1 for place in range(8)], -1)
    return codes.to(torch.uint8).flatten(1)[:, : width * 32 // bits]


def unpack_fp4(data: Tensor) -> Tensor:
    """[N, 2 B] float32 of bytes [N, B]: two numbers in a byte, the first in the low half."""
    codes = torch.stack((data & 15, data >> 4), -1).flatten(1)
    return torch.tensor(FP4_VALUES)[codes.int()]


def row_layout(bits: int, offset: int) -> CodeLayout:
    """Words of int32 along the inputs of an output; a code minus `offset` is its number."""
    return CodeLayout(f"rows of {bits} bits", torch.int32, lambda words: unpack_codes(words, bits).float() - offset)


def column_layout(bits: int) -> CodeLayout:
    """Words of int32 along the inputs, which are the rows: [K * bits / 32, N]."""
    shared = gcd(bits, 32)
    return CodeLayout(
        f"columns of {bits} bits",
        torch.int32,
        lambda words: unpack_codes(words.t(), bits).t(),
        bits // shared,
        32 // shared,
    )


INT8_LAYOUT = CodeLayout("int8", torch.int8, Tensor.float)
FLOAT_LAYOUT = CodeLayout("floats", torch.float32, lambda numbers: numbers)
FP4_LAYOUT = CodeLayout("fp4", torch.uint8, unpack_fp4)
