"""Results and errors of functions that run on other threads.

A function may raise anything on another thread, even a library's panic, which is no Exception.  It is caught there and
raised again, as an Exception, where the result is awaited.  So the thread goes on, and every future is resolved.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from ..core.errors import PolyheadError, Unavailable, first_line

RETRY_S = 1  # seconds after which a client may try again where a thread cannot be started

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


@contextmanager
def refusing_threads() -> Iterator[None]:
    """Raise Unavailable where the system starts no thread in the block."""
    try:
        yield
    except RuntimeError as error:  # "can't start new thread"; the interpreter has no other type for it
        raise Unavailable(f"no thread can be started for this now: {error}", retry_after=RETRY_S) from None


def start_thread(function: Callable[[], object], name: str) -> None:
    """Run `function` on a new daemon thread.  Raises Unavailable where it cannot be started."""
    with refusing_threads():
        threading.Thread(target=function, name=name, daemon=True).start()


def submit(pool: Executor, function: Callable[[], T]) -> "Future[T]":
    """Run `function` on a thread of `pool`.  Raises Unavailable where the pool has no thread and can start none; the
    pool may still run it when it has one.
    """
    with refusing_threads():
        return pool.submit(function)


async def run_on_thread(function: Callable[[], T], pool: Executor | None = None) -> T:
    """Run `function` on a thread of `pool`, or of the event loop's pool, in this task's context.

    Returns what it returns, raises what it raises; raises Unavailable where no thread can be started.
    """
    work = partial(attempt, partial(copy_context().run, function))
    with refusing_threads():
        future = asyncio.get_running_loop().run_in_executor(pool, work)
    return unwrap(await future)


async def run_on_daemon_thread(function: Callable[[], T]) -> T:
    """Run `function` on a new daemon thread, which does not delay the end of the process.

    Returns what it returns, raises what it raises; raises Unavailable where the thread cannot be started.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()

    def run() -> None:
        with suppress(RuntimeError):  # the loop is closed, and nothing awaits the result
            loop.call_soon_threadsafe(resolve_future, future, [attempt(function)])

    start_thread(run, "aside")
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
