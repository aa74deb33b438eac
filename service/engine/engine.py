"""The engine: one thread that owns the arithmetic of one device.

The event loop and the engine thread share an inbox of functions, which are run between steps (`service.engine.inbox`).
The results of a step go back in one `call_soon_threadsafe`.  Each attribute belongs to one of the two threads, as noted
below.  Without work the thread sleeps.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TypeVar, cast

import torch

from ..concurrency.fair_share import FairScheduler
from ..concurrency.outcome import Failure, attempt, resolve_future, run_on_thread, unwrap
from ..concurrency.time_slices import iterate_in_slices
from ..core.errors import PolyheadError, Stopped, Unavailable
from ..core.request import Failed, Request, WorkerTask
from .background_throttle import BackgroundThrottle
from .delivery import EventDelivery, call_last
from .event_stream import OpenTokens, StepCredits, Stream, StreamContext
from .inbox import Inbox
from .joint_steps import JOINT_LEAD_S, JointSteps
from .pause_detector import PauseDetector
from .worker import Observer, RequestCounts, RequestEnd, StepResult, Worker, submission_error

__all__ = ["Engine", "Stream"]

T = TypeVar("T")
log = logging.getLogger(__name__)
JOIN_TIMEOUT_S = 30.0  # how long the last step may take after draining
SELF_TEST_INTERVAL_S = 5.0  # how often a failing model is tested again while the engine is idle


class Engine:
    """Takes requests on the event loop thread, computes on its own thread, delivers events on the event loop thread.

    `threads` is how many threads one operation may use; 0: torch's default.
    """

    def __init__(self, observer: Observer, *, name: str = "cpu", threads: int = 0) -> None:
        self.steps = 0
        self._observer, self._threads = observer, threads
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._inbox = Inbox()  # both threads
        self._wake, self._step_credits = threading.Event(), StepCredits()  # both threads
        self._last_progress = 0.0  # when the engine last made progress; engine thread writes
        self._work_since = perf_counter()  # when the first of the open requests was submitted; loop thread writes
        self._stopping = False  # loop thread writes
        self._fatal_error = ""  # why the engine cannot compute any more; written once, by any thread
        self._is_asleep = False  # engine thread writes
        self._failing: frozenset[Worker] = frozenset()  # engine thread writes
        self._fair_scheduler: FairScheduler[Worker] = FairScheduler()  # engine thread, as the next three
        self._throttle, self._joint_steps = BackgroundThrottle(), JointSteps()
        self._active_workers: set[Worker] = set()  # to be checked when they become idle
        self._contexts: dict[Worker, dict[int, StreamContext]] = {}  # by adapter; loop thread, as all that follow
        self._streams: dict[Stream, Worker] = {}  # open ones
        self._tokens = OpenTokens()
        self._running: Counter[StreamContext] = Counter()  # as the last step left them
        self._idle_events: dict[
            Worker | StreamContext | None, asyncio.Event
        ] = {}  # set when the last open stream of the key ends
        self._calls: set[asyncio.Future[object]] = set()
        self._closing = self._has_ended = False
        self._pause_detector, self._delivery = PauseDetector(), EventDelivery()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive() and not self._has_ended

    @property
    def idle(self) -> bool:
        """Whether it sleeps without work."""
        return self._is_asleep and not self._inbox

    @property
    def tokens(self) -> int:
        """Prompt tokens of all open requests that are not paused."""
        return self._tokens.total

    def tokens_of(self, owner: str) -> int:
        return self._tokens.of(owner)

    def counts(self) -> dict[tuple[str, WorkerTask], RequestCounts]:
        """The open requests of each model, including those on their way to the engine thread."""
        counts: dict[tuple[str, WorkerTask], RequestCounts] = {}
        opened = Counter(stream.context for stream in self._streams)
        for context in (context for contexts in self._contexts.values() for context in contexts.values()):
            running = min(self._running[context], opened[context])
            before = counts.get((context.model, context.task), RequestCounts(0, 0))
            counts[context.model, context.task] = RequestCounts(
                before.waiting + opened[context] - running, before.running + running
            )
        return counts

    def stalled_seconds(self) -> float:
        """Seconds since the last progress while a request is open, without pauses of the process; otherwise 0."""
        if not self._streams or self.idle:
            return 0.0
        since = max(self._last_progress, self._work_since)
        return max(perf_counter() - since - self._pause_detector.paused_since(since), 0.0)

    def failing(self) -> list[str]:
        """Models whose last self-test failed."""
        return sorted(worker.model for worker in self._failing)

    def start(self) -> None:
        """Start the thread.  Must be called in the event loop that events are to be delivered in."""
        self._loop = asyncio.get_running_loop()
        self._pause_detector.start(self._loop)
        self._thread.start()

    async def call(self, function: Callable[[], T], ended: Collection[StreamContext] = ()) -> T:
        """Run `function` on the engine thread before the next step.  Returns what it returns, raises what it raises.

        Where it ends what streams of the contexts `ended` use, it runs after what was sent about these.  All of them
        have ended then.
        """
        self._raise_if_closed()
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._calls.add(future)
        self._send_for_all(lambda: self._post_to_loop(partial(resolve_future, future, [attempt(function)])), ended)
        try:
            return unwrap(cast(list[T | Failure], await future).pop())  # so the future does not hold a Failure
        finally:
            self._calls.discard(future)

    def yield_turn(self) -> None:
        """Run the inbox and one step, during a long function on the engine thread such as a load.

        Raises Stopped if the thread is to end.
        """
        with torch.inference_mode(False):  # the function may be in it, and the inbox may load weights for gradients
            self._run_inbox()
            self._run_step()
        self._last_progress = perf_counter()
        if self._stopping:
            raise Stopped("the server is shutting down", retry_after=1)
        if self._fatal_error:
            raise Stopped(self._restart_message)

    def fail_permanently(self, why: str) -> None:
        """Fail every request and end the thread: `why` says what is lost for good.  Any thread may call it.

        Requests fail at once and do not wait for the thread, which may hang.
        """
        if not (self._fatal_error or self._stopping):
            self._fatal_error = why
            log.critical("%s; every request fails until the server is restarted", why)
            self._wake.set()
            if self._thread.is_alive():
                self._post_to_loop(self._end_thread)

    def add_worker(self, worker: Worker, weight: float = 1.0) -> None:
        """Add a worker.  Where several have work, their shares of the time are in proportion to `weight`."""
        self.add_adapter(worker, 0, worker.model, worker.task)
        self._send_for_all(partial(self._add_worker, worker, weight))

    def add_adapter(self, worker: Worker, adapter: int, model: str, task: WorkerTask) -> None:
        """Accept requests for an adapter of a worker, served under a model name of its own."""

        def send_to_worker(function: Callable[[Stream], None]) -> Callable[[Stream], None]:
            return lambda stream: self._send(partial(function, stream), [stream])

        send_pause, send_resume = send_to_worker(worker.pause), send_to_worker(partial(self._resume, worker))

        def pause(stream: Stream) -> None:
            self._tokens.subtract(stream)
            send_pause(stream)

        def resume(stream: Stream) -> None:
            self._tokens.add(stream)
            send_resume(stream)

        context = StreamContext(model, task, self._end_stream, send_to_worker(worker.abort), pause, resume)
        self._contexts.setdefault(worker, {})[adapter] = context

    async def remove_adapter(self, worker: Worker, adapter: int, drain_s: float) -> None:
        """Remove an adapter: it accepts nothing new, open requests have `drain_s` seconds to end, then they fail."""
        context = self._contexts[worker].pop(adapter)
        await self._wait_until_idle(context, drain_s)
        unloaded = Stopped(f"model {context.model!r} was unloaded", retry_after=1)
        async for stream in iterate_in_slices([stream for stream in self._streams if stream.context is context]):
            stream.abort(unloaded)
        await self.call(partial(worker.detach, adapter), [context])
        del self._running[context]

    async def remove_worker(self, worker: Worker, drain_s: float) -> None:
        """Remove a worker: it accepts nothing new, open requests have `drain_s` seconds to end, then they fail."""
        contexts = self._contexts.pop(worker)
        await self._wait_until_idle(worker, drain_s)
        unloaded = Stopped(f"model {worker.model!r} was unloaded", retry_after=1)
        async for stream in iterate_in_slices(
            [stream for stream, stream_worker in self._streams.items() if stream_worker is worker]
        ):
            stream.receive(Failed(unloaded))
        await self.call(partial(self._remove_worker, worker), contexts.values())
        for context in contexts.values():
            del self._running[context]

    def submit(self, worker: Worker, requests: Sequence[Request]) -> list[Stream]:
        """Submit all of `requests` or, with BadRequest, none.

        Called on the event loop thread.  A long list should be submitted in slices.
        """
        self._raise_if_closed()
        contexts = self._contexts.get(worker, {})
        for request in requests:
            if request.adapter not in contexts:
                raise Unavailable(f"model {worker.model!r} is being unloaded", retry_after=1)
            worker.validate(request)
        streams = [Stream(request, contexts[request.adapter]) for request in requests]
        if streams and not self._streams:
            self._work_since = perf_counter()
        for stream in streams:
            self._streams[stream] = worker
            self._tokens.add(stream)
            stream.start()
        if streams:
            self._send(partial(self._accept, worker, streams), streams)
        return streams

    async def close(self, drain_s: float) -> None:
        """Accept nothing new, let open requests end for `drain_s` seconds, fail the rest, end the thread."""
        self._closing = True
        if self.alive:
            await self._wait_until_idle(None, drain_s)
        self._stopping = True
        self._wake.set()
        self._fail_all(Stopped("the server is shutting down", retry_after=1))
        if self._thread.is_alive():
            await run_on_thread(partial(self._thread.join, JOIN_TIMEOUT_S))

    # On the event loop thread

    def _raise_if_closed(self) -> None:
        if self._closing:
            raise Unavailable("the server is shutting down", retry_after=1)
        if self._has_ended:
            raise Unavailable(self._restart_message)

    def _send(self, function: Callable[[], None], streams: Sequence[Stream]) -> None:
        """Send what is to be done with streams of one call, which has one owner and one model."""
        first = streams[0]
        self._inbox.send(function, first.request.terms.owner, len(streams), first.context)
        self._wake.set()

    def _send_for_all(self, function: Callable[[], None], ended: Collection[StreamContext] = ()) -> None:
        self._inbox.send_for_all(function, ended)
        self._wake.set()

    def _end_stream(self, stream: Stream, end: RequestEnd) -> None:
        worker = self._streams.pop(stream)
        if not stream.is_paused:
            self._tokens.subtract(stream)
        self._observer.record_end(end)
        for key in (worker, stream.context, None):
            if key in self._idle_events and not self.has_open_streams(key):
                self._idle_events[key].set()

    def has_open_streams(self, key: Worker | StreamContext | None) -> bool:
        """Whether there are open streams: of one worker, of one adapter (its context), or any (None)."""
        if key is None:
            return bool(self._streams)
        return any(key in (stream_worker, stream.context) for stream, stream_worker in self._streams.items())

    async def _wait_until_idle(self, key: Worker | StreamContext | None, seconds: float) -> None:
        if not self.has_open_streams(key):
            return
        is_idle = self._idle_events[key] = asyncio.Event()
        with suppress(TimeoutError):
            await asyncio.wait_for(is_idle.wait(), seconds)
        del self._idle_events[key]

    def _deliver_step(self, worker: Worker, step: StepResult, delivered: Callable[[], None]) -> None:
        report = step.report
        for handle in step.started:
            handle.timing.started = step.began
        for adapter, context in self._contexts.get(worker, {}).items():
            own = report.running - sum(report.adapters.values())
            self._running[context] = report.adapters.get(adapter, 0) if adapter else own
        self._delivery.add(worker, step.events, delivered)
        if step.report.sequences or step.report.forward_s:
            self._observer.record_step(step.report)

    def _report_idle(self, worker: Worker) -> None:
        for context in self._contexts.get(worker, {}).values():
            self._running[context] = 0
        self._observer.record_idle(worker.model, worker.task)

    def _fail_all(self, error: PolyheadError) -> None:
        for stream in list(self._streams):
            stream.receive(Failed(error))
        for future in list(self._calls):
            resolve_future(future, [Failure(error)])

    def _end_thread(self) -> None:
        """Fail everything, because the thread has ended or is lost."""
        if not (self._stopping or self._fatal_error or self._has_ended):
            log.critical("the engine thread has died; every request fails until the server is restarted")
        self._has_ended = True
        self._fail_all(Stopped(self._restart_message))
        for worker in self._contexts:
            self._report_idle(worker)

    @property
    def _restart_message(self) -> str:
        return f"{self._fatal_error or 'the engine has stopped'}: the server must be restarted"

    # On the engine thread

    def _run(self) -> None:
        try:
            if self._threads:
                torch.set_num_threads(self._threads)
            while not (self._stopping or self._fatal_error or self._loop.is_closed()):
                self._wake.clear()  # before reading the inbox, so that nothing sent later is missed
                self._run_inbox()
                if not self._run_step() and not self._inbox:
                    self._sleep()
        finally:
            self._post_to_loop(self._end_thread)

    def _sleep(self) -> None:
        """Sleep until there is work.  Models that fail are tested again every SELF_TEST_INTERVAL_S."""
        self._is_asleep = True
        self._wake.wait(SELF_TEST_INTERVAL_S if self._failing else self._throttle.wait_s)
        self._is_asleep = False
        self._last_progress = perf_counter()
        for worker in self._failing:
            self._self_test(worker)

    def _run_inbox(self) -> None:
        """Run what was sent, as much as may be before the next step."""
        for function in self._inbox.take_turn():
            if self._stopping or self._fatal_error:  # all requests fail
                break
            outcome = attempt(function)
            if isinstance(outcome, Failure):
                log.error("a function sent to the engine failed", exc_info=outcome.error)
            self._last_progress = perf_counter()
        self._expire()
        self._check_idle_workers()

    def _expire(self) -> None:
        now = perf_counter()
        for worker in self._fair_scheduler.parties():
            if events := worker.expire(now):
                self._post_to_loop(partial(self._delivery.add, worker, events))

    def _check_idle_workers(self) -> None:
        """Check the invariants of workers that have become idle, and report them as idle."""
        for worker in [worker for worker in self._active_workers if not worker.has_work]:
            self._active_workers.discard(worker)
            checked = attempt(worker.check_invariants)
            if isinstance(checked, Failure):
                log.critical("model %r violates an invariant while idle", worker.model, exc_info=checked.error)
            self._post_to_loop(partial(self._report_idle, worker))

    def _run_step(self) -> bool:
        """A step of the worker that is next, or short steps of several.  Returns False if none has work or all are held
        back.
        """
        candidates = [worker for worker in self._fair_scheduler.parties() if worker.has_work]
        waiting = self._fair_scheduler.next_ones(self._throttle.select_runnable(candidates), JOINT_LEAD_S)
        if not waiting:
            return False
        self._step_credits.acquire(self._loop)
        began = perf_counter()
        workers = self._joint_steps.choose(waiting)
        steps = self._joint_steps.step(workers)
        self._last_progress = perf_counter()
        for worker, (_, seconds) in zip(workers, steps, strict=True):
            self._fair_scheduler.charge(worker, seconds, in_turn=worker is workers[0])
        self._throttle.record_turn(workers[0], began, self._last_progress)
        self.steps += len(workers)
        release = call_last(self._step_credits.release, len(workers))
        for worker, (step, _) in zip(workers, steps, strict=True):
            self._end_step(worker, step, release)
        self._check_idle_workers()
        return True

    def _end_step(self, worker: Worker, step: StepResult | Failure, release: Callable[[], None]) -> None:
        """Deliver a step, or fail it.  `release` is called once it is delivered."""
        if not isinstance(step, Failure):
            self._failing -= {worker}
            self._post_to_loop(partial(self._deliver_step, worker, step, release))
            return
        release()
        if self._fatal_error:  # no request is to blame: all of them fail
            log.error("a step of model %r failed", worker.model, exc_info=step.error)
        else:
            self._fail_step(worker, step.error)

    def _fail_step(self, worker: Worker, error: Exception) -> None:
        """Fail the requests that are to blame for a failed step, and test whether the model itself fails."""
        events = worker.blame_failed_step()
        if not events:
            log.warning("a step of model %r failed, its requests are tried again in halves: %s", worker.model, error)
            return
        log.error("a request to model %r failed: %s", worker.model, events[0][0].request.id, exc_info=error)
        self._self_test(worker)  # first, so that the model's state is known when the failure is delivered
        self._post_to_loop(partial(self._delivery.add, worker, events))

    def _self_test(self, worker: Worker) -> None:
        proof = attempt(worker.self_test)
        if not isinstance(proof, Failure):
            self._failing -= {worker}
        elif worker not in self._failing:
            self._failing |= {worker}
            log.critical("model %r cannot compute any more", worker.model, exc_info=proof.error)

    def _activate(self, worker: Worker) -> None:
        """Note that a worker has work."""
        if not worker.has_work:
            self._fair_scheduler.rejoin(worker)
        self._active_workers.add(worker)

    def _resume(self, worker: Worker, stream: Stream) -> None:
        self._activate(worker)
        worker.resume(stream)

    def _accept(self, worker: Worker, streams: list[Stream]) -> None:
        self._activate(worker)
        for stream in streams:
            taken = attempt(partial(worker.submit, stream)) if stream.is_open else None  # otherwise its client has left
            if isinstance(taken, Failure):
                log.error("model %r cannot take a request", worker.model, exc_info=taken.error)
                self._post_to_loop(partial(stream.abort, submission_error(taken.error)))

    def _add_worker(self, worker: Worker, weight: float) -> None:
        self._fair_scheduler.add(worker, weight)
        self._joint_steps.add(worker)

    def _remove_worker(self, worker: Worker) -> None:
        self._fair_scheduler.remove(worker)
        self._joint_steps.remove(worker)
        self._active_workers.discard(worker)
        self._failing -= {worker}
        self._post_to_loop(partial(self._report_idle, worker))

    def _post_to_loop(self, function: Callable[[], None]) -> None:
        """Run `function` on the event loop.  Without a loop there is nothing left to do, and the thread stops."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)
