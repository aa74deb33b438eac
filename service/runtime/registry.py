"""The registry of served models: the state of each name, and the worker that computes its model.

Models change one after the other. When a model is reloaded, requests go to the old one until the new one is warm. A
model that cannot be loaded is marked broken, with the reason, and does not affect the others.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from polyhead.models.checkpoint.unmerged_adapter import BaseModel

from ..concurrency.outcome import wait_for_error
from ..config.settings import Settings
from ..core.errors import (
    BadRequest,
    Cancelled,
    Conflict,
    NotFound,
    PolyheadError,
    Stopped,
    Unavailable,
    client_message,
    redact_locations,
)
from ..core.model import LoadState, Model, ServedName, name_model_in_errors
from ..core.names import base_model_name, join_names
from ..core.request import ExplainTextRequest, Request, Task
from ..engine.engine import Engine, Stream
from ..engine.worker import Worker
from .explain_models import ExplainerCache
from .load_task import LoadTask
from .loader import DescribedModel, ExecutorHook, LoadedModel, Loader, UnmergedAdapter
from .memory_budget import adapter_bytes
from .model_resolver import ModelResolver
from .operation import ModelOperation, base_model_error, check_name, check_setting_names, log_failure, operation_error

SUBMIT_GRACE_S = 1.0  # seconds for requests that have resolved a model before it was removed, to be submitted
MAX_RETRY_S = 60  # seconds
MAX_ALIASES = 256
ENGINE_STOPPED = (Stopped, Unavailable)  # the engine is closing; nothing is wrong with the model

log = logging.getLogger("polyhead.registry")


class ModelObserver(Protocol):
    """Is called when a model becomes available and when it is removed."""

    def record_loaded(self, model: Model) -> None: ...

    def record_unloaded(self, model: Model) -> None: ...


class ModelRegistry:
    """Used on the event loop thread only."""

    def __init__(
        self, engine: Engine, settings: Settings, observer: ModelObserver, executor_hook: ExecutorHook = lambda it: it
    ) -> None:
        """Raises SettingsError where the settings name a device or a model that is not there."""
        check_setting_names(settings)
        self._engine, self._settings, self._observer = engine, settings, observer
        self._loader = Loader(engine, settings, executor_hook)
        self._explainers = ExplainerCache(engine, settings, self._loader)
        self._sources = dict(settings.models)
        self._states = {name: LoadState("waiting") for name in settings.models}
        self._loaded_models: dict[str, LoadedModel] = {}
        self._retiring: list[LoadedModel] = []
        self._aliases: dict[str, str] = {}
        self._base_models = {
            name: base_model_name(name) for name in settings.models if base_model_name(name)
        }  # of adapters: the name of the base model
        self._operation: ModelOperation | None = None  # the latest one
        self._load_tasks: dict[str, LoadTask] = {}  # of names that are being loaded or wait to be loaded
        self._started = time.monotonic()

    # Queries

    def names(self) -> list[str]:
        """All names in the order in which they were given, ready or not."""
        return list(self._states)

    def states(self) -> Mapping[str, LoadState]:
        return {name: self._state(name) for name in self._states}

    def _state(self, name: str) -> LoadState:
        state = self._states[name]
        if state.phase == "waiting" and name in self._load_tasks and self._load_tasks[name].is_downloading:
            return LoadState("downloading", self._load_tasks[name].fraction)
        return replace(state, fraction=self._load_tasks[name].fraction) if state.phase == "loading" else state

    def models(self) -> list[Model]:
        """The models that are ready."""
        return [self._loaded_models[name].model for name in self._states if name in self._loaded_models]

    def model_statuses(self) -> list[ServedName]:
        return [self._model_status(name) for name in self._states]

    def stage_seconds(self) -> Mapping[str, float]:
        """Seconds that loading has taken so far, by stage."""
        return dict(self._loader.stage_seconds)

    def memory_budget(self) -> tuple[int, int]:
        """The bytes of the memory budget, and how many of them are free."""
        return self._loader.budget.limit, self._loader.budget.free

    def held_bytes(self) -> int:
        """Bytes of main memory that models hold; 0 if they are on a GPU."""
        limit, free = self.memory_budget()
        return limit - free if self._loader.placement.device.type == "cpu" else 0

    def cache_size(self) -> tuple[int, int]:
        """The number of blocks in the caches of all models, and the largest block size in tokens."""
        needs = [served.need for served in self._loaded_models.values() if not served.model.adapter]
        return sum(need.blocks for need in needs), max((need.block_size for need in needs), default=0)

    def resolve(self, name: str, tasks: Collection[Task]) -> Model:
        """Return the model called `name` if it is ready and does one of `tasks`. The error says what would be right.

        A placeholder stands for the only model that does one of `tasks`.
        """
        return self._resolver().resolve(name, tasks)

    def expand(self, name: str, tasks: Collection[Task]) -> str:
        """Return the name of the only model that does one of `tasks` if `name` is a placeholder; else `name`."""
        return self._resolver().expand(name, tasks)

    def resolve_only(self, tasks: Collection[Task]) -> Model:
        """Return the one model that does one of `tasks`, for routes without a model name."""
        return self._resolver().resolve_only(tasks)

    def _resolver(self) -> ModelResolver:
        return ModelResolver(self.states(), self.models(), self._unavailable_error, self._aliases)

    def submit(self, model: Model, requests: Sequence[Request]) -> list[Stream]:
        with name_model_in_errors(model):
            return self._engine.submit(self._worker_for(model, requests), requests)

    async def load_explainer(self, model: Model) -> Mapping[str, tuple[int, int]]:
        """Load the explainer of a model, if it is not loaded, before requests for explanations are submitted (see
        ExplainerCache.load).

        Raises Unavailable for a model that was removed: its explainer would be loaded after the model was unloaded.
        """
        description = self._find(model).description
        with name_model_in_errors(model):
            return await self._explainers.load(model, description)

    # Loads at the start of the server

    def defer_loading(self) -> None:
        """Forget the models of the settings: each of them will be loaded later, with `load`."""
        self._states, self._sources, self._base_models = {}, {}, {}

    async def load_all(self) -> None:
        """Load the models of the settings, in order. A model that cannot be loaded is marked broken;
        nothing is raised.
        """
        self._started = time.monotonic()
        operation = self._operation = ModelOperation("", "loading the models of the settings")
        described: dict[str, DescribedModel] = {}
        adapters: dict[str, UnmergedAdapter] = {}
        seconds = self._settings.load_seconds
        self._load_tasks = {name: LoadTask(name, seconds) for name in self._sources}
        for name in list(self._load_tasks):
            if not base_model_name(name):
                await self._run_first_load(name, lambda one: self._describe_first(one, described))
        for name in list(self._load_tasks):
            if base_model_name(name):
                await self._run_first_load(name, lambda one: self._describe_adapter_first(one, described, adapters))
        for name in list(described):
            await self._run_first_load(name, lambda one: self._load_first(one, described, adapters))
        for name in list(adapters):
            await self._run_first_load(name, lambda one: self._attach_first(one, adapters))
        operation.phase = "over"

    async def _run_first_load(self, name: str, work: Callable[[LoadTask], Coroutine[Any, Any, None]]) -> None:
        """Run one stage of a model's first load. Any error, also one that a checkpoint causes in a library, marks only
        this model as broken. The name of a cancelled load is removed.
        """
        if name not in self._load_tasks:
            return  # cancelled before
        loading = self._load_tasks[name]
        outcome = await wait_for_error(loading.run(work(loading)))
        if isinstance(outcome, ENGINE_STOPPED):
            raise asyncio.CancelledError
        if outcome is not None or name in self._loaded_models:
            del self._load_tasks[name]
        if isinstance(outcome, Cancelled):
            self._forget(name)
        elif isinstance(outcome, Exception):
            self._states[name] = LoadState("broken", reason=client_message(outcome))
            log_failure(f"{name} is broken", outcome)
        elif outcome is not None:
            raise outcome  # this task is cancelled
        if name not in self._load_tasks:
            loading.finished.set()

    async def _describe_first(self, loading: LoadTask, described: dict[str, DescribedModel]) -> None:
        kept = sum(other.tokenizer_bytes for other in described.values())
        described[loading.name] = await self._loader.describe(loading, self._sources[loading.name], kept)

    async def _describe_adapter_first(
        self, loading: LoadTask, described: Mapping[str, DescribedModel], adapters: dict[str, UnmergedAdapter]
    ) -> None:
        name, base = loading.name, base_model_name(loading.name)
        if base not in described:
            raise base_model_error(base, self._states.get(base))
        adapters[name] = await self._loader.describe_adapter(
            loading, self._sources[name], BaseModel(described[base].description)
        )

    async def _attach_first(self, loading: LoadTask, adapters: dict[str, UnmergedAdapter]) -> None:
        base, adapter = base_model_name(loading.name), adapters.pop(loading.name)
        if base not in self._loaded_models:
            raise base_model_error(base, self._states.get(base))
        self._publish(await self._loader.attach(loading, adapter, self._loaded_models[base]))

    async def _load_first(
        self, loading: LoadTask, described: dict[str, DescribedModel], adapters: Mapping[str, UnmergedAdapter]
    ) -> None:
        self._states[loading.name] = LoadState("loading")
        model = described.pop(loading.name)
        remaining = self._states.keys()  # without those that were cancelled meanwhile
        kept = adapter_bytes([other.need for name, other in adapters.items() if name in remaining])
        others = [other.size for name, other in described.items() if name in remaining]
        self._publish(await self._loader.load(loading, model, others, kept))

    # Operations

    def load(self, name: str, source: str, *, merge: bool = False) -> ModelOperation:
        """Start to load one more model; a name BASE:NAME is an adapter of the model BASE.

        With `merge`, adapter and base model become a model of their own. Raises BadRequest, NotFound or Conflict before
        the operation starts.
        """
        check_name(name, "name")
        if name in self._states:
            raise Conflict(f"{name} is served already; reload it, or unload it first", param="name")
        if name in self._aliases:
            raise Conflict(f"{name} is an alias of {self._aliases[name]}; remove it first", param="name")
        base = self._check_base_model(name, merge=merge)
        if merge:
            source = f"{self._sources[base]}+{source}"
        operation = self._new_operation(name, f"loading {name} from {source}")
        return self._start_operation(operation, self._load(operation, source, 0.0, "" if merge else base))

    def _check_base_model(self, name: str, *, merge: bool) -> str:
        """Return the name of the base model of an adapter, or of the model that it is merged with; empty for any other
        name. Raises an error if the base model is not ready.
        """
        base = base_model_name(name)
        if merge and not base:
            raise BadRequest(f"merge: a name like BASE:{name} says with what", param="merge")
        if base and base not in self._loaded_models:
            raise self._unavailable_error(base)
        return base

    def reload(self, name: str, source: str, drain_s: float) -> ModelOperation:
        """Start to load a model again, from its source or from a new one. The old model serves until the new one is
        warm.
        """
        self._check_served_name(name)
        self._check_no_adapters(name, [adapter for adapter in self._base_models if adapter in self._loaded_models])
        base = self._base_models.get(name, "")
        if base and base not in self._loaded_models:
            raise self._unavailable_error(base)
        source = source or self._sources[name]
        operation = self._new_operation(name, f"reloading {name} from {source}")
        return self._start_operation(operation, self._load(operation, source, drain_s, base))

    def unload(self, name: str, drain_s: float) -> ModelOperation:
        """Remove a name at once, and start to unload its model. Running requests have `drain_s` seconds to finish.

        If the model is being loaded, the load is cancelled. If it is being reloaded, the old model continues to serve.
        """
        if name in self._load_tasks:
            return self._cancel_load(name)
        self._check_served_name(name)
        aliases = self._aliases_of(name)
        if aliases:
            raise Conflict(f"{name} has aliases: {join_names(aliases)}; remove them first, or point them elsewhere")
        self._check_no_adapters(name, self._base_models)
        operation = self._new_operation(name, f"unloading {name}")
        operation.phase = "draining"
        self._forget(name)
        return self._start_operation(operation, self._unload(name, drain_s))

    def _cancel_load(self, name: str) -> ModelOperation:
        """Cancel a load. The returned operation ends with the load, whatever its outcome."""
        loading, operation = self._load_tasks[name], self._operation
        assert operation is not None
        cancelled = ModelOperation(name, f"cancelling the load of {name}")
        loading.cancel()
        if not loading.is_running:  # at the start of the server, while other models are loaded first
            del self._load_tasks[name]
            self._forget(name)
            loading.finished.set()
        cancelled.start(operation.wait() if operation.name else loading.finished.wait())
        return cancelled

    def _forget(self, name: str) -> None:
        del self._states[name], self._sources[name]
        self._base_models.pop(name, None)
        self._aliases = {alias: target for alias, target in self._aliases.items() if target != name}

    def alias(self, alias: str, name: str) -> None:
        """Send requests for `alias` to the model `name` from now on."""
        check_name(alias, "alias")
        if alias in self._states or (self.operation and self.operation.name == alias):
            raise Conflict(f"{alias} is a model, an alias cannot have its name", param="alias")
        self._check_served_name(name)
        if alias not in self._aliases and len(self._aliases) >= MAX_ALIASES:
            raise Conflict(f"there are {MAX_ALIASES} aliases, more are not kept; remove one first", param="alias")
        self._aliases[alias] = name

    def unalias(self, alias: str) -> None:
        if alias not in self._aliases:
            raise NotFound(f"no alias is called {alias[:100]!r}; there are:").with_names(self._aliases)
        del self._aliases[alias]

    @property
    def operation(self) -> ModelOperation | None:
        """The operation in progress, if there is one."""
        return self._operation if self._operation and self._operation.phase != "over" else None

    def _new_operation(self, name: str, description: str) -> ModelOperation:
        if self.operation:
            progress = f", {self.operation.progress}" if self.operation.phase == "loading" else ""
            raise Conflict(
                f"{redact_locations(self.operation.description)} is going on{progress}; "
                "models change one after the other"
            )
        return ModelOperation(name, description)

    def _start_operation(self, operation: ModelOperation, work: Coroutine[Any, Any, None]) -> ModelOperation:
        log.info("%s", operation.description)
        self._operation = operation
        operation.start(self._run_operation(operation.description, work))
        return operation

    async def _run_operation(self, description: str, work: Coroutine[Any, Any, None]) -> None:
        """Run an operation and release the memory that it leaves behind. Raises a PolyheadError."""
        outcome = await wait_for_error(work)
        if isinstance(outcome, Exception):
            log_failure(f"{description} failed", outcome)
            outcome = operation_error(description, outcome)  # without the traceback, which holds all that was read
        if not isinstance(outcome, ENGINE_STOPPED):
            await self._loader.release_memory()
        if outcome is not None:
            raise outcome

    async def _load(self, operation: ModelOperation, source: str, drain_s: float, base: str) -> None:
        old = [self._loaded_models[operation.name]] if operation.name in self._loaded_models else []
        loading = operation.load = LoadTask(operation.name, self._settings.load_seconds)
        self._load_tasks[operation.name] = loading
        try:
            served = await loading.run(self._load_or_attach(loading, source, base))
        finally:
            del self._load_tasks[operation.name]
        if base:
            self._base_models[operation.name] = base
        self._sources[operation.name] = source
        self._publish(served)  # without an await before it, so a request finds either the old model or the new one
        operation.phase = "draining"
        while old:
            await self._retire(old.pop(), drain_s)

    async def _load_or_attach(self, loading: LoadTask, source: str, base: str) -> LoadedModel:
        if base:
            adapter = await self._loader.describe_adapter(loading, source, self._loaded_models[base].base_model)
            return await self._loader.attach(loading, adapter, self._loaded_models[base])
        return await self._loader.load(loading, await self._loader.describe(loading, source))

    async def _unload(self, name: str, drain_s: float) -> None:
        if name in self._loaded_models:  # else it was broken
            await self._retire(self._loaded_models.pop(name), drain_s)

    async def _retire(self, served: LoadedModel, drain_s: float) -> None:
        self._retiring.append(served)
        grace = min(SUBMIT_GRACE_S, drain_s)
        await asyncio.sleep(grace)
        self._retiring.remove(served)
        await self._explainers.unload(served.model)
        await self._loader.retire(served, drain_s - grace)
        if served.model.name not in self._states:
            self._observer.record_unloaded(served.model)

    def _publish(self, served: LoadedModel) -> None:
        name = served.model.name
        self._loaded_models[name], self._states[name] = served, LoadState("ready", 1.0)
        self._observer.record_loaded(served.model)

    # State and worker of a name

    def _worker_for(self, model: Model, requests: Sequence[Request]) -> Worker:
        if requests and isinstance(requests[0], ExplainTextRequest):
            if (explainer := self._explainers.find_worker(model)) is None:
                message = f"the explainer of {model.name} was unloaded while the request was read; send it again"
                raise Unavailable(message, retry_after=1)
            return explainer
        return self._find(model).worker

    def _find(self, model: Model) -> LoadedModel:
        """Return the loaded model, which may have been removed a moment ago. Raises Unavailable if it is unloaded."""
        for served in (*self._retiring, *self._loaded_models.values()):
            if served.model is model:
                return served
        raise Unavailable(f"{model.name} was removed while the request was read; send it again", retry_after=1)

    def _model_status(self, name: str) -> ServedName:
        served = self._loaded_models.get(name)
        task, memory = (served.model.task, served.need.total) if served else (None, 0)
        aliases, explaining = tuple(self._aliases_of(name)), self._explainers.held_bytes(name)
        return ServedName(name, self._sources[name], self._state(name), task, memory, aliases, explaining)

    def _aliases_of(self, name: str) -> list[str]:
        return [alias for alias, target in self._aliases.items() if target == name]

    def _check_served_name(self, name: str) -> None:
        if name not in self._states:
            raise NotFound(f"no model is called {name[:100]!r}; there are:", param="model").with_names(self._states)

    def _check_no_adapters(self, name: str, adapters: Iterable[str]) -> None:
        """Raise Conflict if one of `adapters` is an adapter of the model."""
        if adapters := [adapter for adapter in adapters if self._base_models[adapter] == name]:
            raise Conflict(f"{name} has adapters: {join_names(adapters)}; unload them first")

    def _unavailable_error(self, name: str) -> PolyheadError:
        if self.operation and self.operation.name == name and self.operation.phase == "loading":
            return Unavailable(f"{name} is not ready yet, {self.operation.progress}", retry_after=1)
        if name not in self._states:
            names = (*self._states, *self._aliases)
            return NotFound(f"no model is called {name[:100]!r}; there are:", param="model").with_names(names)
        state = self._state(name)
        if state.phase == "broken":
            return Unavailable(f"{name} could not be loaded: {state.reason}")
        return Unavailable(f"{name} is not ready yet, {state.progress}", retry_after=self._retry_after())

    def _retry_after(self) -> int:
        """Estimate the seconds until all models are loaded, if loading continues at the rate so far."""
        states = self.states().values()
        done = sum(1.0 if state.is_final else state.read_fraction for state in states) / len(states)
        elapsed = time.monotonic() - self._started
        return min(max(math.ceil(elapsed * (1 - done) / max(done, 0.01)), 1), MAX_RETRY_S)
