"""Work whose size a file decides, in parts: a thread that others wait for lets them compute after each."""

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

PART_NUMBERS = 1 << 20  # numbers that are copied or converted between two turns, in a few milliseconds
PART_ITEMS = 1 << 10  # parts of a network that are looked at between two turns

T = TypeVar("T")
YieldTurn = Callable[[], None]  # may let others compute; it is called often


def keep_turn() -> None:
    """The default of `yield_turn`: does nothing."""


def iterate_by_parts(items: Iterable[T], yield_turn: YieldTurn) -> Iterator[T]:
    """The items, of which a network may have very many, with turns for others."""
    for number, item in enumerate(items, 1):
        yield item
        if number % PART_ITEMS == 0:
            yield_turn()


def rows_of_part(tensor: Tensor) -> int:
    """The rows of a part of `tensor`."""
    return max(PART_NUMBERS // max(prod(tensor.shape[1:]), 1), 1)


def copy_by_parts(source: Tensor, out: Tensor, yield_turn: YieldTurn) -> Tensor:
    """Copy `source` to `out`, which has its shape, and return that."""
    rows = rows_of_part(source)
    for some, place in zip(torch.split(source, rows), torch.split(out, rows), strict=True):
        place.copy_(some)
        yield_turn()
    return out


def convert_by_parts(source: Tensor, dtype: torch.dtype, device: torch.device, yield_turn: YieldTurn) -> Tensor:
    """`source` as `dtype` on `device`: itself, or a copy if it has others."""
    if (source.dtype, source.device) == (dtype, device):
        return source
    return copy_by_parts(source, torch.empty(source.shape, dtype=dtype, device=device), yield_turn)


def select_by_parts(source: Tensor, order: Tensor, yield_turn: YieldTurn) -> Tensor:
    """[R, ...] the rows `order` [R] of `source`."""
    out = source.new_empty(len(order), *source.shape[1:])
    rows = rows_of_part(source)
    for some, place in zip(torch.split(order, rows), torch.split(out, rows), strict=True):
        torch.index_select(source, 0, some, out=place)
        yield_turn()
    return out
