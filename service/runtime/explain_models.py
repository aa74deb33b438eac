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
from polyhead.models.explain import Watched
from polyhead.models.network.heads import LanguageHead

from ..concurrency.outcome import aside
from ..config.settings import Settings
from ..core.errors import Conflict, NoRoom, PolyheadError
from ..core.model import Model
from ..engine.background_throttle import SHARE
from ..engine.engine import Engine
from ..engine.explain_worker import Explainer
from ..engine.head_outputs import Head
from .explain_cost import GIGA, PIECE, WorkLimit, need_of
from .load_task import Loading, ignore
from .loader import Loader, breathing
from .memory_budget import Need, Sized, sized

log = logging.getLogger("polyhead.watching")


@dataclass(frozen=True, eq=False)
class Watch:
    """A network that explains a model, and what it holds of the budget."""

    model: Model
    worker: Explainer
    need: Need


class Timer(Protocol):
    def cancel(self) -> None: ...


def call_later(seconds: float, function: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, function)


class Watching:
    """Lives on the event loop thread.  `later` calls a function after so many seconds."""

    def __init__(self, engine: Engine, settings: Settings, loader: Loader) -> None:
        self._engine, self._settings, self._loader, self._budget = engine, settings, loader, loader.budget
        self._reach, self._vetting, self._device = loader.reach, loader.vetting, loader.place.device
        self._watches: OrderedDict[str, Watch] = OrderedDict()  # by model's name, the one asked last at the end
        self._timers: dict[str, Timer] = {}  # by model's name, of those that are given back when idle
        self._releases: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()  # held while a network is read or given back
        self.later: Callable[[float, Callable[[], None]], Timer] = call_later

    def worker(self, model: Model) -> Explainer | None:
        """The one that explains just this model, if it is there."""
        watch = self._watches.get(model.name)
        return watch.worker if watch and watch.model is model else None

    def held(self, name: str) -> int:
        """Bytes of the budget that the network explaining the model of that name holds; 0 if it is not there."""
        return self._watches[name].need.total if name in self._watches else 0

    async def watch(self, model: Model, source: str) -> Mapping[str, tuple[int, int]]:
        """See to it that it is there: the layers and heads of each kind of attention.

        Until the caller awaits again, it stays there.  Raises NoRoom, Expired after `load_seconds`, and Conflict where
        its source cannot be read any more.
        """
        if self.worker(model) is None:  # one that is there does not wait for another's
            await self._ensure(model, source)
        self._watches.move_to_end(model.name)
        self._start_timer(model.name)
        return self._watches[model.name].worker.layout

    async def _ensure(self, model: Model, source: str) -> None:
        async with self._changing:
            if self.worker(model) is None:
                await self._forget(model.name)  # of another that had the name
                loading = Loading(f"what explains {model.name}", self._settings.load_seconds)
                await loading.run(self._read(loading, model, source))

    async def forget(self, model: Model) -> None:
        """Let go of the one that explains a model; who is being explained to is told so."""
        async with self._changing:
            if self.worker(model) is not None:
                await self._forget(model.name)

    async def _forget(self, name: str) -> None:
        """The budget has its memory again when the system has it."""
        self._stop_timer(name)
        if watch := self._watches.pop(name, None):
            await self._engine.retire(watch.worker, 0.0)
            await self._engine.call(watch.worker.release)
            await self._loader.give_back()
            self._budget.release(watch.need)

    def _start_timer(self, name: str) -> None:
        """Count its idle time from now on."""
        self._stop_timer(name)
        if seconds := self._settings.explain_idle_seconds:
            self._timers[name] = self.later(seconds, partial(self._on_timer, name))

    def _stop_timer(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()

    def _on_timer(self, name: str) -> None:
        del self._timers[name]
        release = asyncio.create_task(self._release_idle(name))
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)

    async def _release_idle(self, name: str) -> None:
        async with self._changing:
            if name not in self._watches or name in self._timers:  # it was asked for while the lock was waited for
                return
            if self._engine.open(self._watches[name].worker):
                self._start_timer(name)
                return
            held = self.held(name)
            try:
                await self._forget(name)
            except PolyheadError as error:  # the engine ends
                log.info("the network that explains %s is not given back: %s", name, error.message)
            else:
                log.info("%s was not explained lately: %.0f MiB are free again", name, held / 2**20)

    async def _read(self, loading: Loading, model: Model, source: str) -> None:
        began, loading.stage = time.perf_counter(), "was being read"
        try:
            what = await aside(lambda: checkpoint.describe(source, self._reach, self._vetting.vet))
            need = await self._room(sized(model.name, what))
            worker = await self._loaded(loading, model, what, need)
        except ModelError as error:
            raise Conflict(f"{model.name} cannot be read again to be explained: {error}", param="model") from None
        self._watches[model.name] = Watch(model, worker, need)
        self._engine.add(worker, SHARE * self._settings.weights.get(model.name, 1.0))
        seconds = time.perf_counter() - began
        log.info("%s can be explained: %.0f MiB more, in %.2f s", model.name, need.weights / 2**20, seconds)

    async def _room(self, size: Sized) -> Need:
        """What it needs, taken; if there is no room, from those that were asked longest ago and rest."""
        need = need_of(size, self._settings)
        while need.total > self._budget.free:
            idle = next((name for name, watch in self._watches.items() if not self._engine.open(watch.worker)), "")
            if not idle:
                free = f"{max(self._budget.free, 0) >> 20} of {self._budget.limit >> 20} MiB are free"
                raise NoRoom(f"to explain {size.name} takes {-(-need.total >> 20)} MiB more, and {free}")
            await self._forget(idle)
        self._budget.take(need)
        return need

    async def _loaded(self, loading: Loading, model: Model, what: Description, need: Need) -> Explainer:
        def breathe() -> None:
            loading.check()
            self._engine.breathe()

        with ExitStack() as undo:
            undo.callback(self._budget.release, need)
            progress = breathing(breathe, loading.check, ignore)
            worker = await loading.on_engine(self._engine, lambda: self._employ(model, what, progress))
            await loading.on_engine(self._engine, lambda: worker.warm_up(breathe))
            undo.pop_all()
        return worker

    def _employ(self, model: Model, what: Description, progress: Callable[[int, int], None]) -> Explainer:
        """On the engine's thread."""
        loaded = checkpoint.read(model.source, what, dtype=torch.float32, device=self._device, progress=progress)
        watched, reads = Watched(loaded.network, loaded.head), loaded.writing is not None
        head = None if reads or isinstance(loaded.head, LanguageHead) else cast(Head, loaded.head)
        limit = WorkLimit(loaded.config, loaded.body, self._settings.explain_gflop * GIGA)
        worker = Explainer(watched, head, model=model.name, reads=reads, piece=PIECE)
        worker.bound = limit.check
        return worker
