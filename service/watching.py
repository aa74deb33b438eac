"""Networks that explain: beside a served model a second one, read when somebody first asks why.

Knows no text and no HTTP.  The one idea: what serves is packed, fused, maybe of eight bits, and shows nothing of its
insides; so an explanation has the same checkpoint in float32, in plain torch, with what it takes held of the one budget
of memory.  It stays until its model goes, or until the room is wanted for another's.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import torch

from models import checkpoint
from models.checkpoint.description import Description
from models.errors import ModelError
from models.explain import METHODS, Asked, Text, Watched, bytes_of
from models.heads import LanguageHead
from service.budget import Need, Sized, sized
from service.engine.engine import Engine
from service.engine.explainer import AT_ONCE, Explainer
from service.engine.pace import SHARE
from service.engine.reading import Head
from service.errors import Conflict, NoRoom
from service.explaining import MOST_FLOWING, MOST_WEIGHTS
from service.loader import Loader, breathing
from service.loading import Loading, ignore
from service.model import Model
from service.outcome import aside
from service.settings import Settings

PIECE = 64  # tokens of an explanation that are computed at a time, before others have a turn

log = logging.getLogger("polyhead.watching")


@dataclass(frozen=True, eq=False)
class Watch:
    """A network that explains a model, and what it holds of the budget."""

    model: Model
    worker: Explainer
    need: Need


class Watching:
    """Lives on the event loop thread."""

    def __init__(self, engine: Engine, settings: Settings, loader: Loader) -> None:
        self._engine, self._settings, self._budget = engine, settings, loader.budget
        self._reach, self._vetting, self._device = loader.reach, loader.vetting, loader.place.device
        self._watches: OrderedDict[str, Watch] = OrderedDict()  # by model's name, the one asked last at the end
        self._reading = asyncio.Lock()

    def worker(self, model: Model) -> Explainer | None:
        """The one that explains just this model, if it is there."""
        watch = self._watches.get(model.name)
        return watch.worker if watch and watch.model is model else None

    async def watch(self, model: Model, source: str) -> Mapping[str, tuple[int, int]]:
        """See to it that it is there: the layers and heads of each kind of attention.

        Raises NoRoom, Expired after `load_seconds`, and Conflict where its source cannot be read any more.
        """
        async with self._reading:
            if self.worker(model) is None:
                await self._forget(model.name)  # of another that had the name
                loading = Loading(f"what explains {model.name}", self._settings.load_seconds)
                await loading.run(self._read(loading, model, source))
            self._watches.move_to_end(model.name)
            return self._watches[model.name].worker.layout

    async def forget(self, model: Model) -> None:
        """Let go of the one that explains a model; who is being explained to is told so."""
        if self.worker(model) is not None:
            await self._forget(model.name)

    async def _forget(self, name: str) -> None:
        if watch := self._watches.pop(name, None):
            await self._engine.retire(watch.worker, 0.0)
            self._budget.release(watch.need)

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
        return Explainer(watched, head, model=model.name, reads=reads, piece=PIECE)


def need_of(size: Sized, settings: Settings) -> Need:
    """Of a network that explains: its weights in float32, and what its longest text takes."""
    numbers = size.size
    return Need(
        name=size.name,
        weights=numbers.weights(torch.float32),
        cache=0,
        workspace=numbers.tokenizer + most_bytes(size, min(settings.explain_tokens, size.context)),
        loading=numbers.tokenizer + numbers.passing(torch.float32),
        blocks=0,
        block_size=0,
    )


def most_bytes(size: Sized, tokens: int) -> int:
    """Whatever is asked: one piece is computed at a time, and what is found of those that take turns is kept."""
    body, reader = size.config, size.reader
    taken = 0
    for method in METHODS:
        some = (0,) * (min(tokens, MOST_FLOWING) if method == "attention_flow" else tokens)
        asked = Asked(Text(some, source=some if reader else ()), method, goals=(((0, 0),),), layers=(0,), heads=(0,))
        taken = max(taken, bytes_of(reader or body, body, asked, PIECE))
    return taken + AT_ONCE * MOST_WEIGHTS * torch.float32.itemsize
