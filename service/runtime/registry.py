"""Served models by name: what each is, how far it is, and the worker that computes it.

Knows no HTTP.  The one idea: models change one after the other, and a name belongs to the old one until the new one is
warm; one that cannot be loaded says why and leaves the others alone.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
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
from .loader import DescribedModel, ExecutorHook, LoadedModel, Loader, LoadProgress, UnmergedAdapter
from .model_resolver import ModelResolver
from .operation import ModelOperation, base_model_error, check_name, check_setting_names, log_failure, operation_error

SUBMIT_GRACE_S = 1.0  # for requests that found a model before it was taken away and are not submitted yet
MAX_RETRY_S = 60  # seconds
MAX_ALIASES = 256
ENGINE_STOPPED = (Stopped, Unavailable)  # the engine ends, and nothing is wrong with the model

log = logging.getLogger("polyhead.registry")


class ModelObserver(Protocol):
    """Who hears that models come and go."""

    def record_loaded(self, model: Model) -> None: ...

    def record_unloaded(self, model: Model) -> None: ...


class ModelRegistry:
    """Lives on the event loop thread; what the engine thread writes is one state at a time."""

    def __init__(
        self, engine: Engine, settings: Settings, told: ModelObserver, executed: ExecutorHook = lambda it: it
    ) -> None:
        """Raises SettingsError where the settings name a device or a model that is not there."""
        check_setting_names(settings)
        self._engine, self._settings, self._observer = engine, settings, told
        self._loader = Loader(engine, settings, executed)
        self._explainers = ExplainerCache(engine, settings, self._loader)
        self._sources = dict(settings.models)
        self._states = {name: LoadState("waiting") for name in settings.models}
        self._loaded_models: dict[str, LoadedModel] = {}
        self._retiring: list[LoadedModel] = []
        self._aliases: dict[str, str] = {}
        self._base_models = {
            name: base_model_name(name) for name in settings.models if base_model_name(name)
        }  # of adapters laid over one
        self._operation: ModelOperation | None = None  # the last one
        self._load_tasks: dict[str, LoadTask] = {}  # of names that are loaded now, or wait for that
        self._started = time.monotonic()

    # Who is there

    def names(self) -> list[str]:
        """All names there are, in the order they were given, ready or not."""
        return list(self._states)

    def states(self) -> Mapping[str, LoadState]:
        return dict(self._states)

    def models(self) -> list[Model]:
        """The ready ones."""
        return [self._loaded_models[name].model for name in self._states if name in self._loaded_models]

    def model_statuses(self) -> list[ServedName]:
        return [self._model_status(name) for name in self._states]

    def stage_seconds(self) -> Mapping[str, float]:
        """Seconds by stage that loading took so far."""
        return dict(self._loader.stage_seconds)

    def memory_budget(self) -> tuple[int, int]:
        """Bytes of the budget, and those of it that are free."""
        return self._loader.budget.limit, self._loader.budget.free

    def held_bytes(self) -> int:
        """Bytes of this machine's memory that models take; on a GPU none."""
        limit, free = self.memory_budget()
        return limit - free if self._loader.placement.device.type == "cpu" else 0

    def cache_size(self) -> tuple[int, int]:
        """Blocks in the caches of all models, and how many tokens the largest have."""
        needs = [served.need for served in self._loaded_models.values() if not served.model.adapter]
        return sum(need.blocks for need in needs), max((need.block_size for need in needs), default=0)

    def resolve(self, name: str, tasks: Collection[Task]) -> Model:
        """The model called `name`, if it is ready and does one of `tasks`; the error says what would be right.

        Where one model is served, a placeholder names it.
        """
        return self._resolver().resolve(name, tasks)

    def expand(self, name: str) -> str:
        """The name of the one model that is served, where `name` is a placeholder and no alias; else `name`."""
        return self._resolver().expand(name)

    def resolve_only(self, tasks: Collection[Task]) -> Model:
        """The one model that does one of `tasks`, for routes that name none."""
        return self._resolver().resolve_only(tasks)

    def _resolver(self) -> ModelResolver:
        return ModelResolver(self._states, self.models(), self._unavailable_error, self._aliases)

    def submit(self, model: Model, requests: Sequence[Request]) -> list[Stream]:
        with name_model_in_errors(model):
            return self._engine.submit(self._worker_for(model, requests), requests)

    async def load_explainer(self, model: Model) -> Mapping[str, tuple[int, int]]:
        """See to it that there is what explains its answers, before requests to do so are submitted; see Watching.

        Raises Unavailable for a model that was taken away: the network would be read after its model's was forgotten.
        """
        self._find(model)
        trunk = base_model_name(model.name)
        source = f"{self._sources[trunk]}+{model.source}" if trunk else model.source
        with name_model_in_errors(model):
            return await self._explainers.load(model, source)

    # At the start

    def defer_loading(self) -> None:
        """None of the models of the settings is there before it is loaded as any other."""
        self._states, self._sources, self._base_models = {}, {}, {}

    async def load_all(self) -> None:
        """Load the models of the settings, in order.  Those that cannot be loaded are broken; nothing is raised."""
        self._started = time.monotonic()
        change = self._operation = ModelOperation("", "loading the models of the settings")
        described: dict[str, DescribedModel] = {}
        beside: dict[str, UnmergedAdapter] = {}
        seconds = self._settings.load_seconds
        self._load_tasks = {name: LoadTask(name, seconds, self._progress_callback(name)) for name in self._sources}
        for name in list(self._load_tasks):
            if not base_model_name(name):
                await self._run_first_load(name, lambda one: self._describe_first(one, described))
        for name in list(self._load_tasks):
            if base_model_name(name):
                await self._run_first_load(name, lambda one: self._describe_adapter_first(one, described, beside))
        for name in list(described):
            await self._run_first_load(name, lambda one: self._load_first(one, described, beside))
        for name in list(beside):
            await self._run_first_load(name, lambda one: self._attach_first(one, beside))
        change.phase = "over"

    def _progress_callback(self, name: str) -> LoadProgress:
        def hear(fraction: float) -> None:
            self._states[name] = LoadState("loading", fraction)

        return hear

    async def _run_first_load(self, name: str, work: Callable[[LoadTask], Coroutine[Any, Any, None]]) -> None:
        """Whatever a checkpoint makes a library raise breaks that model alone.  One that is cancelled is forgotten."""
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
        described[loading.name] = await self._loader.describe(loading, self._sources[loading.name])

    async def _describe_adapter_first(
        self, loading: LoadTask, described: Mapping[str, DescribedModel], beside: dict[str, UnmergedAdapter]
    ) -> None:
        name, trunk = loading.name, base_model_name(loading.name)
        if trunk not in described:
            raise base_model_error(trunk, self._states.get(trunk))
        beside[name] = await self._loader.describe_adapter(
            loading, self._sources[name], BaseModel(described[trunk].description)
        )

    async def _attach_first(self, loading: LoadTask, beside: dict[str, UnmergedAdapter]) -> None:
        trunk, mine = base_model_name(loading.name), beside.pop(loading.name)
        if trunk not in self._loaded_models:
            raise base_model_error(trunk, self._states.get(trunk))
        self._publish(await self._loader.attach(loading, mine, self._loaded_models[trunk]))

    async def _load_first(
        self, loading: LoadTask, described: dict[str, DescribedModel], beside: Mapping[str, UnmergedAdapter]
    ) -> None:
        loading.report_progress(0.0)
        mine = described.pop(loading.name)
        there = self._states.keys()  # not those that were cancelled meanwhile
        kept = sum(other.need.total for name, other in beside.items() if name in there)
        others = [other.size for name, other in described.items() if name in there]
        self._publish(await self._loader.load(loading, mine, others, kept))

    # Later

    def load(self, name: str, source: str, *, merge: bool = False) -> ModelOperation:
        """One more model; a name BASE:NAME is that of an adapter of the model BASE.

        `merge` makes a model of its own of both.  Raises BadRequest, NotFound or Conflict before anything is begun.
        """
        check_name(name, "name")
        if name in self._states:
            raise Conflict(f"{name} is served already; reload it, or unload it first", param="name")
        if name in self._aliases:
            raise Conflict(f"{name} is an alias of {self._aliases[name]}; remove it first", param="name")
        trunk = self._check_base_model(name, merge=merge)
        if merge:
            source = f"{self._sources[trunk]}+{source}"
        change = self._new_operation(name, f"loading {name} from {source}")
        return self._start_operation(change, self._load(change, source, 0.0, "" if merge else trunk))

    def _check_base_model(self, name: str, *, merge: bool) -> str:
        """Over which model the adapter of that name is to be laid, or with which it is to be merged; empty: none."""
        trunk = base_model_name(name)
        if merge and not trunk:
            raise BadRequest(f"merge: a name like BASE:{name} says with what", param="merge")
        if trunk and trunk not in self._loaded_models:
            raise self._unavailable_error(trunk)
        return trunk

    def reload(self, name: str, source: str, drain_s: float) -> ModelOperation:
        """The same name from its source, or from a new one; the old one serves until the new one is warm."""
        self._check_served_name(name)
        self._check_no_adapters(name, [adapter for adapter in self._base_models if adapter in self._loaded_models])
        trunk = self._base_models.get(name, "")
        if trunk and trunk not in self._loaded_models:
            raise self._unavailable_error(trunk)
        source = source or self._sources[name]
        change = self._new_operation(name, f"reloading {name} from {source}")
        return self._start_operation(change, self._load(change, source, drain_s, trunk))

    def unload(self, name: str, drain_s: float) -> ModelOperation:
        """The name is gone at once; what runs may end in `drain_s` seconds.

        Of a model that is being loaded the load is cancelled; if it is loaded again, the old one goes on serving.
        """
        if name in self._load_tasks:
            return self._cancel_load(name)
        self._check_served_name(name)
        aliases = self._aliases_of(name)
        if aliases:
            raise Conflict(f"{name} has aliases: {join_names(aliases)}; remove them first, or point them elsewhere")
        self._check_no_adapters(name, self._base_models)
        change = self._new_operation(name, f"unloading {name}")
        change.phase = "draining"
        self._forget(name)
        return self._start_operation(change, self._unload(name, drain_s))

    def _cancel_load(self, name: str) -> ModelOperation:
        """The end of its load, however that ends."""
        loading, change = self._load_tasks[name], self._operation
        assert change is not None
        cancelled = ModelOperation(name, f"cancelling the load of {name}")
        loading.cancel()
        if not loading.is_running:  # at the start, where others are loaded before it
            del self._load_tasks[name]
            self._forget(name)
            loading.finished.set()
        cancelled.start(change.wait() if change.name else loading.finished.wait())
        return cancelled

    def _forget(self, name: str) -> None:
        del self._states[name], self._sources[name]
        self._base_models.pop(name, None)
        self._aliases = {alias: target for alias, target in self._aliases.items() if target != name}

    def alias(self, alias: str, name: str) -> None:
        """From now on requests to `alias` are requests to `name`."""
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
        """What is going on."""
        return self._operation if self._operation and self._operation.phase != "over" else None

    def _new_operation(self, name: str, what: str) -> ModelOperation:
        if self.operation:
            progress = f", {self.operation.fraction:.0%} is read" if self.operation.phase == "loading" else ""
            raise Conflict(
                f"{redact_locations(self.operation.description)} is going on{progress}; "
                "models change one after the other"
            )
        return ModelOperation(name, what)

    def _start_operation(self, change: ModelOperation, work: Coroutine[Any, Any, None]) -> ModelOperation:
        log.info("%s", change.description)
        self._operation = change
        change.start(self._run_operation(change.description, work))
        return change

    async def _run_operation(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        """Whatever it leaves behind is given back.  Raises a PolyheadError."""
        outcome = await wait_for_error(work)
        if isinstance(outcome, Exception):
            log_failure(f"{what} failed", outcome)
            outcome = operation_error(what, outcome)  # without the traceback, which holds all that was read
        if not isinstance(outcome, ENGINE_STOPPED):
            await self._loader.release_memory()
        if outcome is not None:
            raise outcome

    async def _load(self, change: ModelOperation, source: str, drain_s: float, trunk: str) -> None:
        old = [self._loaded_models[change.name]] if change.name in self._loaded_models else []
        loading = LoadTask(change.name, self._settings.load_seconds, change.report_progress)
        self._load_tasks[change.name] = loading
        try:
            served = await loading.run(self._load_or_attach(loading, source, trunk))
        finally:
            del self._load_tasks[change.name]
        if trunk:
            self._base_models[change.name] = trunk
        self._sources[change.name] = source
        self._publish(served)  # nothing is awaited in between: whoever asks finds the one or the other
        change.phase = "draining"
        while old:
            await self._retire(old.pop(), drain_s)

    async def _load_or_attach(self, loading: LoadTask, source: str, trunk: str) -> LoadedModel:
        if trunk:
            beside = await self._loader.describe_adapter(loading, source, self._loaded_models[trunk].base_model)
            return await self._loader.attach(loading, beside, self._loaded_models[trunk])
        return await self._loader.load(loading, await self._loader.describe(loading, source))

    async def _unload(self, name: str, drain_s: float) -> None:
        if name in self._loaded_models:  # else it was broken
            await self._retire(self._loaded_models.pop(name), drain_s)

    async def _retire(self, served: LoadedModel, drain_s: float) -> None:
        self._retiring.append(served)
        late = min(SUBMIT_GRACE_S, drain_s)
        await asyncio.sleep(late)
        self._retiring.remove(served)
        await self._explainers.unload(served.model)
        await self._loader.retire(served, drain_s - late)
        if served.model.name not in self._states:
            self._observer.record_unloaded(served.model)

    def _publish(self, served: LoadedModel) -> None:
        name = served.model.name
        self._loaded_models[name], self._states[name] = served, LoadState("ready", 1.0)
        self._observer.record_loaded(served.model)

    # What is said of a name

    def _worker_for(self, model: Model, requests: Sequence[Request]) -> Worker:
        if requests and isinstance(requests[0], ExplainTextRequest):
            if (explainer := self._explainers.find_worker(model)) is None:
                message = f"the network that explains {model.name} was given back while this was read; send it again"
                raise Unavailable(message, retry_after=1)
            return explainer
        return self._find(model).worker

    def _find(self, model: Model) -> LoadedModel:
        """As which a model is served, or was until a moment ago.  Raises Unavailable."""
        for served in (*self._retiring, *self._loaded_models.values()):
            if served.model is model:
                return served
        raise Unavailable(f"{model.name} was taken away while this was read; send it again", retry_after=1)

    def _model_status(self, name: str) -> ServedName:
        served = self._loaded_models.get(name)
        task, memory = (served.model.task, served.need.total) if served else (None, 0)
        aliases, explaining = tuple(self._aliases_of(name)), self._explainers.held_bytes(name)
        return ServedName(name, self._sources[name], self._states[name], task, memory, aliases, explaining)

    def _aliases_of(self, name: str) -> list[str]:
        return [alias for alias, target in self._aliases.items() if target == name]

    def _check_served_name(self, name: str) -> None:
        if name not in self._states:
            raise NotFound(f"no model is called {name[:100]!r}; there are:", param="model").with_names(self._states)

    def _check_no_adapters(self, name: str, adapters: Iterable[str]) -> None:
        """Conflict where one of these is laid over it."""
        if adapters := [adapter for adapter in adapters if self._base_models[adapter] == name]:
            raise Conflict(f"{name} has adapters: {join_names(adapters)}; unload them first")

    def _unavailable_error(self, name: str) -> PolyheadError:
        if self.operation and self.operation.name == name and self.operation.phase == "loading":
            return Unavailable(f"{name} is not ready yet, {self.operation.fraction:.0%} is read", retry_after=1)
        if name not in self._states:
            there = (*self._states, *self._aliases)
            return NotFound(f"no model is called {name[:100]!r}; there are:", param="model").with_names(there)
        state = self._states[name]
        if state.phase == "broken":
            return Unavailable(f"{name} could not be loaded: {state.reason}")
        share = f", {state.fraction:.0%} is read" if state.phase == "loading" else ", others are loaded first"
        return Unavailable(f"{name} is not ready yet{share}", retry_after=self._retry_after())

    def _retry_after(self) -> int:
        """Seconds until all is loaded, if the rest takes as long as what is done so far."""
        done = sum(1.0 if state.is_final else state.fraction for state in self._states.values()) / len(self._states)
        elapsed = time.monotonic() - self._started
        return min(max(math.ceil(elapsed * (1 - done) / max(done, 0.01)), 1), MAX_RETRY_S)
