"""A few threads for work that may be slow or never return.

Work that runs for longer than `hold` seconds keeps its thread, and another thread takes that one's place; so a text on
which a stranger's tokenizer is slow costs a processor and no other model's requests.  One source (a model's tokenizer)
has at most as many slow pieces as there are threads: its further pieces wait for them.  Work that runs for longer than
`patience` seconds is given up, and of its source nothing more is begun until it returns.  What waits is taken in the
order of `service.concurrency.work_queue`.
"""

import asyncio
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeVar, cast

from ..core.errors import TooComplex, Unavailable
from .outcome import Failure, attempt, resolve_future, unwrap
from .work_queue import WorkQueue

CHECK_INTERVAL_S = 1.0  # how often one who waits looks whether a thread must be replaced

T = TypeVar("T")
log = logging.getLogger("polyhead.threads")


@dataclass(frozen=True, slots=True)
class WorkInfo:
    """What is to be done: `what` names it in errors, `source` is what may hang in it.

    It is done for `owner`, and is of `size`, in one unit for all pieces of these threads.
    """

    label: str
    source: Hashable
    owner: str = ""
    size: int = 1


class WorkItem:
    """What a thread is given to do; `began` on `time.monotonic`, 0 before."""

    def __init__(self, function: Callable[[], object], piece: WorkInfo) -> None:
        self.source, self.label, self.started_at = piece.source, piece.label, 0.0
        self.owner, self.size = piece.owner, piece.size
        self.replaced = False  # another thread has its thread's place
        self.abandoned = False
        self._function = partial(attempt, partial(copy_context().run, function))
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[object] = self._loop.create_future()

    def run(self) -> None:
        self.resolve(self._function())

    def resolve(self, outcome: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nothing awaits the result
            self._loop.call_soon_threadsafe(resolve_future, self.future, outcome)


class ThreadPool:
    """At most `most` at work, besides those that are replaced.  They are daemons: the end of the process does not wait
    for them.  `run` lives on the event loop thread."""

    def __init__(self, most: int, name: str, patience: float, hold: float = math.inf) -> None:
        """`patience` and `hold` in seconds, for one piece of work."""
        self._max_threads, self._name, self._abandon_after, self._replace_after = (
            most,
            name,
            patience,
            min(hold, patience),
        )
        self._waiting: WorkQueue[WorkItem] = WorkQueue()
        self._thread_numbers, self._thread_count = count(), 0
        self._running: set[WorkItem] = set()  # as the next three, used by all threads, under the lock
        self._slow: Counter[Hashable] = Counter()  # by source: pieces whose threads are replaced
        self._abandoned: Counter[Hashable] = Counter()  # by source: those of them that nothing awaits any more
        self._blocked: dict[Hashable, dict[WorkItem, None]] = {}  # by source: what waits for its slow pieces
        self._lock = threading.Lock()

    async def run(self, function: Callable[[], T], piece: WorkInfo) -> T:
        """What `function` returns or raises, on one of the threads, in the caller's context.

        Raises TooComplex where it takes too long, Unavailable where other work of the same source still does.
        """
        work = self.start(function, piece)
        try:
            while not work.future.done():
                await asyncio.wait({work.future}, timeout=CHECK_INTERVAL_S)
                self._replace_slow_threads()
            return unwrap(cast(T | Failure, work.future.result()))
        finally:
            self._waiting.discard(work)
            with self._lock:
                self._blocked.get(work.source, {}).pop(work, None)

    def start(self, function: Callable[[], object], piece: WorkInfo) -> WorkItem:
        """As `run`, without waiting for it."""
        work = WorkItem(function, piece)
        self._waiting.put(work, piece.owner, piece.size)
        if self._thread_count < self._max_threads:
            self._start_thread()
        return work

    def close(self) -> None:
        """The threads end.  What has not begun never will."""
        with self._lock:
            left = self._waiting.close() + [work for waiting in self._blocked.values() for work in waiting]
            self._blocked.clear()
        for work in left:
            work.resolve(Failure(Unavailable(f"{work.label} is not begun: the server is shutting down", retry_after=1)))

    def _start_thread(self) -> None:
        self._thread_count += 1
        threading.Thread(target=self._work_loop, name=f"{self._name}_{next(self._thread_numbers)}", daemon=True).start()

    def _replace_slow_threads(self) -> None:
        """Start threads in the place of those whose work is slow, and give up what takes too long."""
        with self._lock:
            now = time.monotonic()
            replaced = [
                each for each in self._running if not each.replaced and now - each.started_at > self._replace_after
            ]
            for work in replaced:
                work.replaced = True
                self._slow[work.source] += 1
            late = [
                each for each in self._running if not each.abandoned and now - each.started_at > self._abandon_after
            ]
            refused = list[WorkItem]()
            for work in late:
                work.abandoned = True
                self._abandoned[work.source] += 1
                refused += self._blocked.pop(work.source, {})
        for _ in replaced:
            self._thread_count -= 1
            self._start_thread()
        for work in late:
            log.error("%s has not returned for %g s and is left behind", work.label, self._abandon_after)
            resolve_future(
                work.future, Failure(TooComplex(f"{work.label} has taken longer than {self._abandon_after:g} s"))
            )
        for work in refused:
            work.resolve(self._refusal(work))

    def _work_loop(self) -> None:
        while (work := self._waiting.get()) is not None:
            if not self._run_work(work):
                return  # another has its place
            del work  # its result is not kept while this thread waits

    def _run_work(self, work: WorkItem) -> bool:
        """Whether its thread goes on: it was not replaced meanwhile."""
        with self._lock:
            if self._abandoned[work.source]:
                work.resolve(self._refusal(work))
                return True
            if self._slow[work.source] >= self._max_threads:
                self._blocked.setdefault(work.source, {})[work] = None
                return True
            work.started_at = time.monotonic()
            self._running.add(work)
        work.run()
        with self._lock:
            self._running.discard(work)
            self._abandoned[work.source] -= work.abandoned
            self._slow[work.source] -= work.replaced
            for held in self._blocked.pop(work.source, {}):
                self._waiting.put(held, held.owner, held.size)
            return not work.replaced

    def _refusal(self, work: WorkItem) -> Failure:
        said = f"{work.label} is not begun: another of the same model has not returned for {self._abandon_after:g} s"
        return Failure(Unavailable(said, retry_after=60))
