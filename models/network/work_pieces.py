"""Computations that are cut into pieces of bounded work, between which the thread can do other work.

The sizes of pieces follow from the shapes of what is computed alone, so the result does not depend on what is done in
between.
"""

from collections.abc import Callable, Generator, Iterator
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Pieces = Generator[None, None, T]  # it yields between pieces, and returns the result

PIECE_PRODUCTS = 1 << 30  # products of two numbers that are added up in one piece, 20 to 40 ms on two cores
PIECE_ROWS = 2048  # rows of one piece, whatever they cost: their features exist at the same time
LEAST_ROWS = 16  # fewer rows take about as long as so many


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


def rows_per_piece(products: int) -> int:
    """How many rows are one piece of work, if each takes so many products: a power of two, for which kernels are
    fastest."""
    rows = max(PIECE_PRODUCTS // max(products, 1), LEAST_ROWS)
    return min(1 << (rows.bit_length() - 1), PIECE_ROWS)


def map_rows(function: Callable[[Tensor], Tensor], rows: Tensor, products: int) -> Pieces[Tensor]:
    """`function` of rows [N, I], to which it gives [N, O], each row on its own; a row takes so many `products`."""
    parts = list[Tensor]()
    for some in torch.split(rows, rows_per_piece(products)):
        parts.append(function(some))
        yield
    return parts[0] if len(parts) == 1 else torch.cat(parts)
