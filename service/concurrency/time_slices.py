"""Long work on the event loop in slices: after each of them others get a turn; and long lists made item by item."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")
SLICE_SIZE = 128  # texts, prompts or answers that are handled in one turn of the event loop, or in one of the engine
TOKENS_PER_SLICE = 32  # tokens of one answer, or of one prompt, that are made text in one turn of the event loop


class LazySequence(Sequence[T]):
    """A list of `length` items, each made by `make(index)` every time it is read: none of them is kept."""

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._indexes, self._make = range(length), make

    def __len__(self) -> int:
        return len(self._indexes)

    def __getitem__(self, index: Any) -> Any:  # no slices
        return self._make(self._indexes[index])


def split_in_slices(items: Sequence[T], size: int = SLICE_SIZE) -> Iterator[Sequence[T]]:
    """`items` in slices of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


async def iterate_in_slices(items: Iterable[T], size: int = SLICE_SIZE) -> AsyncIterator[T]:
    """`items`; others get a turn after every `size` of them."""
    for count, item in enumerate(items):
        if count and not count % size:
            await asyncio.sleep(0)
        yield item


def call_in_slices(function: Callable[[T], object], items: Iterable[T], size: int = SLICE_SIZE) -> None:
    """Call `function` with each of `items`: with the first `size` at once, with the others in later turns of the loop.

    Nothing is awaited, so nothing is left out when the caller is cancelled.
    """
    left = iter(items)

    def turn() -> None:
        some = list(islice(left, size))
        for item in some:
            function(item)
        if len(some) == size:
            asyncio.get_running_loop().call_soon(turn)

    turn()
