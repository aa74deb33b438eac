"""A pool of a few threads for work that may be slow or may never return.

Work that runs for longer than `replace_after` seconds keeps its thread, and the pool starts another thread in its
place.  So a text on which a user's tokenizer is slow costs a processor, but does not delay other models.  An owner with
slow work of one source (the tokenizer of a model) has at most as many pieces of it under way as there are threads;
further ones wait for them, and a thread is left to other owners.  Work that runs for longer than `abandon_after`
seconds is abandoned, and no more work of its owner and source is started until it returns.  The order of waiting work
is that of `service.concurrency.work_queue`.
"""

import asyncio
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import TypeVar, cast

from ..core.errors import TooComplex, Unavailable
from .outcome import Failure, attempt, resolve_future, start_thread, unwrap
from .work_queue import WorkQueue

CHECK_INTERVAL_S = 1.0  # how often a waiting caller checks whether a thread must be replaced

T = TypeVar("T")
log = logging.getLogger("polyhead.threads")


@dataclass(frozen=True, slots=True)
class WorkInfo:
    """A description of work: `label` names it in errors, `source` is the object that may hang.

    It is done for `owner` and has a `size`, in one unit for all work of a pool.
    """

    label: str
    source: Hashable
    owner: str = ""
    size: int = 1


@dataclass(frozen=True, slots=True)
class OwnerThreads:
    """The threads of `pool` for work of one owner: `label`, `source` and `owner` are those of a `WorkInfo`."""

    pool: "ThreadPool"
    label: str
    source: Hashable
    owner: str

    async def run(self, size: int, function: Callable[[], T]) -> T:
        """`ThreadPool.run`; `size` in the unit of the pool."""
        return await self.pool.run(function, WorkInfo(self.label, self.source, self.owner, max(size, 1)))


