"""Results and errors of functions that run on other threads.

A function may raise anything on another thread, even a library's panic, which is no Exception.  It is caught there and
raised again, as an Exception, where the result is awaited.  So the thread goes on, and every future is resolved.
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
    """What a function raised, to be raised again on another thread."""

    error: Exception


def attempt(function: Callable[[], T]) -> T | Failure:
    """Call `function`; return its result, or a Failure if it raises.

    This is the broad except of the server: a function given to a thread may fail, and the thread must go on.  An
    interrupt of the main thread is raised, because it ends the process.
    """
    try:
        return function()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit) and threading.current_thread() is threading.main_thread():
            raise
        return Failure(error if isinstance(error, Exception) else as_exception(error))


def as_exception(error: BaseException) -> PolyheadError:
    """An Exception for an error that is none; its traceback is logged."""
    log.critical("a thread raised an error that is no Exception: a library has failed", exc_info=error)
    return PolyheadError(f"a library failed: {type(error).__name__}: {first_line(error)}")


def unwrap(outcome: T | Failure) -> T:
    """The result; raises the error of a Failure."""
    if isinstance(outcome, Failure):
        try:
            raise outcome.error
        finally:
            del outcome  # it holds the error, whose traceback holds this frame: such a cycle keeps all that was read
    return outcome


def resolve_future(future: asyncio.Future[object], outcome: object) -> None:
    if not future.done():
        future.set_result(outcome)


async def run_on_thread(function: Callable[[], T], pool: Executor | None = None) -> T:
    """Run `function` on a thread of `pool`, or of the event loop's pool, in this task's context.

    Returns what it returns, raises what it raises.
    """
    work = partial(attempt, partial(copy_context().run, function))
    return unwrap(await asyncio.get_running_loop().run_in_executor(pool, work))


async def run_on_daemon_thread(function: Callable[[], T]) -> T:
    """Run `function` on a new daemon thread, which does not delay the end of the process.

    Returns what it returns, raises what it raises.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()

    def run() -> None:
        with suppress(RuntimeError):  # the loop is closed, and nothing awaits the result
            loop.call_soon_threadsafe(resolve_future, future, [attempt(function)])

    threading.Thread(target=run, name="aside", daemon=True).start()
    return unwrap(cast(list[T | Failure], await future).pop())  # so the future does not hold a Failure: see `unwrap`


async def wait_for_error(work: Coroutine[Any, Any, None]) -> BaseException | None:
    """Await `work`; return what it raised: an Exception, or what ends this task or the process; None if it raised
    nothing.
    """
    outcomes: Sequence[BaseException | None] = await asyncio.gather(work, return_exceptions=True)
    outcome = outcomes[0]
    ends = isinstance(outcome, Exception | asyncio.CancelledError | KeyboardInterrupt | SystemExit)
    return outcome if outcome is None or ends else as_exception(outcome)


async def cancel_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel `tasks` and wait until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
