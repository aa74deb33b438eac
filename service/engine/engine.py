"""The engine: one thread that owns the arithmetic of one device.

Knows workers, not what they compute, and no HTTP.  The one idea: the event loop and the engine thread share nothing but
an inbox of functions, run between steps in the order they were sent, and one `call_soon_threadsafe` a step that brings
everything back.  Attributes belong to one of the two threads, as noted below; idle means asleep.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeVar, cast

import torch

from service.engine.stream import Link, Stream
from service.engine.turns import Turns
from service.engine.worker import Answer, Ended, Observer, Step, Worker
from service.errors import NotFound, PolyheadError, Stopped, Unavailable
from service.request import Failed, Request

__all__ = ["Engine", "Stream"]

T = TypeVar("T")
log = logging.getLogger(__name__)
JOIN_S = 30.0  # how long a last step, or a load, may take after the draining


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


class Engine:
    """Takes requests on the event loop thread, computes on its own, answers on the event loop thread.

    `threads` is how many threads one operation may use; 0 leaves that to torch.
    """

    def __init__(self, observer: Observer, *, name: str = "cpu", threads: int = 0) -> None:
        self.steps = 0
        self._observer, self._threads = observer, threads
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._inbox: deque[Callable[[], None]] = deque()  # both threads
        self._wake = threading.Event()
        self._stopping = False  # loop thread writes
        self._resting = False  # engine thread writes
        self._turns = Turns()  # engine thread, as the next
        self._stirred: set[Worker] = set()  # to be checked before resting
        self._workers: dict[str, tuple[Worker, Link]] = {}  # loop thread, as all that follow
        self._streams: dict[Stream, Worker] = {}  # open ones
        self._quiet = asyncio.Event()  # no open ones
        self._quiet.set()
        self._calls: set[asyncio.Future[object]] = set()
        self._closing = self._gone = False

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive() and not self._gone

    @property
    def idle(self) -> bool:
        """Whether it sleeps, with nothing to do."""
        return self._resting and not self._inbox

    def start(self) -> None:
        """To be called where answers are wanted: in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def call(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises, run on the engine thread between two steps."""
        self._refuse()
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._calls.add(future)
        self._send(lambda: self._post(partial(settle, future, attempt(function))))
        try:
            outcome = await future
        finally:
            self._calls.discard(future)
        if isinstance(outcome, Failure):
            raise outcome.error
        return cast(T, outcome)

    def add(self, model_name: str, worker: Worker) -> None:
        assert model_name not in self._workers, f"{model_name!r} has a worker already"
        link = Link(model_name, worker.task, self._ended, lambda stream: self._send(partial(worker.abort, stream)))
        self._workers[model_name] = worker, link
        self._send(partial(self._turns.add, worker))

    def remove(self, model_name: str) -> None:
        """Let go of a worker; its requests fail."""
        worker, _ = self._workers.pop(model_name)
        self._send(partial(self._drop, worker))
        unloaded = Stopped(f"model {model_name!r} was unloaded", retry_after=1)
        self._fail([stream for stream, its in self._streams.items() if its is worker], unloaded)

    def submit(self, model_name: str, requests: Sequence[Request]) -> list[Stream]:
        """All or, with BadRequest, none of the requests of one call.  From the event loop thread."""
        self._refuse()
        if model_name not in self._workers:
            raise NotFound(f"no model {model_name!r} is at work", param="model")
        worker, link = self._workers[model_name]
        for request in requests:
            worker.refuse(request)
        streams = [Stream(request, link) for request in requests]
        self._streams.update(dict.fromkeys(streams, worker))
        if streams:
            self._quiet.clear()
            self._send(partial(self._accept, worker, streams))
        return streams

    async def close(self, drain_s: float) -> None:
        """Take nothing new, let what is there finish for `drain_s` seconds, fail the rest, end the thread."""
        self._closing = True
        if self.alive:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), drain_s)
        self._stopping = True
        self._wake.set()
        self._fail_all(Stopped("the server is shutting down", retry_after=1))
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, JOIN_S)

    # On the event loop thread

    def _refuse(self) -> None:
        if self._closing:
            raise Unavailable("the server is shutting down", retry_after=1)
        if self._gone:
            raise Unavailable("the engine has stopped: the server must be restarted")

    def _send(self, function: Callable[[], None]) -> None:
        self._inbox.append(function)
        self._wake.set()

    def _ended(self, stream: Stream, ended: Ended) -> None:
        del self._streams[stream]
        if not self._streams:
            self._quiet.set()
        self._observer.ended(ended)

    def _deliver(self, answers: list[Answer]) -> None:
        for ticket, event in answers:
            ticket.receive(event)

    def _bring(self, step: Step) -> None:
        self._deliver(step.answers)
        self._observer.step(step.report)

    def _fail(self, streams: list[Stream], error: PolyheadError) -> None:
        for stream in streams:
            stream.receive(Failed(error))

    def _fail_all(self, error: PolyheadError) -> None:
        self._fail(list(self._streams), error)
        for future in list(self._calls):
            settle(future, Failure(error))

    def _bury(self) -> None:
        """The thread has ended, wanted or not."""
        self._gone = True
        if not self._stopping:
            log.critical("the engine thread has died; every request fails until the server is restarted")
        self._fail_all(Stopped("the engine has stopped: the server must be restarted"))

    # On the engine thread

    def _run(self) -> None:
        try:
            if self._threads:
                torch.set_num_threads(self._threads)
            while not self._stopping:
                self._wake.clear()  # before looking: what comes after is not slept through
                self._read()
                worker = self._turns.next()
                if worker is None:
                    self._resting = True
                    self._wake.wait()
                    self._resting = False
                else:
                    self._step(worker)
                    self._settle()
        finally:
            self._post(self._bury)

    def _read(self) -> None:
        while self._inbox and not self._stopping:
            outcome = attempt(self._inbox.popleft())
            if isinstance(outcome, Failure):
                log.error("what was sent to the engine failed", exc_info=outcome.error)
        self._settle()

    def _settle(self) -> None:
        """Check and tell of the workers that have come to rest."""
        for worker in [worker for worker in self._stirred if not worker.busy]:
            self._stirred.discard(worker)
            checked = attempt(worker.check)
            if isinstance(checked, Failure):
                log.critical("the books of model %r are wrong at rest", worker.model, exc_info=checked.error)
            self._post(partial(self._observer.rested, worker.model, worker.task))

    def _step(self, worker: Worker) -> None:
        began = perf_counter()
        step = attempt(worker.step)
        self._turns.charge(worker, perf_counter() - began)
        self.steps += 1
        if isinstance(step, Failure):
            log.error("a step of model %r failed", worker.model, exc_info=step.error)
            self._post(partial(self._deliver, worker.fail()))
        else:
            self._post(partial(self._bring, step))

    def _accept(self, worker: Worker, streams: list[Stream]) -> None:
        if not worker.busy:
            self._turns.rejoin(worker)
        self._stirred.add(worker)
        for stream in streams:
            if stream.open:  # else its client has left already
                worker.submit(stream)

    def _drop(self, worker: Worker) -> None:
        self._turns.remove(worker)
        self._stirred.discard(worker)

    def _post(self, function: Callable[[], None]) -> None:
        """Have the event loop run it; without a loop nobody is left to work for."""
        if self._loop.is_closed():
            self._stopping = True
        else:
            self._loop.call_soon_threadsafe(function)


def settle(future: asyncio.Future[object], outcome: object) -> None:
    if not future.done():
        future.set_result(outcome)
