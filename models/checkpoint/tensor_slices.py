"""Reads only the needed share of a tensor.

The translation of a tensor is done on torch's meta device first. If the result is a view of the stored tensor
(transposed, one of three parts, a range), its offset and strides give the rows and columns in the file. Other rows are
not read; of the rows only the needed columns are kept.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..parallel.share import Cut
from .description import Description, NamedPieces
from .row_orders import translate_by_parts
from .tensor_files import PIECE_BYTES, TensorEntry, entry_rows, ignore_bytes


@dataclass(frozen=True)
class EntryReader:
    """Reads tensors as `dtype` on `device`; `report_bytes`: see TensorEntry.read."""

    dtype: torch.dtype
    device: torch.device
    report_bytes: Callable[[int], None] = ignore_bytes

    def __call__(self, entry: TensorEntry) -> Tensor:
        return entry.read(self.dtype, self.device, self.report_bytes)

    def yield_turn(self) -> None:
        """Report a piece of other work."""
        self.report_bytes(0)


@dataclass(frozen=True)
class EntrySlice:
    """Rows of a tensor in a file, and columns if it has two dimensions; `transposed`: the result is transposed."""

    rows: range
    columns: range
    transposed: bool = False

    def read(self, entry: TensorEntry, read: EntryReader) -> Tensor:
        if len(entry.shape) == 1 or len(self.columns) == entry.shape[1]:
            out = read(entry_rows(entry, self.rows))
        else:
            step = max(PIECE_BYTES // (entry.size // entry.shape[0]), 1)
            some = [self.rows[first : first + step] for first in range(0, len(self.rows), step)]
            out = self._read_columns(entry, some, read)
        return out.t() if self.transposed else out

    def _read_columns(self, entry: TensorEntry, some: list[range], read: EntryReader) -> Tensor:
        """Read whole rows, a few at a time, and keep only the needed columns."""
        columns, out = slice(self.columns.start, self.columns.stop), None
        for rows in some:
            part = read(entry_rows(entry, rows))[:, columns]
            out = part.new_empty(len(self.rows), len(self.columns)) if out is None else out
            first = rows.start - self.rows.start
            out[first : first + len(rows)] = part
        assert out is not None
        return out


def read_cut_pieces(
    description: Description, name: str, entry: TensorEntry, cuts: Mapping[str, Cut], read: EntryReader
) -> NamedPieces:
    """The pieces that a tensor becomes, cut. Reads only these pieces where that is possible, otherwise the whole
    tensor."""
    places = locate_pieces(description, name, entry, cuts)
    if places is None:
        return [
            (ours, cuts[ours](piece).clone()) if ours in cuts else (ours, piece)
            for ours, piece in translate_by_parts(description, name, read(entry), read.yield_turn)
        ]
    return [(ours, place.read(entry, read)) for ours, place in places]


def locate_pieces(
    description: Description, name: str, entry: TensorEntry, cuts: Mapping[str, Cut]
) -> list[tuple[str, EntrySlice]] | None:
    """Where the cut pieces lie in the file. None if the tensor must be read whole: it is computed while it is read
    (merged, multiplied by scales), or copied to another layout, or nothing of it is cut."""
    blank = torch.empty(entry.shape, device="meta")
    pieces = description.translate(name, blank)
    if not any(ours in cuts for ours, _ in pieces):
        return None
    found = []
    for ours, piece in pieces:
        if (place := locate_piece(cuts[ours](piece) if ours in cuts else piece, blank, entry)) is None:
            return None
        found.append((ours, place))
    return found


def locate_piece(piece: Tensor, whole: Tensor, entry: TensorEntry) -> EntrySlice | None:
    """Where a piece lies in the file; None if it is not a range of rows and columns."""
    assert entry.encoding is not None
    if type(entry) is not TensorEntry or piece.untyped_storage() is not whole.untyped_storage():
        return None
    if entry.shape[-1] % entry.encoding.items or piece.dim() != whole.dim():
        return None
    first = int(piece.storage_offset())
    if piece.dim() == 1:
        return EntrySlice(range(first, first + len(piece)), range(0)) if entry.encoding.items == 1 else None
    row, column = divmod(first, whole.size(1))
    turned = piece.stride() == (1, whole.size(1))
    if piece.dim() != 2 or not (turned or piece.stride() == whole.stride()):
        return None
    height, width = piece.t().shape if turned else piece.shape
    return EntrySlice(range(row, row + height), range(column, column + width), turned)
