"""What a function came to, carried from one thread to another.

A function that runs on another thread may raise anything, a library's panic included, which is no Exception.  It is
caught on that thread and raised again, as an Exception, where its result is awaited.  So the thread goes on, and every
future is resolved.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from ..core.errors import PolyheadError, first_line

T = TypeVar("T")
log = logging.getLogger("polyhead.outcome")


@dataclass(frozen=True, slots=True)
class Failure:
    """What a function raised, carried to another thread."""

    error: Exception


def attempt(function: Callable[[], T]) -> T | Failure:
    """What `function` returns, or that it failed.  The one broad except: what a thread is given to do may fail, and the
    thread goes on.  What ends the process, an interrupt of the main thread, is no failure."""
    try:
        return function()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit) and threading.current_thread() is threading.main_thread():
            raise
        return Failure(error if isinstance(error, Exception) else as_exception(error))


def as_exception(error: BaseException) -> PolyheadError:
    """An error that is no Exception as one that is; its traceback goes to the log."""
    log.critical("a thread raised what is no Exception: a library has failed", exc_info=error)
    return PolyheadError(f"a library failed: {type(error).__name__}: {first_line(error)}")


def unwrap(outcome: T | Failure) -> T:
    """What was returned; raises what was raised."""
    if isinstance(outcome, Failure):
        raise outcome.error
    return outcome


def resolve_future(future: asyncio.Future[object], outcome: object) -> None:
    if not future.done():
        future.set_result(outcome)


async def run_on_thread(function: Callable[[], T], pool: Executor | None = None) -> T:
    """What `function` returns or raises, on a thread of `pool`, or of the event loop's own.

    It has this task's context.
    """
    work = partial(attempt, partial(copy_context().run, function))
    return unwrap(await asyncio.get_running_loop().run_in_executor(pool, work))


async def run_on_daemon_thread(function: Callable[[], T]) -> T:
    """What `function` returns or raises, on a daemon thread of its own: the end of the process does not wait for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()

    def run() -> None:
        outcome = attempt(function)
        with suppress(RuntimeError):  # the loop is closed, and nothing awaits the result
            loop.call_soon_threadsafe(resolve_future, future, outcome)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return unwrap(cast(T | Failure, await future))


async def wait_for_error(work: Coroutine[Any, Any, None]) -> BaseException | None:
    """What it raised: an Exception, or what ends this task or the process."""
    outcomes: Sequence[BaseException | None] = await asyncio.gather(work, return_exceptions=True)
    outcome = outcomes[0]
    ends = isinstance(outcome, Exception | asyncio.CancelledError | KeyboardInterrupt | SystemExit)
    return outcome if outcome is None or ends else as_exception(outcome)
