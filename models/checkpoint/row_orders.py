"""Matrices whose rows are put in another order when they are renamed, as the queries of many GGUF files: of a large one
they are copied in parts, with turns for others.

What a family does to a tensor is a function of its own. Where the rows go is found by giving it a small matrix of
numbered rows.
"""

from functools import partial

import torch
from torch import Tensor

from ..core.turns import PART_NUMBERS, YieldTurn, select_by_parts
from .description import Description, NamedPieces

PROBE_COLUMNS = 7  # of the matrix of numbered rows: a prime, so that no columns are taken for those of several heads


def translate_by_parts(description: Description, name: str, tensor: Tensor, yield_turn: YieldTurn) -> NamedPieces:
    """As `description.translate`. A copy of reordered rows is made in parts, with `yield_turn` after each."""
    translate = partial(description.translate, name)
    if tensor.numel() <= PART_NUMBERS or tensor.dim() != 2:
        return translate(tensor)
    whole = torch.empty(tensor.shape, device="meta")
    shapes = translate(whole)
    if all(piece.untyped_storage() is whole.untyped_storage() for _, piece in shapes):  # nothing is copied
        return translate(tensor)
    orders = find_row_orders(description, name, shapes, tensor.shape)
    if orders is None:
        return translate(tensor)
    return [(ours, select_by_parts(tensor, orders[ours], yield_turn)) for ours, _ in shapes]


def find_row_orders(
    description: Description, name: str, shapes: NamedPieces, shape: torch.Size
) -> dict[str, Tensor] | None:
    """For each piece that a matrix [N, K] becomes, the numbers of its rows [R] in the matrix. None if a piece is
    anything else than some of the rows. `shapes` are the pieces on the meta device."""
    count, columns = shape
    numbers = torch.arange(count * PROBE_COLUMNS).view(count, PROBE_COLUMNS) + 1  # 0 would be like padding
    try:
        pieces = description.translate(name, numbers)
    except (RuntimeError, ValueError, IndexError):  # columns are divided, too
        return None
    orders = dict[str, Tensor]()
    for (ours, piece), (_, wanted) in zip(pieces, shapes, strict=True):
        if piece.dtype != numbers.dtype or piece.shape[1:] != (PROBE_COLUMNS,) or wanted.shape != (len(piece), columns):
            return None
        rows = (piece[:, 0] - 1) // PROBE_COLUMNS
        if not bool(((rows >= 0) & (rows < count)).all()) or not torch.equal(numbers[rows], piece):
            return None
        orders[ours] = rows
    return orders
