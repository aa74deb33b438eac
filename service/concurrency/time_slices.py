"""Splits long work on the event loop into slices, so that other tasks run in between."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")
SLICE_SIZE = 128  # texts, prompts or answers handled in one iteration of the event loop, or in one step of the engine
TOKENS_PER_SLICE = 32  # tokens of one answer or prompt that are made text in one iteration of the event loop


class LazySequence(Sequence[T]):
    """A sequence of `length` items, each created by `make(index)` every time it is read."""

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._indexes, self._make = range(length), make

    def __len__(self) -> int:
        return len(self._indexes)

    def __getitem__(self, index: Any) -> Any:  # slices are not supported
        return self._make(self._indexes[index])


def split_in_slices(items: Sequence[T], size: int = SLICE_SIZE) -> Iterator[Sequence[T]]:
    """`items` in slices of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


async def iterate_in_slices(items: Iterable[T], size: int = SLICE_SIZE) -> AsyncIterator[T]:
    """Iterate over `items`; other tasks of the loop run after every `size` of them."""
    for count, item in enumerate(items):
        if count and not count % size:
            await asyncio.sleep(0)
        yield item


def call_in_slices(function: Callable[[T], object], items: Iterable[T], size: int = SLICE_SIZE) -> None:
    """Call `function` with each of `items`: the first `size` at once, the others in later iterations of the loop.

    Nothing is awaited, so all calls happen even if the caller is cancelled.
    """
    left = iter(items)

    def turn() -> None:
        some = list(islice(left, size))
        for item in some:
            function(item)
        if len(some) == size:
            asyncio.get_running_loop().call_soon(turn)

    turn()
