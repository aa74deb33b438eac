"""Entries of quantised matrices. A matrix is decoded a few rows at a time, so that beside the floats only a slice of it
and its scales are in memory.

The numbers are those of the formats' definitions, in float32. The reference implementations round them to the half
precision in which they compute.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import lcm, prod
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import CheckpointError
from ..tensor_files import TensorEntry, entry_rows, ignore_bytes
from .packed_codes import EXPONENT_BIAS, CodeLayout

SLICE_NUMBERS = 1 << 20  # numbers that are decoded at a time
MAX_INPUTS = 1 << 20  # of a matrix whose groups are named one by one; published ones have a hundredth of it
SLICE_COPIES = 8  # float32 copies of a slice while it is decoded, at most
FLOAT_KINDS = ("F64", "F32", "F16", "BF16")  # of scales
CPU = torch.device("cpu")
ReportBytes = Callable[[int], None]
Place = tuple[slice | int, ...]


@dataclass(frozen=True)
class QuantizedEntry(TensorEntry):
    """A tensor that is computed from several tensors of the files, `parts`, by what they are."""

    parts: Mapping[str, TensorEntry]

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(part.file for part in self.parts.values()))

    @property
    def transformation(self) -> tuple[object, ...]:
        shared = {field.name for field in fields(TensorEntry)} | {"parts", "layout", "unpack_zeros"}
        layout = getattr(self, "layout", None)
        own = ((field.name, getattr(self, field.name)) for field in fields(self) if field.name not in shared)
        return type(self).__name__, layout.name if isinstance(layout, CodeLayout) else "", *own

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts.values())

    @property
    def work_numbers(self) -> int:
        """Count of float32 numbers in memory while it is read, beside the tensor itself: a slice, and copies of all
        parts but the codes; a word of zero points becomes up to 16 numbers."""
        row = prod(self.shape) // max(min(self.shape, default=1), 1)
        parts = ((16 if part.kind == "I32" else 4, part) for role, part in self.parts.items() if role != "codes")
        slices = SLICE_COPIES * min(SLICE_NUMBERS + 32 * row, prod(self.shape))
        return slices + sum(copies * prod(part.shape) for copies, part in parts)

    def read(self, dtype: torch.dtype, device: torch.device, report_bytes: ReportBytes = ignore_bytes) -> Tensor:
        """The tensor of `dtype`, from products in float32."""
        out = torch.empty(self.shape, dtype=dtype, device=device)
        decoded = out.view(self.decoded_shape)
        for place, values in self.decode(report_bytes):
            self._check_finite(values)
            decoded[place] = values
        return out

    @property
    def decoded_shape(self) -> tuple[int, ...]:
        """The shape in which slices have places."""
        return self.shape

    def decode(self, report_bytes: ReportBytes) -> Iterator[tuple[Place, Tensor]]:
        """Slices of the tensor in float32, each with its place in a tensor of `decoded_shape`."""
        raise NotImplementedError

    def read_part(self, role: str, report_bytes: ReportBytes, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.parts[role].read(dtype, CPU, report_bytes)

    def read_scales(self, report_bytes: ReportBytes, role: str = "scales") -> Tensor:
        """Scales in float32; bytes are exponents of two."""
        if self.parts[role].kind != "U8":
            return self.read_part(role, report_bytes)
        exponents = self.read_part(role, report_bytes, torch.uint8).float() - EXPONENT_BIAS
        return torch.ldexp(torch.ones(()), exponents)


@dataclass(frozen=True)
class GridEntry(QuantizedEntry):
    """A matrix of codes, (code - zero point) * scale, with one scale and zero point for each block of `block` rows and
    columns.

    Its parts are "codes" and "scales", and where the format has them "zeros", "divisor" (one number, by which scales
    are divided) and "order" (for each input its group). Scales are a grid [A, B] of `grid` blocks. If `transposed`, the
    rows of codes are inputs, otherwise outputs. `unpack_zeros` makes zero points [A, B] of the stored ones. Products
    are multiplied by `factor` afterwards.
    """

    layout: CodeLayout
    block: tuple[int, int]
    transposed: bool = False
    unpack_zeros: Callable[[Tensor], Tensor] = Tensor.float
    factor: float = 1.0

    @property
    def code_shape(self) -> tuple[int, int]:
        """The shape of the matrix of codes."""
        outputs, inputs = self.shape
        return (inputs, outputs) if self.transposed else (outputs, inputs)

    @property
    def grid(self) -> tuple[int, int]:
        (rows, columns), (height, width) = self.code_shape, self.block
        return -(-rows // height), -(-columns // width)

    def decode(self, report_bytes: ReportBytes) -> Iterator[tuple[Place, Tensor]]:
        rows, columns = self.code_shape
        if not rows or not columns:
            return
        scales = self.read_scales(report_bytes).reshape(self.grid)
        if "divisor" in self.parts:
            scales = scales / self.read_part("divisor", report_bytes)
        zeros = self.read_zeros(report_bytes) if "zeros" in self.parts else None
        order = self.read_order(report_bytes) if "order" in self.parts else None
        if self.transposed:  # outputs are rows from here on
            scales, zeros = scales.t().contiguous(), None if zeros is None else zeros.t().contiguous()
        for some in self._slices():
            codes = self._read_codes(some, report_bytes)[: len(some), :columns]
            values = (codes.t().contiguous() if self.transposed else codes).float()
            if zeros is not None:
                self._spread(values, zeros, some, order, Tensor.sub_)
            self._spread(values, scales, some, order, Tensor.mul_)
            if self.factor != 1:
                values *= self.factor
            place = slice(some.start, some.stop)
            yield ((slice(None), place) if self.transposed else (place,)), values

    def _slices(self) -> Iterator[range]:
        """Ranges of rows of codes: of whole blocks, unless a block is larger than a slice."""
        rows, columns = self.code_shape
        step = max(SLICE_NUMBERS // columns // self.layout.rows, 1) * self.layout.rows
        step = step // (whole := lcm(self.layout.rows, self.block[0])) * whole or step
        for first in range(0, rows, step):
            yield range(first, min(first + step, rows))

    def _read_codes(self, rows: range, report_bytes: ReportBytes) -> Tensor:
        layout, codes = self.layout, self.parts["codes"]
        first = rows.start // layout.rows * layout.stored_rows
        last = -(-rows.stop // layout.rows) * layout.stored_rows
        stored = entry_rows(codes, range(first, last)).read(layout.dtype, CPU, report_bytes)
        return layout.unpack(stored)

    def _spread(
        self,
        values: Tensor,
        grid: Tensor,
        rows: range,
        order: Tensor | None,
        change: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Change float32 `values` of these rows of codes, outputs being rows, by the numbers of a grid."""
        height, width = self.block
        places = torch.arange(rows.start, rows.stop) // height
        if order is not None:
            change(values, grid[:, order[rows.start : rows.stop]] if self.transposed else grid[places][:, order])
            return
        if self.transposed:
            width, found = height, grid[:, int(places[0]) : int(places[-1]) + 1]
            if rows.start % height and found.size(1) > 1:
                change(values, grid[:, places])
                return
        else:
            found = grid[places]
        count = found.size(1)
        if count == 1:
            change(values, found)
        elif values.size(1) == count * width:
            change(values.view(len(values), count, width), found[:, :, None])
        else:
            change(values, found.repeat_interleave(width, 1)[:, : values.size(1)])

    def read_zeros(self, report_bytes: ReportBytes) -> Tensor:
        """Zero points [A, B]."""
        stored = self.parts["zeros"]
        dtype = torch.int32 if stored.kind == "I32" else torch.float32
        return self.unpack_zeros(stored.read(dtype, CPU, report_bytes)).reshape(self.grid).float()

    def read_order(self, report_bytes: ReportBytes = ignore_bytes) -> Tensor:
        """The group of each input. CheckpointError if there is no such group."""
        order = self.read_part("order", report_bytes, torch.int64)
        check_groups(self.parts["order"], order, self.grid[0 if self.transposed else 1])
        return order


