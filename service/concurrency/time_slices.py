"""Splits long work on the event loop into slices, so that other tasks run in between."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

S = TypeVar("S")
T = TypeVar("T")
SLICE_SIZE = 128  # texts, prompts or answers handled in one iteration of the event loop, or in one step of the engine
TOKENS_PER_SLICE = 32  # tokens of one answer or prompt that are made text in one iteration of the event loop


TakeTurn = Callable[[], Awaitable[None]]  # lets other tasks run, and returns when the next slice may


async def yield_turn() -> None:
    """Let each other task run once."""
    await asyncio.sleep(0)


class LoopTurns:
    """Turns of the event loop: in each iteration every owner has one slice of its long work, of whichever call waits
    longest.  So an owner's many large calls take no more of the loop than one of them.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by owner

    async def take(self, owner: str) -> None:
        """Return when it is the owner's turn."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._grant)
        self._waiting.setdefault(owner, deque()).append(turn)
        await turn

    def _grant(self) -> None:
        """Give each owner one turn, which it uses in the next iteration of the loop."""
        for owner, turns in list(self._waiting.items()):
            while turns and turns[0].done():  # who waited was cancelled
                turns.popleft()
            if turns:
                turns.popleft().set_result(None)
            if not turns:
                del self._waiting[owner]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._grant)


class LazySequence(Sequence[T]):
    """A sequence of `length` items, each created by `make(index)` every time it is read."""

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._indexes, self._make = range(length), make

    def __len__(self) -> int:
        return len(self._indexes)

    def __getitem__(self, index: Any) -> Any:  # slices are not supported
        return self._make(self._indexes[index])


def map_lazily(function: Callable[[S], T], items: Sequence[S]) -> LazySequence[T]:
    """What `function` returns for each of `items`, called every time it is read."""
    return LazySequence(len(items), lambda index: function(items[index]))


def split_in_slices(items: Sequence[T], size: int = SLICE_SIZE) -> Iterator[Sequence[T]]:
    """`items` in slices of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


async def iterate_in_slices(
    items: Iterable[T], size: int = SLICE_SIZE, take_turn: TakeTurn = yield_turn
) -> AsyncIterator[T]:
    """Iterate over `items`; other tasks of the loop run after every `size` of them."""
    for count, item in enumerate(items):
        if count and not count % size:
            await take_turn()
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
