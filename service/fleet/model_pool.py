"""A pool of models of which a replica keeps the most recently used ones in memory.

Each model is loaded once at the start, so its description, and whether it can be loaded, is known before the first
request.  Later a model is loaded on request, and the least recently used one is unloaded for it.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from ..core.errors import InsufficientMemory, NotFound, PolyheadError, client_message
from ..core.model import Model
from ..core.names import base_model_name
from ..runtime.registry import ModelRegistry

log = logging.getLogger("polyhead.pool")


class ModelPool:
    """Loads and unloads the models of a pool.

    `sources` are by name.  At most `most` models are loaded at once; 0: as many as fit in memory.  An evicted model
    gets `drain_s` seconds to finish its requests.
    """

    def __init__(self, registry: ModelRegistry, sources: Mapping[str, str], max_loaded: int, drain_s: float) -> None:
        self.models: dict[str, Model] = {}  # all models that can be loaded
        self.broken: dict[str, str] = {}
        self._registry, self._sources, self._max_loaded, self._drain_s = registry, sources, max_loaded, drain_s
        self._recently_used: OrderedDict[str, None] = OrderedDict()  # the most recently used at the end
        self._load_lock = asyncio.Lock()
        self._load_tasks: set[asyncio.Task[Model]] = set()

    @property
    def loaded_names(self) -> tuple[str, ...]:
        return tuple(self._recently_used)

    async def start(self) -> None:
        for name in self._sources:
            try:
                await self.load_model(name)
            except PolyheadError as error:
                self.broken[name] = client_message(error)

    async def load_model(self, name: str) -> Model:
        """Load the model if needed and return it.  Raises the error of loading it."""
        if name not in self._sources:
            raise NotFound(f"no model is called {name[:100]!r} here")
        needed = [one for one in (base_model_name(name), name) if one]
        if not set(needed) <= self._recently_used.keys():
            change = asyncio.create_task(self._load_all(needed))  # completed even if the caller is cancelled
            self._load_tasks.add(change)
            change.add_done_callback(self._on_load_done)
            return await asyncio.shield(change)
        for one in needed:
            self._recently_used.move_to_end(one)
        return self.models[name]

    async def _load_all(self, needed: Sequence[str]) -> Model:
        async with self._load_lock:
            for name in needed:
                await self._load_in_turn(name)
            return self.models[needed[-1]]

    def _on_load_done(self, change: asyncio.Task[Model]) -> None:
        self._load_tasks.discard(change)
        if not change.cancelled():
            change.exception()  # marks the exception as retrieved: the caller may be gone

    async def _load_in_turn(self, name: str) -> None:
        """Load a model, then evict others beyond the limit.  A model that cannot be loaded evicts none for the
        limit.
        """
        if name not in self._recently_used:
            while not await self._try_load(name):
                await self._evict_for(name)
            [self.models[name]] = [model for model in self._registry.models() if model.name == name]
        self._recently_used[name] = None
        self._recently_used.move_to_end(name)
        while self._max_loaded and len(self._recently_used) > self._max_loaded and self._evictable(name):
            await self._evict_for(name)

    async def _try_load(self, name: str) -> bool:
        """Load a model.  Returns False if there is no memory for it but another can be evicted."""
        try:
            await self._registry.load(name, self._sources[name]).wait_and_raise()
        except InsufficientMemory:
            if not self._evictable(name):
                raise
            return False
        return True

    def _evictable(self, wanted: str) -> list[str]:
        """Return the models that may be evicted, the least recently used first: not `wanted` and no base model of a
        loaded adapter.
        """
        needed = {wanted, *(base_model_name(name) for name in (*self._recently_used, wanted))}
        return [name for name in self._recently_used if name not in needed]

    async def _evict_for(self, wanted: str) -> None:
        first = self._evictable(wanted)[0]
        log.info("%s makes room for %s", first, wanted)
        del self._recently_used[first]
        await self._registry.unload(first, self._drain_s).wait_and_raise()