def is_reordered(groups: TensorEntry, width: int) -> bool:
    """Whether inputs are in other groups than in those of `width` neighbours. `groups` [K] names the group of each
    input; -1 stands for no other order. CheckpointError if there is no such group.

    They are read while the folder is described, before its memory is estimated, so their number is bounded. The shapes
    of the matrix's other tensors should be compared first.
    """
    (inputs,) = groups.shape
    if inputs > MAX_INPUTS:
        message = f"it names the groups of {inputs} inputs; {MAX_INPUTS} are the most"
        raise CheckpointError(message, file=str(groups.file), tensor=groups.name)
    order = groups.read(torch.int64, CPU)
    if torch.equal(order, torch.arange(inputs) // width) or bool((order == -1).all()):
        return False
    check_groups(groups, order, -(-inputs // width))
    return True


def check_groups(part: TensorEntry, order: Tensor, groups: int) -> None:
    """CheckpointError unless the numbers of `order`, those of `part`, are among so many `groups`."""
    if order.numel() and not 0 <= int(order.min()) <= int(order.max()) < groups:
        message = f"it names group {int(order.min())} or {int(order.max())}, and there are {groups}, counted from 0"
        raise CheckpointError(message, file=str(part.file), tensor=part.name)


def check_part(part: TensorEntry, kinds: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
    """CheckpointError unless the tensor has one of the kinds, and one of the shapes if any is given."""
    if part.kind not in kinds or (shapes and part.shape not in shapes):
        wanted = "floats" if kinds == FLOAT_KINDS else " or ".join(kinds)
        places = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        message = f"{part.kind} of shape {list(part.shape)} should be {wanted}{f' of {places}' if shapes else ''}"
        raise CheckpointError(message, file=str(part.file), tensor=part.name)


def find_part(entries: Mapping[str, TensorEntry], name: str, of: TensorEntry) -> TensorEntry:
    """The entry of that name. CheckpointError if the file lacks it, which the tensor `of` needs."""
    if name not in entries:
        raise CheckpointError(f"{name}, without which it cannot be read, is missing", file=str(of.file), tensor=of.name)
    return entries[name]
