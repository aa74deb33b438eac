"""A few threads for work that may never return.

Work that has run for too long is left to its thread, and another thread takes that one's place; so a text on which a
stranger's tokenizer hangs costs a processor and no other model's requests.  Of a source (a model's tokenizer) whose
work has been left so nothing more is begun until it returns.  What waits is taken in the order of `service.backlog`.
"""

import asyncio
import logging
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

from service.backlog import Backlog
from service.errors import PolyheadError, TooComplex, Unavailable
from service.outcome import Failure, attempt, result, settle

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
        self.here = True  # its thread has not been replaced
        self._function = partial(attempt, partial(copy_context().run, function))
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[object] = self._loop.create_future()

    def run(self) -> None:
        self.began = time.monotonic()
        self.tell(self._function())

    def tell(self, outcome: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nothing awaits the result
            self._loop.call_soon_threadsafe(settle, self.future, outcome)


class Threads:
    """At most `most` at work, besides those that are left behind.  They are daemons: the end of the process does not
    wait for them.  `run` lives on the event loop thread."""

    def __init__(self, most: int, name: str, patience: float) -> None:
        """`patience` in seconds, for one piece of work."""
        self._most, self._name, self._patience = most, name, patience
        self._waiting: Backlog[Work] = Backlog()
        self._numbers, self._started = count(), 0
        self._running: set[Work] = set()  # both threads, as the next, under the lock
        self._strays: Counter[Hashable] = Counter()
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

    def start(self, function: Callable[[], object], piece: Piece) -> Work:
        """As `run`, without waiting for it."""
        work = Work(function, piece)
        self._waiting.put(work, piece.owner, piece.size)
        if self._started < self._most:
            self._start()
        return work

    def close(self) -> None:
        """The threads end.  What has not begun never will."""
        for work in self._waiting.close():
            work.tell(Failure(Unavailable(f"{work.what} is not begun: the server is shutting down", retry_after=1)))

    def _start(self) -> None:
        self._started += 1
        threading.Thread(target=self._serve, name=f"{self._name}_{next(self._numbers)}", daemon=True).start()

    def _replace(self) -> None:
        """Leave behind the threads whose work takes too long."""
        now = time.monotonic()
        with self._lock:
            late = [each for each in self._running if each.here and each.began and now - each.began > self._patience]
            for work in late:
                work.here = False
                self._strays[work.source] += 1
        for work in late:
            log.error("%s has not returned for %g s and is left behind", work.what, self._patience)
            settle(work.future, Failure(TooComplex(f"{work.what} has taken longer than {self._patience:g} s")))
            self._started -= 1
            self._start()

    def _serve(self) -> None:
        while (work := self._waiting.get()) is not None:
            if not self._do(work):
                return  # another has its place
            del work  # its result is not kept while this thread waits

    def _do(self, work: Work) -> bool:
        """Whether its thread goes on: it was not replaced meanwhile."""
        with self._lock:
            refused = self._strays[work.source] > 0
            if not refused:
                self._running.add(work)
        if refused:
            work.tell(Failure(self._busy(work)))
            return True
        work.run()
        with self._lock:
            self._running.discard(work)
            if not work.here:
                self._strays[work.source] -= 1
            return work.here

    def _busy(self, work: Work) -> PolyheadError:
        said = f"{work.what} is not begun: another of the same model has not returned for {self._patience:g} s"
        return Unavailable(said, retry_after=60)
