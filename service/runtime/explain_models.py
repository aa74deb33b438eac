"""Networks that explain: beside a served model a second one, read when somebody first asks why.

Knows no text and no HTTP.  The one idea: what serves is packed, fused, maybe of eight bits, and shows nothing of its
insides; so an explanation has the same checkpoint in float32, in plain torch, with what it takes held of the one budget
of memory.  It stays until its model goes, until the room is wanted for another's, or until it was not asked for during
the setting explain_idle_seconds.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch

from polyhead.models import checkpoint
from polyhead.models.checkpoint.description import Description
from polyhead.models.core.errors import ModelError
from polyhead.models.explain import InstrumentedNetwork
from polyhead.models.network.heads import LanguageHead

from ..concurrency.outcome import run_on_daemon_thread
from ..config.settings import Settings
from ..core.errors import Conflict, InsufficientMemory, PolyheadError
from ..core.model import Model
from ..engine.background_throttle import BACKGROUND_SHARE
from ..engine.engine import Engine
from ..engine.explain_worker import ExplainWorker
from ..engine.head_outputs import OutputHead
from .explain_cost import CHUNK_TOKENS, GIGA, WorkLimit, explainer_memory_need
from .load_task import LoadTask, ignore_progress
from .loader import Loader, yielding_progress
from .memory_budget import MemoryNeed, ModelSize, measure_model

log = logging.getLogger("polyhead.watching")


@dataclass(frozen=True, eq=False)
class LoadedExplainer:
    """A network that explains a model, and what it holds of the budget."""

    model: Model
    worker: ExplainWorker
    need: MemoryNeed


class Timer(Protocol):
    def cancel(self) -> None: ...


def call_later(seconds: float, function: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, function)


class ExplainerCache:
    """Lives on the event loop thread.  `later` calls a function after so many seconds."""

    def __init__(self, engine: Engine, settings: Settings, loader: Loader) -> None:
        self._engine, self._settings, self._loader, self._budget = engine, settings, loader, loader.budget
        self._source_policy, self._tokenizer_check, self._device = (
            loader.source_policy,
            loader.tokenizer_check,
            loader.placement.device,
        )
        self._explainers: OrderedDict[str, LoadedExplainer] = (
            OrderedDict()
        )  # by model's name, the one asked last at the end
        self._timers: dict[str, Timer] = {}  # by model's name, of those that are given back when idle
        self._unload_tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()  # held while a network is read or given back
        self.call_later: Callable[[float, Callable[[], None]], Timer] = call_later

    def find_worker(self, model: Model) -> ExplainWorker | None:
        """The one that explains just this model, if it is there."""
        watch = self._explainers.get(model.name)
        return watch.worker if watch and watch.model is model else None

    def held_bytes(self, name: str) -> int:
        """Bytes of the budget that the network explaining the model of that name holds; 0 if it is not there."""
        return self._explainers[name].need.total if name in self._explainers else 0

    async def load(self, model: Model, source: str) -> Mapping[str, tuple[int, int]]:
        """See to it that it is there: the layers and heads of each kind of attention.

        Until the caller awaits again, it stays there.  Raises NoRoom, Expired after `load_seconds`, and Conflict where
        its source cannot be read any more.
        """
        if self.find_worker(model) is None:  # one that is there does not wait for another's
            await self._ensure(model, source)
        self._explainers.move_to_end(model.name)
        self._start_timer(model.name)
        return self._explainers[model.name].worker.layout

    async def _ensure(self, model: Model, source: str) -> None:
        async with self._lock:
            if self.find_worker(model) is None:
                await self._unload(model.name)  # of another that had the name
                loading = LoadTask(f"what explains {model.name}", self._settings.load_seconds)
                await loading.run(self._read_explainer(loading, model, source))

    async def unload(self, model: Model) -> None:
        """Let go of the one that explains a model; who is being explained to is told so."""
        async with self._lock:
            if self.find_worker(model) is not None:
                await self._unload(model.name)

    async def _unload(self, name: str) -> None:
        """The budget has its memory again when the system has it."""
        self._stop_timer(name)
        if watch := self._explainers.pop(name, None):
            await self._engine.remove_worker(watch.worker, 0.0)
            await self._engine.call(watch.worker.release)
            await self._loader.release_memory()
            self._budget.release(watch.need)

    def _start_timer(self, name: str) -> None:
        """Count its idle time from now on."""
        self._stop_timer(name)
        if seconds := self._settings.explain_idle_seconds:
            self._timers[name] = self.call_later(seconds, partial(self._on_timer, name))

    def _stop_timer(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()

    def _on_timer(self, name: str) -> None:
        del self._timers[name]
        release = asyncio.create_task(self._unload_idle(name))
        self._unload_tasks.add(release)
        release.add_done_callback(self._unload_tasks.discard)

    async def _unload_idle(self, name: str) -> None:
        async with self._lock:
            if name not in self._explainers or name in self._timers:  # it was asked for while the lock was waited for
                return
            if self._engine.has_open_streams(self._explainers[name].worker):
                self._start_timer(name)
                return
            held = self.held_bytes(name)
            try:
                await self._unload(name)
            except PolyheadError as error:  # the engine ends
                log.info("the network that explains %s is not given back: %s", name, error.message)
            else:
                log.info("%s was not explained lately: %.0f MiB are free again", name, held / 2**20)

    async def _read_explainer(self, loading: LoadTask, model: Model, source: str) -> None:
        began, loading.stage = time.perf_counter(), "was being read"
        try:
            what = await run_on_daemon_thread(
                lambda: checkpoint.describe_source(source, self._source_policy, self._tokenizer_check.check_folder)
            )
            need = await self._reserve_memory(measure_model(model.name, what))
            worker = await self._load_worker(loading, model, what, need)
        except ModelError as error:
            raise Conflict(f"{model.name} cannot be read again to be explained: {error}", param="model") from None
        self._explainers[model.name] = LoadedExplainer(model, worker, need)
        self._engine.add_worker(worker, BACKGROUND_SHARE * self._settings.weights.get(model.name, 1.0))
        seconds = time.perf_counter() - began
        log.info("%s can be explained: %.0f MiB more, in %.2f s", model.name, need.weights / 2**20, seconds)

    async def _reserve_memory(self, size: ModelSize) -> MemoryNeed:
        """What it needs, taken; if there is no room, from those that were asked longest ago and rest."""
        need = explainer_memory_need(size, self._settings)
        while need.total > self._budget.free:
            idle = next(
                (name for name, watch in self._explainers.items() if not self._engine.has_open_streams(watch.worker)),
                "",
            )
            if not idle:
                free = f"{max(self._budget.free, 0) >> 20} of {self._budget.limit >> 20} MiB are free"
                raise InsufficientMemory(f"to explain {size.name} takes {-(-need.total >> 20)} MiB more, and {free}")
            await self._unload(idle)
        self._budget.reserve(need)
        return need

    async def _load_worker(self, loading: LoadTask, model: Model, what: Description, need: MemoryNeed) -> ExplainWorker:
        def breathe() -> None:
            loading.check()
            self._engine.yield_turn()

        with ExitStack() as undo:
            undo.callback(self._budget.release, need)
            progress = yielding_progress(breathe, loading.check, ignore_progress)
            worker = await loading.on_engine(self._engine, lambda: self._build_worker(model, what, progress))
            await loading.on_engine(self._engine, lambda: worker.warm_up(breathe))
            undo.pop_all()
        return worker

    def _build_worker(self, model: Model, what: Description, progress: Callable[[int, int], None]) -> ExplainWorker:
        """On the engine's thread."""
        loaded = checkpoint.load_described(
            model.source, what, dtype=torch.float32, device=self._device, progress=progress
        )
        watched, reads = InstrumentedNetwork(loaded.network, loaded.head), loaded.decoding is not None
        head = None if reads or isinstance(loaded.head, LanguageHead) else cast(OutputHead, loaded.head)
        limit = WorkLimit(loaded.config, loaded.decoder_config, self._settings.explain_gflop * GIGA)
        worker = ExplainWorker(watched, head, model=model.name, reads=reads, piece=CHUNK_TOKENS)
        worker.check_cost = limit.check
        return worker
