"""What a function came to, carried from one thread to another."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """What a function raised, carried to another thread."""

    error: Exception


def attempt(function: Callable[[], T]) -> T | Failure:
    """The one broad except: what the engine thread is given to do may fail, and the thread goes on."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001
        return Failure(error)


def settle(future: asyncio.Future[object], outcome: object) -> None:
    if not future.done():
        future.set_result(outcome)
