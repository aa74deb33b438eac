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
from .outcome import Failure, attempt, result, settle
from .work_queue import Backlog

GLANCE_S = 1.0  # how often one who waits looks whether a thread must be replaced

T = TypeVar("T")
log = logging.getLogger("polyhead.threads")


@dataclass(frozen=True, slots=True)
class Piece:
    """What is to be done: `what` names it in errors, `source` is what may hang in it.

    It is done for `owner`, and is of `size`, in one unit for all pieces of these threads.
    """

    what: str
    source: Hashable
    owner: str = ""
    size: int = 1


class Work:
    """What a thread is given to do; `began` on `time.monotonic`, 0 before."""

    def __init__(self, function: Callable[[], object], piece: Piece) -> None:
        self.source, self.what, self.began = piece.source, piece.what, 0.0
        self.owner, self.size = piece.owner, piece.size
        self.replaced = False  # another thread has its thread's place
        self.given_up = False
        self._function = partial(attempt, partial(copy_context().run, function))
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[object] = self._loop.create_future()

    def run(self) -> None:
        self.tell(self._function())

    def tell(self, outcome: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nothing awaits the result
            self._loop.call_soon_threadsafe(settle, self.future, outcome)


class Threads:
    """At most `most` at work, besides those that are replaced.  They are daemons: the end of the process does not wait
    for them.  `run` lives on the event loop thread."""

    def __init__(self, most: int, name: str, patience: float, hold: float = math.inf) -> None:
        """`patience` and `hold` in seconds, for one piece of work."""
        self._most, self._name, self._patience, self._hold = most, name, patience, min(hold, patience)
        self._waiting: Backlog[Work] = Backlog()
        self._numbers, self._started = count(), 0
        self._running: set[Work] = set()  # as the next three, used by all threads, under the lock
        self._slow: Counter[Hashable] = Counter()  # by source: pieces whose threads are replaced
        self._given_up: Counter[Hashable] = Counter()  # by source: those of them that nothing awaits any more
        self._held: dict[Hashable, dict[Work, None]] = {}  # by source: what waits for its slow pieces
        self._lock = threading.Lock()

    async def run(self, function: Callable[[], T], piece: Piece) -> T:
        """What `function` returns or raises, on one of the threads, in the caller's context.

        Raises TooComplex where it takes too long, Unavailable where other work of the same source still does.
        """
        work = self.start(function, piece)
        try:
            while not work.future.done():
                await asyncio.wait({work.future}, timeout=GLANCE_S)
                self._replace()
            return result(cast(T | Failure, work.future.result()))
        finally:
            self._waiting.discard(work)
            with self._lock:
                self._held.get(work.source, {}).pop(work, None)

    def start(self, function: Callable[[], object], piece: Piece) -> Work:
        """As `run`, without waiting for it."""
        work = Work(function, piece)
        self._waiting.put(work, piece.owner, piece.size)
        if self._started < self._most:
            self._start()
        return work

    def close(self) -> None:
        """The threads end.  What has not begun never will."""
        with self._lock:
            left = self._waiting.close() + [work for waiting in self._held.values() for work in waiting]
            self._held.clear()
        for work in left:
            work.tell(Failure(Unavailable(f"{work.what} is not begun: the server is shutting down", retry_after=1)))

    def _start(self) -> None:
        self._started += 1
        threading.Thread(target=self._serve, name=f"{self._name}_{next(self._numbers)}", daemon=True).start()

    def _replace(self) -> None:
        """Start threads in the place of those whose work is slow, and give up what takes too long."""
        with self._lock:
            now = time.monotonic()
            replaced = [each for each in self._running if not each.replaced and now - each.began > self._hold]
            for work in replaced:
                work.replaced = True
                self._slow[work.source] += 1
            late = [each for each in self._running if not each.given_up and now - each.began > self._patience]
            refused = list[Work]()
            for work in late:
                work.given_up = True
                self._given_up[work.source] += 1
                refused += self._held.pop(work.source, {})
        for _ in replaced:
            self._started -= 1
            self._start()
        for work in late:
            log.error("%s has not returned for %g s and is left behind", work.what, self._patience)
            settle(work.future, Failure(TooComplex(f"{work.what} has taken longer than {self._patience:g} s")))
        for work in refused:
            work.tell(self._refusal(work))

    def _serve(self) -> None:
        while (work := self._waiting.get()) is not None:
            if not self._do(work):
                return  # another has its place
            del work  # its result is not kept while this thread waits

    def _do(self, work: Work) -> bool:
        """Whether its thread goes on: it was not replaced meanwhile."""
        with self._lock:
            if self._given_up[work.source]:
                work.tell(self._refusal(work))
                return True
            if self._slow[work.source] >= self._most:
                self._held.setdefault(work.source, {})[work] = None
                return True
            work.began = time.monotonic()
            self._running.add(work)
        work.run()
        with self._lock:
            self._running.discard(work)
            self._given_up[work.source] -= work.given_up
            self._slow[work.source] -= work.replaced
            for held in self._held.pop(work.source, {}):
                self._waiting.put(held, held.owner, held.size)
            return not work.replaced

    def _refusal(self, work: Work) -> Failure:
        said = f"{work.what} is not begun: another of the same model has not returned for {self._patience:g} s"
        return Failure(Unavailable(said, retry_after=60))
