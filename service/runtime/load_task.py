"""One load of a model: its current stage, its time limit, and its cancellation.

A load works on threads, which cannot be interrupted. When it is ended by its deadline or by an administrator, the
waiting coroutine is cancelled. A thread that belongs to the load alone is abandoned. The engine's thread, which other
models share, checks between two parts of the work whether to stop. The load waits for it, since memory that it uses
must not be released before.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from ..core.errors import Cancelled, Expired, PolyheadError
from ..engine.engine import Engine

GRACE_S = 5.0  # for the engine's thread to reach the next part of the work, before the load ends without it
WAITING_STAGE = "was waiting for its turn"
DOWNLOAD_STAGE = "was being downloaded"

T = TypeVar("T")
log = logging.getLogger("polyhead.loading")


class LoadTask:
    """Used on the event loop thread; `check` may be called on any thread.

    `seconds` is the limit of all calls of `run` together; 0: no limit. `stage` is a phrase such as "was being
    described", and `fraction` the share of the files that is downloaded, or of the weights that is read. The
    thread that does the work writes both.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.stage, self.fraction = name, WAITING_STAGE, 0.0
        self._stage_after_download = self.stage
        self.is_running, self.finished = False, asyncio.Event()  # the code that began the load sets the event
        self._seconds, self._seconds_left = seconds, seconds or math.inf
        self._error: PolyheadError | None = None  # the reason it was ended
        self._end_requested = asyncio.Event()

    @property
    def is_downloading(self) -> bool:
        return self.stage == DOWNLOAD_STAGE

    def record_download(self, done: int, total: int) -> None:
        """Record the bytes that are downloaded so far, and in all; raise the error that ended the load, if it was
        ended. Called on the threads that download.
        """
        self.check()
        if not self.is_downloading:
            self._stage_after_download = self.stage
        is_whole = done >= total
        self.stage, self.fraction = (self._stage_after_download, 0.0) if is_whole else (DOWNLOAD_STAGE, done / total)

    def check(self) -> None:
        """Raise the error that ended the load, if it was ended. Called between two parts of its work."""
        if self._error is not None:
            raise type(self._error)(self._error.message)

    def cancel(self) -> None:
        """End the load. A second call has no effect."""
        if self._error is None:
            self._end(Cancelled(f"the load of {self.name} was cancelled while it {self.stage}"))

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns, or raise its error. Raises Cancelled or Expired if the load is ended before."""
        if self._error is not None:
            work.close()
            self.check()
        began, self.is_running = time.monotonic(), True
        task, ending = asyncio.create_task(work), asyncio.create_task(self._end_requested.wait())
        task.add_done_callback(retrieve_outcome)
        try:
            timeout = self._seconds_left if self._seconds_left < math.inf else None
            await asyncio.wait({task, ending}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._error is None:
                self._end(self._timeout_error())
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE_S)
            if not task.done():
                log.error("the load of %s has ended, and the engine's thread is still busy with it", self.name)
            self.check()
            raise AssertionError("a load was ended without a reason")
        except asyncio.CancelledError:
            self.cancel()
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            ending.cancel()
            self.is_running = False
            self._seconds_left -= time.monotonic() - began

    async def on_engine(
        self, engine: Engine, function: Callable[[], T], undo: Callable[[T], object] = lambda _: None
    ) -> T:
        """Call `function` on the engine's thread and return its result. If the load is ended meanwhile, wait until the
        thread has finished the call, and pass its result to `undo` there.
        """

        def check_and_call() -> T:
            self.check()
            return function()

        call = asyncio.create_task(engine.call(check_and_call))
        call.add_done_callback(retrieve_outcome)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait({call})
            if not call.cancelled() and call.exception() is None:
                await engine.call(partial(undo, call.result()))
            raise

    def _end(self, error: PolyheadError) -> None:
        self._error = error
        self._end_requested.set()

    def _timeout_error(self) -> PolyheadError:
        limit = f"load_seconds, which is {self._seconds:g}"
        return Expired(f"the load of {self.name} has taken longer than {limit}: it {self.stage}; raise it, or see why")


def retrieve_outcome(task: asyncio.Task[Any]) -> None:
    """Read the task's outcome, which the caller may not need any more: asyncio warns of an exception that is never
    read.
    """
    if not task.cancelled():
        task.exception()
