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

from polyhead.models.checkpoint.unmerged_adapter import Trunk

from ..concurrency.outcome import outcome_of
from ..config.settings import Settings
from ..core.errors import (
    BadRequest,
    Cancelled,
    Conflict,
    NotFound,
    PolyheadError,
    Stopped,
    Unavailable,
    outward,
    spoken,
)
from ..core.model import Known, Model, State, concerning
from ..core.names import listed, trunk_of
from ..core.request import Explain, Request, Task
from ..engine.engine import Engine, Stream
from ..engine.worker import Worker
from .explain_models import Watching
from .load_task import Loading
from .loader import Beside, Described, Executed, Heard, Loader, Served
from .model_resolver import Offer
from .operation import Change, broken_trunk, complain, failure, refuse_name, refuse_unknown

LATE_S = 1.0  # for requests that found a model before it was taken away and are not submitted yet
LONGEST_WAIT = 60  # seconds
MOST_ALIASES = 256
STOPPED = (Stopped, Unavailable)  # the engine ends, and nothing is wrong with the model

log = logging.getLogger("polyhead.registry")


class Told(Protocol):
    """Who hears that models come and go."""

    def loaded(self, model: Model) -> None: ...

    def unloaded(self, model: Model) -> None: ...


class Registry:
    """Lives on the event loop thread; what the engine thread writes is one state at a time."""

    def __init__(self, engine: Engine, settings: Settings, told: Told, executed: Executed = lambda it: it) -> None:
        """Raises SettingsError where the settings name a device or a model that is not there."""
        refuse_unknown(settings)
        self._engine, self._settings, self._told = engine, settings, told
        self._loader = Loader(engine, settings, executed)
        self._watching = Watching(engine, settings, self._loader)
        self._sources = dict(settings.models)
        self._states = {name: State("waiting") for name in settings.models}
        self._served: dict[str, Served] = {}
        self._retiring: list[Served] = []
        self._aliases: dict[str, str] = {}
        self._trunks = {name: trunk_of(name) for name in settings.models if trunk_of(name)}  # of adapters laid over one
        self._change: Change | None = None  # the last one
        self._loadings: dict[str, Loading] = {}  # of names that are loaded now, or wait for that
        self._began = time.monotonic()

    # Who is there

    def names(self) -> list[str]:
        """All names there are, in the order they were given, ready or not."""
        return list(self._states)

    def states(self) -> Mapping[str, State]:
        return dict(self._states)

    def models(self) -> list[Model]:
        """The ready ones."""
        return [self._served[name].model for name in self._states if name in self._served]

    def known(self) -> list[Known]:
        return [self._known(name) for name in self._states]

    def spent(self) -> Mapping[str, float]:
        """Seconds by stage that loading took so far."""
        return dict(self._loader.spent)

    def memory(self) -> tuple[int, int]:
        """Bytes of the budget, and those of it that are free."""
        return self._loader.budget.limit, self._loader.budget.free

    def held(self) -> int:
        """Bytes of this machine's memory that models take; on a GPU none."""
        limit, free = self.memory()
        return limit - free if self._loader.place.device.type == "cpu" else 0

    def cache(self) -> tuple[int, int]:
        """Blocks in the caches of all models, and how many tokens the largest have."""
        needs = [served.need for served in self._served.values() if not served.model.adapter]
        return sum(need.blocks for need in needs), max((need.block_size for need in needs), default=0)

    def resolve(self, name: str, tasks: Collection[Task]) -> Model:
        """The model called `name`, if it is ready and does one of `tasks`; the error says what would be right.

        Where one model is served, a placeholder names it.
        """
        return self._offer().resolve(name, tasks)

    def expand(self, name: str) -> str:
        """The name of the one model that is served, where `name` is a placeholder and no alias; else `name`."""
        return self._offer().expand(name)

    def only(self, tasks: Collection[Task]) -> Model:
        """The one model that does one of `tasks`, for routes that name none."""
        return self._offer().only(tasks)

    def _offer(self) -> Offer:
        return Offer(self._states, self.models(), self._unavailable, self._aliases)

    def submit(self, model: Model, requests: Sequence[Request]) -> list[Stream]:
        with concerning(model):
            return self._engine.submit(self._worker(model, requests), requests)

    async def watch(self, model: Model) -> Mapping[str, tuple[int, int]]:
        """See to it that there is what explains its answers, before requests to do so are submitted; see Watching.

        Raises Unavailable for a model that was taken away: the network would be read after its model's was forgotten.
        """
        self._find(model)
        trunk = trunk_of(model.name)
        source = f"{self._sources[trunk]}+{model.source}" if trunk else model.source
        with concerning(model):
            return await self._watching.watch(model, source)

    # At the start

    def defer(self) -> None:
        """None of the models of the settings is there before it is loaded as any other."""
        self._states, self._sources, self._trunks = {}, {}, {}

    async def load_all(self) -> None:
        """Load the models of the settings, in order.  Those that cannot be loaded are broken; nothing is raised."""
        self._began = time.monotonic()
        change = self._change = Change("", "loading the models of the settings")
        described: dict[str, Described] = {}
        beside: dict[str, Beside] = {}
        seconds = self._settings.load_seconds
        self._loadings = {name: Loading(name, seconds, self._hear(name)) for name in self._sources}
        for name in list(self._loadings):
            if not trunk_of(name):
                await self._attempt(name, lambda one: self._describe(one, described))
        for name in list(self._loadings):
            if trunk_of(name):
                await self._attempt(name, lambda one: self._lay(one, described, beside))
        for name in list(described):
            await self._attempt(name, lambda one: self._load_first(one, described, beside))
        for name in list(beside):
            await self._attempt(name, lambda one: self._attach_first(one, beside))
        change.phase = "over"

    def _hear(self, name: str) -> Heard:
        def hear(fraction: float) -> None:
            self._states[name] = State("loading", fraction)

        return hear

    async def _attempt(self, name: str, work: Callable[[Loading], Coroutine[Any, Any, None]]) -> None:
        """Whatever a checkpoint makes a library raise breaks that model alone.  One that is cancelled is forgotten."""
        if name not in self._loadings:
            return  # cancelled before
        loading = self._loadings[name]
        outcome = await outcome_of(loading.run(work(loading)))
        if isinstance(outcome, STOPPED):
            raise asyncio.CancelledError
        if outcome is not None or name in self._served:
            del self._loadings[name]
        if isinstance(outcome, Cancelled):
            self._forget(name)
        elif isinstance(outcome, Exception):
            self._states[name] = State("broken", why=spoken(outcome))
            complain(f"{name} is broken", outcome)
        elif outcome is not None:
            raise outcome  # this task is cancelled
        if name not in self._loadings:
            loading.over.set()

    async def _describe(self, loading: Loading, described: dict[str, Described]) -> None:
        described[loading.name] = await self._loader.describe(loading, self._sources[loading.name])

    async def _lay(self, loading: Loading, described: Mapping[str, Described], beside: dict[str, Beside]) -> None:
        name, trunk = loading.name, trunk_of(loading.name)
        if trunk not in described:
            raise broken_trunk(trunk, self._states.get(trunk))
        beside[name] = await self._loader.lay(loading, self._sources[name], Trunk(described[trunk].what))

    async def _attach_first(self, loading: Loading, beside: dict[str, Beside]) -> None:
        trunk, mine = trunk_of(loading.name), beside.pop(loading.name)
        if trunk not in self._served:
            raise broken_trunk(trunk, self._states.get(trunk))
        self._publish(await self._loader.attach(loading, mine, self._served[trunk]))

    async def _load_first(
        self, loading: Loading, described: dict[str, Described], beside: Mapping[str, Beside]
    ) -> None:
        loading.hear(0.0)
        mine = described.pop(loading.name)
        there = self._states.keys()  # not those that were cancelled meanwhile
        kept = sum(other.need.total for name, other in beside.items() if name in there)
        others = [other.sized for name, other in described.items() if name in there]
        self._publish(await self._loader.load(loading, mine, others, kept))

    # Later

    def load(self, name: str, source: str, *, merge: bool = False) -> Change:
        """One more model; a name BASE:NAME is that of an adapter of the model BASE.

        `merge` makes a model of its own of both.  Raises BadRequest, NotFound or Conflict before anything is begun.
        """
        refuse_name(name, "name")
        if name in self._states:
            raise Conflict(f"{name} is served already; reload it, or unload it first", param="name")
        if name in self._aliases:
            raise Conflict(f"{name} is an alias of {self._aliases[name]}; remove it first", param="name")
        trunk = self._trunk(name, merge=merge)
        if merge:
            source = f"{self._sources[trunk]}+{source}"
        change = self._next(name, f"loading {name} from {source}")
        return self._begin(change, self._load(change, source, 0.0, "" if merge else trunk))

    def _trunk(self, name: str, *, merge: bool) -> str:
        """Over which model the adapter of that name is to be laid, or with which it is to be merged; empty: none."""
        trunk = trunk_of(name)
        if merge and not trunk:
            raise BadRequest(f"merge: a name like BASE:{name} says with what", param="merge")
        if trunk and trunk not in self._served:
            raise self._unavailable(trunk)
        return trunk

    def reload(self, name: str, source: str, drain_s: float) -> Change:
        """The same name from its source, or from a new one; the old one serves until the new one is warm."""
        self._refuse_unknown(name)
        self._refuse_trunk(name, [adapter for adapter in self._trunks if adapter in self._served])
        trunk = self._trunks.get(name, "")
        if trunk and trunk not in self._served:
            raise self._unavailable(trunk)
        source = source or self._sources[name]
        change = self._next(name, f"reloading {name} from {source}")
        return self._begin(change, self._load(change, source, drain_s, trunk))

    def unload(self, name: str, drain_s: float) -> Change:
        """The name is gone at once; what runs may end in `drain_s` seconds.

        Of a model that is being loaded the load is cancelled; if it is loaded again, the old one goes on serving.
        """
        if name in self._loadings:
            return self._cancel(name)
        self._refuse_unknown(name)
        aliases = self._aliases_of(name)
        if aliases:
            raise Conflict(f"{name} has aliases: {listed(aliases)}; remove them first, or point them elsewhere")
        self._refuse_trunk(name, self._trunks)
        change = self._next(name, f"unloading {name}")
        change.phase = "draining"
        self._forget(name)
        return self._begin(change, self._unload(name, drain_s))

    def _cancel(self, name: str) -> Change:
        """The end of its load, however that ends."""
        loading, change = self._loadings[name], self._change
        assert change is not None
        cancelled = Change(name, f"cancelling the load of {name}")
        loading.cancel()
        if not loading.running:  # at the start, where others are loaded before it
            del self._loadings[name]
            self._forget(name)
            loading.over.set()
        cancelled.begin(change.over() if change.name else loading.over.wait())
        return cancelled

    def _forget(self, name: str) -> None:
        del self._states[name], self._sources[name]
        self._trunks.pop(name, None)
        self._aliases = {alias: target for alias, target in self._aliases.items() if target != name}

    def alias(self, alias: str, name: str) -> None:
        """From now on requests to `alias` are requests to `name`."""
        refuse_name(alias, "alias")
        if alias in self._states or (self.change and self.change.name == alias):
            raise Conflict(f"{alias} is a model, an alias cannot have its name", param="alias")
        self._refuse_unknown(name)
        if alias not in self._aliases and len(self._aliases) >= MOST_ALIASES:
            raise Conflict(f"there are {MOST_ALIASES} aliases, more are not kept; remove one first", param="alias")
        self._aliases[alias] = name

    def unalias(self, alias: str) -> None:
        if alias not in self._aliases:
            raise NotFound(f"no alias is called {alias[:100]!r}; there are:").listing(self._aliases)
        del self._aliases[alias]

    @property
    def change(self) -> Change | None:
        """What is going on."""
        return self._change if self._change and self._change.phase != "over" else None

    def _next(self, name: str, what: str) -> Change:
        if self.change:
            progress = f", {self.change.fraction:.0%} is read" if self.change.phase == "loading" else ""
            raise Conflict(f"{outward(self.change.what)} is going on{progress}; models change one after the other")
        return Change(name, what)

    def _begin(self, change: Change, work: Coroutine[Any, Any, None]) -> Change:
        log.info("%s", change.what)
        self._change = change
        change.begin(self._tidied(change.what, work))
        return change

    async def _tidied(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        """Whatever it leaves behind is given back.  Raises a PolyheadError."""
        outcome = await outcome_of(work)
        if isinstance(outcome, Exception):
            complain(f"{what} failed", outcome)
            outcome = failure(what, outcome)  # without the traceback, which holds all that was read
        if not isinstance(outcome, STOPPED):
            await self._loader.give_back()
        if outcome is not None:
            raise outcome

    async def _load(self, change: Change, source: str, drain_s: float, trunk: str) -> None:
        old = [self._served[change.name]] if change.name in self._served else []
        loading = Loading(change.name, self._settings.load_seconds, change.hear)
        self._loadings[change.name] = loading
        try:
            served = await loading.run(self._loaded(loading, source, trunk))
        finally:
            del self._loadings[change.name]
        if trunk:
            self._trunks[change.name] = trunk
        self._sources[change.name] = source
        self._publish(served)  # nothing is awaited in between: whoever asks finds the one or the other
        change.phase = "draining"
        while old:
            await self._retire(old.pop(), drain_s)

    async def _loaded(self, loading: Loading, source: str, trunk: str) -> Served:
        if trunk:
            beside = await self._loader.lay(loading, source, self._served[trunk].trunk)
            return await self._loader.attach(loading, beside, self._served[trunk])
        return await self._loader.load(loading, await self._loader.describe(loading, source))

    async def _unload(self, name: str, drain_s: float) -> None:
        if name in self._served:  # else it was broken
            await self._retire(self._served.pop(name), drain_s)

    async def _retire(self, served: Served, drain_s: float) -> None:
        self._retiring.append(served)
        late = min(LATE_S, drain_s)
        await asyncio.sleep(late)
        self._retiring.remove(served)
        await self._watching.forget(served.model)
        await self._loader.retire(served, drain_s - late)
        if served.model.name not in self._states:
            self._told.unloaded(served.model)

    def _publish(self, served: Served) -> None:
        name = served.model.name
        self._served[name], self._states[name] = served, State("ready", 1.0)
        self._told.loaded(served.model)

    # What is said of a name

    def _worker(self, model: Model, requests: Sequence[Request]) -> Worker:
        if requests and isinstance(requests[0], Explain):
            if (explainer := self._watching.worker(model)) is None:
                message = f"the network that explains {model.name} was given back while this was read; send it again"
                raise Unavailable(message, retry_after=1)
            return explainer
        return self._find(model).worker

    def _find(self, model: Model) -> Served:
        """As which a model is served, or was until a moment ago.  Raises Unavailable."""
        for served in (*self._retiring, *self._served.values()):
            if served.model is model:
                return served
        raise Unavailable(f"{model.name} was taken away while this was read; send it again", retry_after=1)

    def _known(self, name: str) -> Known:
        served = self._served.get(name)
        task, memory = (served.model.task, served.need.total) if served else (None, 0)
        aliases, explaining = tuple(self._aliases_of(name)), self._watching.held(name)
        return Known(name, self._sources[name], self._states[name], task, memory, aliases, explaining)

    def _aliases_of(self, name: str) -> list[str]:
        return [alias for alias, target in self._aliases.items() if target == name]

    def _refuse_unknown(self, name: str) -> None:
        if name not in self._states:
            raise NotFound(f"no model is called {name[:100]!r}; there are:", param="model").listing(self._states)

    def _refuse_trunk(self, name: str, adapters: Iterable[str]) -> None:
        """Conflict where one of these is laid over it."""
        if adapters := [adapter for adapter in adapters if self._trunks[adapter] == name]:
            raise Conflict(f"{name} has adapters: {listed(adapters)}; unload them first")

    def _unavailable(self, name: str) -> PolyheadError:
        if self.change and self.change.name == name and self.change.phase == "loading":
            return Unavailable(f"{name} is not ready yet, {self.change.fraction:.0%} is read", retry_after=1)
        if name not in self._states:
            there = (*self._states, *self._aliases)
            return NotFound(f"no model is called {name[:100]!r}; there are:", param="model").listing(there)
        state = self._states[name]
        if state.phase == "broken":
            return Unavailable(f"{name} could not be loaded: {state.why}")
        share = f", {state.fraction:.0%} is read" if state.phase == "loading" else ", others are loaded first"
        return Unavailable(f"{name} is not ready yet{share}", retry_after=self._wait())

    def _wait(self) -> int:
        """Seconds until all is loaded, if the rest takes as long as what is done so far."""
        done = sum(1.0 if state.settled else state.fraction for state in self._states.values()) / len(self._states)
        elapsed = time.monotonic() - self._began
        return min(max(math.ceil(elapsed * (1 - done) / max(done, 0.01)), 1), LONGEST_WAIT)
