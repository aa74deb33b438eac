"""Served models by name: what each is, how far it is, and the worker that computes it.

Knows no HTTP.  The one idea: models change one after the other, and a name belongs to the old one until the new one is
warm; one that cannot be loaded says why and leaves the others alone.
"""

import asyncio
import logging
import math
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol

from models.checkpoint.beside import Trunk
from service.change import REFUSALS, Change, failure
from service.engine.engine import Engine, Stream
from service.engine.worker import Worker
from service.errors import (
    BadRequest,
    Conflict,
    NotFound,
    PolyheadError,
    Stopped,
    Unavailable,
    outward,
    sentence,
    spoken,
)
from service.loader import Beside, Described, Executed, Loader, Served
from service.model import Known, Model, State, concerning
from service.names import NAME, is_name, trunk_of
from service.offer import Offer
from service.outcome import outcome_of
from service.request import Explain, Request, Task
from service.settings import Settings, SettingsError
from service.watching import Watching

LATE_S = 1.0  # for requests that found a model before it was taken away and are not submitted yet
LONGEST_WAIT = 60  # seconds
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
        self._engine, self._told = engine, told
        self._loader = Loader(engine, settings, executed)
        self._watching = Watching(engine, settings, self._loader)
        self._sources = dict(settings.models)
        self._states = {name: State("waiting") for name in settings.models}
        self._served: dict[str, Served] = {}
        self._retiring: list[Served] = []
        self._aliases: dict[str, str] = {}
        self._trunks = {name: trunk_of(name) for name in settings.models if trunk_of(name)}  # of adapters laid over one
        self._change: Change | None = None  # the last one
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
        return self._offer().resolve(name, tasks, self._aliases)

    def only(self, tasks: Collection[Task]) -> Model:
        """The one model that does one of `tasks`, for routes that name none."""
        return self._offer().only(tasks)

    def _offer(self) -> Offer:
        return Offer(self._states, self.models(), self._unavailable)

    def submit(self, model: Model, requests: Sequence[Request]) -> list[Stream]:
        with concerning(model):
            return self._engine.submit(self._worker(model, requests), requests)

    async def watch(self, model: Model) -> Mapping[str, tuple[int, int]]:
        """See to it that there is what explains its answers, before requests to do so are submitted; see Watching."""
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
        for name, source in self._sources.items():
            if not trunk_of(name):
                await self._attempt(name, self._describe(name, source, described))
        for name, source in self._sources.items():
            if trunk_of(name):
                await self._attempt(name, self._lay(name, source, described, beside))
        for name in list(described):
            await self._attempt(name, self._load_first(name, described, beside))
        for name in beside:
            await self._attempt(name, self._attach_first(beside[name]))
        change.phase = "over"

    async def _attempt(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Whatever a checkpoint makes a library raise breaks that model alone."""
        outcome = await outcome_of(work)
        if isinstance(outcome, STOPPED):
            raise asyncio.CancelledError
        if isinstance(outcome, Exception):
            self._states[name] = State("broken", why=spoken(outcome))
            complain(f"{name} is broken", outcome)
        elif outcome is not None:
            raise outcome  # cancelled

    async def _describe(self, name: str, source: str, described: dict[str, Described]) -> None:
        described[name] = await self._loader.describe(name, source)

    async def _lay(self, name: str, source: str, described: Mapping[str, Described], beside: dict[str, Beside]) -> None:
        trunk = trunk_of(name)
        if trunk not in described:
            raise broken_trunk(trunk, self._states[trunk])
        beside[name] = await self._loader.lay(name, source, Trunk(described[trunk].what))

    async def _attach_first(self, beside: Beside) -> None:
        trunk = trunk_of(beside.need.name)
        if trunk not in self._served:
            raise broken_trunk(trunk, self._states[trunk])
        self._publish(await self._loader.attach(beside, self._served[trunk]))

    async def _load_first(self, name: str, described: dict[str, Described], beside: Mapping[str, Beside]) -> None:
        def heard(fraction: float) -> None:
            self._states[name] = State("loading", fraction)

        heard(0.0)
        mine = described.pop(name)
        kept = sum(other.need.total for other in beside.values())
        self._publish(await self._loader.load(mine, heard, [other.sized for other in described.values()], kept))

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
        """The name is gone at once; what runs may end in `drain_s` seconds."""
        self._refuse_unknown(name)
        aliases = self._aliases_of(name)
        if aliases:
            raise Conflict(f"{name} has aliases: {', '.join(aliases)}; remove them first, or point them elsewhere")
        self._refuse_trunk(name, self._trunks)
        change = self._next(name, f"unloading {name}")
        change.phase = "draining"
        del self._states[name], self._sources[name]
        self._trunks.pop(name, None)
        return self._begin(change, self._unload(name, drain_s))

    def alias(self, alias: str, name: str) -> None:
        """From now on requests to `alias` are requests to `name`."""
        refuse_name(alias, "alias")
        if alias in self._states or (self.change and self.change.name == alias):
            raise Conflict(f"{alias} is a model, an alias cannot have its name", param="alias")
        self._refuse_unknown(name)
        self._aliases[alias] = name

    def unalias(self, alias: str) -> None:
        if alias not in self._aliases:
            raise NotFound(f"no alias is called {alias[:100]!r}; there are: {', '.join(self._aliases) or 'none'}")
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
        served = await self._loaded(change, source, trunk)
        if trunk:
            self._trunks[change.name] = trunk
        self._sources[change.name] = source
        self._publish(served)  # nothing is awaited in between: whoever asks finds the one or the other
        change.phase = "draining"
        while old:
            await self._retire(old.pop(), drain_s)

    async def _loaded(self, change: Change, source: str, trunk: str) -> Served:
        if trunk:
            beside = await self._loader.lay(change.name, source, self._served[trunk].trunk)
            return await self._loader.attach(beside, self._served[trunk])
        return await self._loader.load(await self._loader.describe(change.name, source), change.hear)

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
        watch = self._watching.worker(model)
        if watch is not None and requests and isinstance(requests[0], Explain):
            return watch
        for served in (*self._retiring, *self._served.values()):
            if served.model is model:
                return served.worker
        raise Unavailable(f"{model.name} was taken away while this was read; send it again", retry_after=1)

    def _known(self, name: str) -> Known:
        served = self._served.get(name)
        task, memory = (served.model.task, served.need.total) if served else (None, 0)
        return Known(name, self._sources[name], self._states[name], task, memory, tuple(self._aliases_of(name)))

    def _aliases_of(self, name: str) -> list[str]:
        return [alias for alias, target in self._aliases.items() if target == name]

    def _refuse_unknown(self, name: str) -> None:
        if name not in self._states:
            raise NotFound(f"no model is called {name[:100]!r}; there are: {', '.join(self._states)}", param="model")

    def _refuse_trunk(self, name: str, adapters: Iterable[str]) -> None:
        """Conflict where one of these is laid over it."""
        if adapters := [adapter for adapter in adapters if self._trunks[adapter] == name]:
            raise Conflict(f"{name} has adapters: {', '.join(adapters)}; unload them first")

    def _unavailable(self, name: str) -> PolyheadError:
        if self.change and self.change.name == name and self.change.phase == "loading":
            return Unavailable(f"{name} is not ready yet, {self.change.fraction:.0%} is read", retry_after=1)
        if name not in self._states:
            there = ", ".join((*self._states, *self._aliases))
            return NotFound(f"no model is called {name[:100]!r}; there are: {there}", param="model")
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


def refuse_unknown(settings: Settings) -> None:
    """Raises SettingsError where a weight or a draft is given to a model that is not served."""
    for setting, given in (("weights", settings.weights), ("drafts", settings.drafts)):
        for name in given:
            if name not in settings.models:
                there = ", ".join(settings.models)
                raise SettingsError(f"{setting}: no model is called {name!r}; there are: {there}")
            if base := trunk_of(name):
                raise SettingsError(f"{setting}: {name!r} is computed with its trunk; name {base!r} there")


def broken_trunk(trunk: str, state: State) -> BadRequest:
    return BadRequest(f"{trunk}, over which it is to be laid, could not be loaded: {state.why}")


def refuse_name(name: str, param: str) -> None:
    if not (is_name(name) if param == "name" else NAME.fullmatch(name)):
        message = f"{param}: {name[:60]!r} is no name: letters, digits, dots, dashes and underscores, 128 at most"
        raise BadRequest(message, param=param)


def complain(what: str, error: Exception) -> None:
    log.error("%s: %s", what, sentence(error), exc_info=None if isinstance(error, REFUSALS) else error)