class WorkItem:
    """Work to be run on a thread; `started_at` on `time.monotonic`, 0 before."""

    def __init__(self, function: Callable[[], object], piece: WorkInfo) -> None:
        self.source, self.label, self.started_at = piece.source, piece.label, 0.0
        self.owner, self.size = piece.owner, piece.size
        self.replaced = False  # another thread was started in place of its thread
        self.abandoned = False
        self._function = partial(attempt, partial(copy_context().run, function))
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[object] = self._loop.create_future()

    def run(self) -> None:
        self.resolve(self._function())

    def resolve(self, outcome: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nothing awaits the result
            self._loop.call_soon_threadsafe(resolve_future, self.future, [outcome])


class ThreadPool:
    """At most `max_threads` working threads, not counting those that were replaced.

    The threads are daemons and do not delay the end of the process.  `run` is called on the event loop thread.  Where
    the system starts no more threads, work waits for those that there are.
    """

    def __init__(
        self,
        max_threads: int,
        name: str,
        abandon_after: float,
        replace_after: float = math.inf,
        per_owner: float = math.inf,
    ) -> None:
        """`abandon_after` and `replace_after` in seconds, for one piece of work.  At most `per_owner` pieces of an
        owner's work run at a time.
        """
        self._max_threads, self._name, self._abandon_after, self._replace_after = (
            max_threads,
            name,
            abandon_after,
            min(replace_after, abandon_after),
        )
        self._waiting: WorkQueue[WorkItem] = WorkQueue(per_owner)
        self._thread_numbers, self._thread_count = count(), 0
        self._running: set[WorkItem] = set()  # this and the next one are used by all threads, under the lock
        # By source and owner: work that waits for their slow work.
        self._blocked: dict[tuple[Hashable, str], dict[WorkItem, None]] = {}
        self._lock = threading.Lock()

    async def run(self, function: Callable[[], T], piece: WorkInfo) -> T:
        """Run `function` on a thread of the pool, in the caller's context.  Returns what it returns, raises what it
        raises.

        Raises TooComplex where it takes too long, Unavailable where other work of the same source and owner does, or
        where the pool has no thread and none can be started.
        """
        work = self.start(function, piece)
        try:
            while not work.future.done():
                await asyncio.wait({work.future}, timeout=CHECK_INTERVAL_S)
                self._replace_slow_threads()
            # The future does not hold a Failure: the traceback of its error holds the frames that hold the future.
            return unwrap(cast(list[T | Failure], work.future.result()).pop())
        finally:
            with self._lock:  # from where it may be queued again first
                self._blocked.get((work.source, work.owner), {}).pop(work, None)
                self._waiting.discard(work)
                self._release_blocked(work.source)

    def start(self, function: Callable[[], object], piece: WorkInfo) -> WorkItem:
        """Queue `function` like `run`, without waiting for it.  Raises Unavailable where nothing would begin it."""
        if self._thread_count < self._max_threads:
            try:
                self._start_thread()
                self._thread_count += 1
            except Unavailable:
                if self._thread_count == 0:
                    raise
        work = WorkItem(function, piece)
        self._waiting.put(work, piece.owner, piece.size)
        return work

    def close(self) -> None:
        """End the threads.  Work that was not started fails with Unavailable."""
        with self._lock:
            left = self._waiting.close() + [work for waiting in self._blocked.values() for work in waiting]
            self._blocked.clear()
        for work in left:
            work.resolve(Failure(Unavailable(f"{work.label} is not begun: the server is shutting down", retry_after=1)))

    def _start_thread(self) -> None:
        """Start a thread, which the caller counts.  Raises Unavailable."""
        start_thread(self._work_loop, f"{self._name}_{next(self._thread_numbers)}")

    def _replace_slow_threads(self) -> None:
        """Start threads in place of those with slow work, and abandon work that takes too long."""
        with self._lock:
            now = time.monotonic()
            slow = [each for each in self._running if not each.replaced and now - each.started_at > self._replace_after]
            with suppress(Unavailable):  # its thread goes on after the slow work, unless a later attempt succeeds
                for work in slow:
                    self._start_thread()
                    work.replaced = True
            late = [
                each for each in self._running if not each.abandoned and now - each.started_at > self._abandon_after
            ]
            unstarted = list[WorkItem]()
            for work in late:
                work.abandoned = True
                unstarted += self._blocked.pop((work.source, work.owner), {})
        for work in late:
            log.error("%s has not returned for %g s and is left behind", work.label, self._abandon_after)
            refusal = Failure(TooComplex(f"{work.label} has taken longer than {self._abandon_after:g} s"))
            resolve_future(work.future, [refusal])
        for work in unstarted:
            work.resolve(self._refusal(work))

    def _work_loop(self) -> None:
        while (work := self._waiting.get()) is not None:
            goes_on = self._run_work(work)
            self._waiting.end(work.owner)
            if not goes_on:
                return  # another thread was started in its place
            del work  # its result is not kept while this thread waits

    def _run_work(self, work: WorkItem) -> bool:
        """Run `work`.  Returns whether the thread goes on: False if it was replaced meanwhile."""
        with self._lock:
            if any(each.abandoned for each in self._list_running(work.source, work.owner)):
                work.resolve(self._refusal(work))
                return True
            if self._count_places(work.source, work.owner) <= 0:
                self._blocked.setdefault((work.source, work.owner), {})[work] = None
                return True
            work.started_at = time.monotonic()
            self._running.add(work)
        work.run()
        with self._lock:
            self._running.discard(work)
            self._release_blocked(work.source)
            return not work.replaced

    def _count_places(self, source: Hashable, owner: str) -> int:
        """How many more pieces of the owner's work of this source may begin now.  The caller has the lock."""
        own = self._list_running(source, owner)
        return self._max_threads - len(own) if any(each.replaced for each in own) else sys.maxsize

    def _list_running(self, source: Hashable, owner: str) -> list[WorkItem]:
        return [each for each in self._running if (each.source, each.owner) == (source, owner)]

    def _release_blocked(self, source: Hashable) -> None:
        """Queue the blocked work of this source that may begin now.  The caller has the lock."""
        for its_source, owner in [key for key in self._blocked if key[0] == source]:
            blocked = self._blocked[its_source, owner]
            for work in list(islice(blocked, max(self._count_places(source, owner), 0))):
                del blocked[work]
                self._waiting.put(work, owner, work.size)
            if not blocked:
                del self._blocked[its_source, owner]

    def _refusal(self, work: WorkItem) -> Failure:
        message = f"{work.label} is not begun: another of the same model has not returned for {self._abandon_after:g} s"
        return Failure(Unavailable(message, retry_after=60))
