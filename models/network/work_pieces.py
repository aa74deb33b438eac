"""Computations that are cut into pieces of bounded work, between which the thread can do other work.

The sizes of pieces follow from the shapes of what is computed alone, so the result does not depend on what is done in
between.
"""

from collections.abc import Callable, Generator, Iterator
from itertools import pairwise
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Pieces = Generator[None, None, T]  # it yields between pieces, and returns the result

PIECE_PRODUCTS = 1 << 30  # products of two numbers that are added up in one piece, 20 to 40 ms on two cores
LAYER_PRODUCTS = 1 << 32  # in a piece of a layer of a network: kernels are slower for fewer rows
PIECE_ROWS = 2048  # rows of one piece, whatever they cost: their features exist at the same time
LEAST_ROWS = 16  # fewer rows take about as long as so many
# Rows that attend in one piece of work, at least. Kernels divide rows into blocks, whose size they choose by the number
# of rows: it must stay large, and a multiple of a block.
ATTENDING_ROWS = 1024


def finish(pieces: Pieces[T]) -> T:
    """The result of a computation whose pieces follow each other without a pause."""
    while True:
        try:
            next(pieces)
        except StopIteration as over:
            return over.value  # type: ignore[no-any-return]


def in_turns(pieces: Pieces[T], turn_s: float) -> Iterator[T | None]:
    """The result of a computation, after None for each turn that did not finish it. A turn ends with the piece that is
    computed after `turn_s` seconds."""
    until = perf_counter() + turn_s
    while True:
        try:
            next(pieces)
        except StopIteration as over:
            yield over.value
            return
        if perf_counter() >= until:
            yield None
            until = perf_counter() + turn_s


def rows_per_piece(products: int, piece: int = 0) -> int:
    """How many rows are one piece of work, of `piece` products or PIECE_PRODUCTS, if each takes so many `products`: a
    power of two, for which kernels are fastest."""
    rows = max((piece or PIECE_PRODUCTS) // max(products, 1), LEAST_ROWS)
    return min(1 << (rows.bit_length() - 1), PIECE_ROWS)


def split_range(count: int, size: int) -> list[tuple[int, int]]:
    """The first number and the end of ranges of `size` of `count` numbers; the last is up to twice as long, since
    kernels add in another order for very few rows."""
    borders = [0, *range(size, count - size + 1, size), count] if size < count else [0, count]
    return list(pairwise(borders))


def map_ranges(function: Callable[[int, int], Tensor], count: int, size: int) -> Pieces[Tensor]:
    """`function` of the borders of ranges of `size` of `count` rows, to which it gives [M, ...] each: [count, ...]."""
    out = None
    for start, end in split_range(count, size):
        part = function(start, end)
        yield
        if end - start == count:
            return part
        out = part.new_empty(count, *part.shape[1:]) if out is None else out
        out[start:end] = part
    assert out is not None, "there is a range, if only an empty one"
    return out


def map_rows(function: Callable[[Tensor], Tensor], rows: Tensor, products: int) -> Pieces[Tensor]:
    """`function` of rows [N, I], to which it gives [N, O], each row on its own; a row takes so many `products`."""
    parts = list[Tensor]()
    for some in torch.split(rows, rows_per_piece(products)):
        parts.append(function(some))
        yield
    return parts[0] if len(parts) == 1 else torch.cat(parts)
