"""Many small models of which a replica holds some: those that were asked last.

Knows no connection.  The one idea: each is loaded once at the start, so that what it is and whether it can be loaded
are known before anybody asks; after that one is loaded when it is asked for, in the place of whichever has not been
for longest.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from ..core.errors import NoRoom, NotFound, PolyheadError, spoken
from ..core.model import Model
from ..core.names import trunk_of
from ..runtime.registry import Registry

log = logging.getLogger("polyhead.pool")


class Pool:
    """`sources` by name; at most `most` are held at once, 0: as many as there is room for.  `drain_s` is what a model
    that has to go gets for what it has begun."""

    def __init__(self, registry: Registry, sources: Mapping[str, str], most: int, drain_s: float) -> None:
        self.models: dict[str, Model] = {}  # all that can be loaded
        self.broken: dict[str, str] = {}
        self._registry, self._sources, self._most, self._drain_s = registry, sources, most, drain_s
        self._held: OrderedDict[str, None] = OrderedDict()  # the one asked last at the end
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Model]] = set()

    @property
    def held(self) -> tuple[str, ...]:
        return tuple(self._held)

    async def start(self) -> None:
        for name in self._sources:
            try:
                await self.model(name)
            except PolyheadError as error:
                self.broken[name] = spoken(error)

    async def model(self, name: str) -> Model:
        """It, loaded.  Raises what loading it raises."""
        if name not in self._sources:
            raise NotFound(f"no model is called {name[:100]!r} here")
        needed = [one for one in (trunk_of(name), name) if one]
        if not set(needed) <= self._held.keys():
            change = asyncio.create_task(self._change(needed))  # whole, even if whoever asked has left meanwhile
            self._changes.add(change)
            change.add_done_callback(self._changed)
            return await asyncio.shield(change)
        for one in needed:
            self._held.move_to_end(one)
        return self.models[name]

    async def _change(self, needed: Sequence[str]) -> Model:
        async with self._changing:
            for name in needed:
                await self._bring(name)
            return self.models[needed[-1]]

    def _changed(self, change: asyncio.Task[Model]) -> None:
        self._changes.discard(change)
        if not change.cancelled():
            change.exception()  # which nobody may have waited for

    async def _bring(self, name: str) -> None:
        """Others go only once it is there: one that cannot be loaded takes nobody's place."""
        if name not in self._held:
            while not await self._loaded(name):
                await self._evict(name)
            [self.models[name]] = [model for model in self._registry.models() if model.name == name]
        self._held[name] = None
        self._held.move_to_end(name)
        while self._most and len(self._held) > self._most and self._spare(name):
            await self._evict(name)

    async def _loaded(self, name: str) -> bool:
        """Whether there was room for it."""
        try:
            await self._registry.load(name, self._sources[name]).end()
        except NoRoom:
            if not self._spare(name):
                raise
            return False
        return True

    def _spare(self, wanted: str) -> list[str]:
        """Those that may go, the first of them first: neither it, nor what others are laid over, or it is to be."""
        needed = {wanted, *(trunk_of(name) for name in (*self._held, wanted))}
        return [name for name in self._held if name not in needed]

    async def _evict(self, wanted: str) -> None:
        first = self._spare(wanted)[0]
        log.info("%s makes room for %s", first, wanted)
        del self._held[first]
        await self._registry.unload(first, self._drain_s).end()
