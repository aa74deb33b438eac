"""Cache of explainers: networks that compute explanations, each beside the served model that it explains.

A serving network is packed and fused, perhaps in 8 bits, and does not expose attention weights or gradients. So an
explainer is the same checkpoint in float32 and plain torch, read by the description of the served model: it shares its
tokenizer, and cannot be of other files. It is loaded with the first request for an explanation, and its memory is taken
from the common budget. It is unloaded with its model, when another explainer or a model that is being loaded needs the
memory, or when it was not used for `explain_idle_seconds`. Requests for the explainer of one model share one load, and
it goes on when its clients leave: a thread of it cannot be stopped, and the next request would start another.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from polyhead.models import checkpoint
from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.weight_reader import WeightReader
from polyhead.models.core.errors import CheckpointError, ModelError
from polyhead.models.explain import InstrumentedNetwork, measure_head
from polyhead.models.network.heads import LanguageHead

from ..concurrency.outcome import run_on_daemon_thread
from ..config.settings import Settings
from ..core.errors import Conflict, InsufficientMemory, PolyheadError
from ..core.model import Model
from ..core.names import join_names
from ..engine.background_throttle import BACKGROUND_SHARE
from ..engine.engine import Engine
from ..engine.explain_worker import ExplainWorker
from ..engine.head_outputs import OutputHead
from .explain_cost import CHUNK_TOKENS, GIGA, WorkLimit, explainer_memory_need
from .load_task import LoadTask, retrieve_outcome
from .loader import Loader, yielding_progress
from .memory_budget import MemoryNeed, ModelSize, measure_model

log = logging.getLogger("polyhead.watching")


@dataclass(frozen=True, eq=False)
class LoadedExplainer:
    """An explainer of `model`, and the memory that it holds of the budget."""

    model: Model
    worker: ExplainWorker
    need: MemoryNeed


def name_file_only(error: ModelError) -> str:
    """The message with the name of its file in place of the path, which clients must not see."""
    path = error.file if isinstance(error, CheckpointError) else ""
    return str(error).replace(path, Path(path).name) if path else str(error)


class Timer(Protocol):
    def cancel(self) -> None: ...


def call_later(seconds: float, function: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, function)


class ExplainerCache:
    """Used on the event loop thread only. `call_later` calls a function after a number of seconds."""

    def __init__(self, engine: Engine, settings: Settings, loader: Loader) -> None:
        self._engine, self._settings, self._loader, self._budget = engine, settings, loader, loader.budget
        self._device = loader.placement.device
        # By model name, the most recently used last.
        self._explainers: OrderedDict[str, LoadedExplainer] = OrderedDict()
        self._timers: dict[str, Timer] = {}  # by model name, of explainers that are unloaded when idle
        self._unload_tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()  # held while an explainer is loaded or unloaded
        self._load_turn = asyncio.Lock()  # of loads: one of them at a time waits for the lock, so a model waits for one
        self._load_tasks: dict[int, asyncio.Task[ExplainWorker]] = {}  # by the identity of the model
        self._waiting: Counter[str] = Counter()  # by model name, requests that wait for a load
        self.call_later: Callable[[float, Callable[[], None]], Timer] = call_later
        loader.make_room = self.make_room

    def find_worker(self, model: Model) -> ExplainWorker | None:
        """Return the loaded explainer of exactly this model; None if there is none."""
        explainer = self._explainers.get(model.name)
        return explainer.worker if explainer and explainer.model is model else None

    def held_bytes(self, name: str) -> int:
        """Return the bytes of the budget that the explainer of the model of that name holds; 0 if it is not loaded."""
        return self._explainers[name].need.total if name in self._explainers else 0

    async def load(self, model: Model, description: Description) -> Mapping[str, tuple[int, int]]:
        """Load the explainer of a model unless it is loaded. Return the layers and heads of each kind of attention.
        `description`: of what is served, an adapter merged with its base.

        The explainer is not unloaded before the caller awaits again, unless its model is. Raises InsufficientMemory,
        Expired after `load_seconds`, and Conflict if a file was changed or replaced since, or cannot be read any more.
        """
        worker = self.find_worker(model)
        if worker is None:  # a loaded one does not wait for the load of another
            self._waiting[model.name] += 1
            try:
                worker = await asyncio.shield(self._start_load(model, description))
            finally:
                self._waiting[model.name] -= 1
        if worker is self.find_worker(model):
            self._explainers.move_to_end(model.name)
            self._start_timer(model.name)
        return worker.layout

    def _start_load(self, model: Model, description: Description) -> "asyncio.Task[ExplainWorker]":
        """Return the task that loads the explainer of a model: the one that runs, or a new one."""
        task = self._load_tasks.get(id(model))
        if task is None:
            task = self._load_tasks[id(model)] = asyncio.create_task(self._load(model, description))
            task.add_done_callback(partial(self._on_load_done, id(model)))
        return task

    def _on_load_done(self, key: int, task: "asyncio.Task[ExplainWorker]") -> None:
        del self._load_tasks[key]
        retrieve_outcome(task)  # perhaps no request waits for it any more

    async def _load(self, model: Model, description: Description) -> ExplainWorker:
        async with self._load_turn, self._lock:
            await self._unload(model.name)  # an explainer of an older model of that name
            loading = LoadTask(f"the explainer of {model.name}", self._settings.load_seconds)
            await loading.run(self._read_explainer(loading, model, description))
            self._start_timer(model.name)
            return self._explainers[model.name].worker

    async def unload(self, model: Model) -> None:
        """Unload the explainer of a model, if it is loaded or being loaded. Explanations in progress fail with an
        error.
        """
        if task := self._load_tasks.get(id(model)):
            await asyncio.wait({task})
        async with self._lock:
            if self.find_worker(model) is not None:
                await self._unload(model.name)

    async def make_room(self, needed: float, useful: float) -> bool:
        """Unload explainers, those in use last, until `useful` bytes of the budget are free or there are none: models
        come before their explanations. Return whether any was unloaded; none is where `needed` bytes would not be free.

        A caller that reserves the bytes before it awaits again has them: a load of an explainer waits for the lock.
        """
        if useful <= self._budget.free:
            return False
        async with self._lock:
            free, leaving = self._budget.free, list[str]()
            for name in sorted(self._explainers, key=self._is_used):
                if free < useful:
                    free += self.held_bytes(name)
                    leaving.append(name)
            if not leaving or free < needed:
                return False
            log.info("unloaded for a model that is being loaded: the explainers of %s", join_names(leaving))
            await asyncio.gather(*(self._unload(name, self._settings.drain_seconds) for name in leaving))
            return True

    async def _unload(self, name: str, drain_s: float = 0.0) -> None:
        """Unload it and release its budget, once the operating system has the memory back; also if the caller is
        cancelled meanwhile. Explanations in progress have `drain_s` seconds to end.
        """
        self._stop_timer(name)
        if explainer := self._explainers.pop(name, None):
            release = self._keep_task(self._release(explainer, drain_s))
            release.add_done_callback(retrieve_outcome)
            await asyncio.shield(release)

    async def _release(self, explainer: LoadedExplainer, drain_s: float) -> None:
        await self._engine.remove_worker(explainer.worker, drain_s)
        await self._engine.call(explainer.worker.release)
        await self._loader.release_memory()
        self._budget.release(explainer.need)

    def _keep_task(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._unload_tasks.add(task)
        task.add_done_callback(self._unload_tasks.discard)
        return task

    def _start_timer(self, name: str) -> None:
        """Restart the measurement of idle time."""
        self._stop_timer(name)
        if seconds := self._settings.explain_idle_seconds:
            self._timers[name] = self.call_later(seconds, partial(self._on_timer, name))

    def _stop_timer(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()

    def _on_timer(self, name: str) -> None:
        del self._timers[name]
        self._keep_task(self._unload_idle(name))

    async def _unload_idle(self, name: str) -> None:
        async with self._lock:
            if name not in self._explainers or name in self._timers:  # it was used while this waited for the lock
                return
            if self._is_used(name):
                self._start_timer(name)
                return
            freed = self.held_bytes(name)
            try:
                await self._unload(name)
            except PolyheadError as error:  # the engine is closing
                log.info("the explainer of %s could not be unloaded: %s", name, error.message)
            else:
                log.info("the explainer of %s was idle and is unloaded: %.0f MiB are free again", name, freed / 2**20)

    def _is_used(self, name: str) -> bool:
        """Whether requests are explained by the loaded explainer of that name, or are about to be."""
        return self._waiting[name] > 0 or self._engine.has_open_streams(self._explainers[name].worker)

    async def _read_explainer(self, loading: LoadTask, model: Model, description: Description) -> None:
        began, loading.stage = time.perf_counter(), "was being read"
        try:
            weights, size = await run_on_daemon_thread(lambda: build_and_measure(model.name, description))
            need = await self._reserve_memory(size)
            worker = await self._load_worker(loading, model, weights, need)
        except ModelError as error:
            log.warning("%s cannot be read again to be explained: %s", model.name, error)
            message = f"{model.name} cannot be read again to be explained: {name_file_only(error)}"
            raise Conflict(message, param="model") from None
        self._explainers[model.name] = LoadedExplainer(model, worker, need)
        self._engine.add_worker(worker, BACKGROUND_SHARE * self._settings.weights.get(model.name, 1.0))
        seconds = time.perf_counter() - began
        log.info("the explainer of %s is ready: %.0f MiB more, in %.2f s", model.name, need.weights / 2**20, seconds)

    async def _reserve_memory(self, size: ModelSize) -> MemoryNeed:
        """Reserve the memory that an explainer needs. If too little is free, unload idle explainers first, the least
        recently used one first. Raises InsufficientMemory.
        """
        need = explainer_memory_need(size, self._settings)
        while need.total > self._budget.free:
            idle = next((name for name in self._explainers if not self._is_used(name)), "")
            if not idle:
                free = f"{max(self._budget.free, 0) >> 20} of {self._budget.limit >> 20} MiB are free"
                raise InsufficientMemory(f"to explain {size.name} takes {-(-need.total >> 20)} MiB more, and {free}")
            await self._unload(idle)
        self._budget.reserve(need)
        return need

    async def _load_worker(
        self, loading: LoadTask, model: Model, weights: WeightReader, need: MemoryNeed
    ) -> ExplainWorker:
        def yield_turn() -> None:
            loading.check()
            self._engine.yield_turn()

        def build() -> ExplainWorker:
            worker = self._build_worker(model, weights, yielding_progress(yield_turn, loading))
            worker.warm_up(yield_turn)
            return worker

        with ExitStack() as undo:
            undo.callback(self._budget.release, need)
            worker = await loading.on_engine(self._engine, build)
            undo.pop_all()
        return worker

    def _build_worker(self, model: Model, weights: WeightReader, progress: Callable[[int, int], None]) -> ExplainWorker:
        """Read the checkpoint in float32 and build the worker. Called on the engine's thread."""
        loaded = checkpoint.load_built(
            model.source, weights, dtype=torch.float32, device=self._device, progress=progress
        )
        instrumented = InstrumentedNetwork(loaded.network, loaded.head)
        head = (
            None
            if loaded.decoding is not None or isinstance(loaded.head, LanguageHead)
            else cast(OutputHead, loaded.head)
        )
        operations = self._settings.explain_gflop * GIGA
        limit = WorkLimit(loaded.config, loaded.decoder_config, operations, measure_head(loaded.head))
        worker = ExplainWorker(instrumented, head, model=model.name, answers=model.task, piece=CHUNK_TOKENS)
        worker.check_cost = limit.check
        return worker


def build_and_measure(name: str, description: Description) -> tuple[WeightReader, ModelSize]:
    """Build a described network without its weights and measure it. Raises ModelError."""
    weights = WeightReader(description)
    _ = description.text_tokenizer  # made here: the engine's thread needs it
    return weights, measure_model(name, description, weights=weights)
