"""Served models by name: what each is, how far it is, and the worker that computes it.

Knows no HTTP.  The one idea: models load one after the other on the engine thread, in pieces between which the models
that are ready answer; one that cannot be loaded says why and leaves the others alone.
"""

import asyncio
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch

from models import checkpoint
from models.checkpoint import Checkpoint
from models.errors import CheckpointError, ModelError
from models.heads import LanguageHead
from models.torch_executor import TorchExecutor
from service import machine
from service.engine.encoder import Encoder, Head
from service.engine.engine import Engine, Stream
from service.engine.generator import Generator
from service.engine.worker import Worker
from service.errors import BadRequest, NotFound, PolyheadError, Unavailable
from service.model import Model, State, concerning
from service.request import Request, Task
from service.settings import Settings, SettingsError

CACHE_TOKENS = 16_384  # of a generator on a CPU, unless its context is longer or memory scarce
CACHE_SHARE = {"cpu": 0.5, "cuda": 0.8}  # of the free memory, for the caches of all models still to come
LONGEST_WAIT = 60  # seconds
DOES: Mapping[Task, str] = {
    "generate": "generate text",
    "classify": "classify",
    "rank": "rank",
    "embed": "embed",
}
REFUSALS = (ModelError, OSError, MemoryError)  # a sentence says it all; elsewhere a traceback helps

log = logging.getLogger("polyhead.registry")


class Told(Protocol):
    """Who hears that a model is ready."""

    def loaded(self, model: Model) -> None: ...


@dataclass(frozen=True)
class Place:
    """Where networks run and in what format."""

    device: torch.device
    dtype: torch.dtype


def placed(settings: Settings) -> Place:
    """Raises SettingsError if a GPU is asked for and there is none."""
    present = torch.cuda.is_available()
    if settings.device == "cuda" and not present:
        raise SettingsError("device: cuda is asked for and torch finds no GPU here; use auto or cpu")
    gpu = present and settings.device != "cpu"
    wanted = settings.precision if settings.precision != "auto" else ("bfloat16" if gpu else "float32")
    return Place(torch.device("cuda" if gpu else "cpu"), {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted])


class Registry:
    """Lives on the event loop thread; what the engine thread writes is one state at a time."""

    def __init__(self, engine: Engine, settings: Settings, told: Told) -> None:
        self._engine, self._settings, self._told = engine, settings, told
        self._place = placed(settings)
        self._models: dict[str, Model] = {}
        self._states = {name: State("waiting") for name in settings.models}
        self._began = time.monotonic()

    def names(self) -> list[str]:
        """All names there are, in the order they were given, ready or not."""
        return list(self._states)

    def states(self) -> Mapping[str, State]:
        return dict(self._states)

    def models(self) -> list[Model]:
        """The ready ones."""
        return [self._models[name] for name in self._states if name in self._models]

    def resolve(self, name: str, tasks: Collection[Task]) -> Model:
        """The model called `name`, if it is ready and does one of `tasks`; the error says what would be right."""
        if name not in self._states:
            raise NotFound(f"no model is called {name[:100]!r}; there are: {', '.join(self._states)}", param="model")
        if name not in self._models:
            raise self._unavailable(name)
        model = self._models[name]
        if model.task not in tasks:
            fitting = ", ".join(other.name for other in self.models() if other.task in tasks) or "none here"
            raise BadRequest(
                f"{name} can {DOES[model.task]}, it cannot {wanted(tasks)}; models that can: {fitting}", param="model"
            )
        return model

    def only(self, tasks: Collection[Task]) -> Model:
        """The one model that does one of `tasks`, for routes that name none."""
        pending = [name for name, state in self._states.items() if not state.settled]
        if pending:  # it may be the one, or the second one
            raise self._unavailable(pending[0])
        fitting = [model for model in self.models() if model.task in tasks]
        if not fitting:
            raise NotFound(f"no model here can {wanted(tasks)}")
        if len(fitting) > 1:
            addresses = ", ".join(f"/models/{model.name}/..." for model in fitting)
            raise BadRequest(f"{len(fitting)} models here can {wanted(tasks)}; say which by the address: {addresses}")
        return fitting[0]

    def submit(self, model: Model, requests: Sequence[Request]) -> list[Stream]:
        with concerning(model):
            return self._engine.submit(model.name, requests)

    async def load_all(self) -> None:
        """Load every model, in order.  Those that cannot be loaded are broken; nothing is raised for them."""
        self._began = time.monotonic()
        for name, source in self._settings.models.items():
            # Whatever a checkpoint makes a library raise breaks that model alone.
            (outcome,) = await asyncio.gather(self._load(name, source), return_exceptions=True)
            if isinstance(outcome, Exception):
                self._states[name] = State("broken", why=sentence(outcome))
                trace = None if isinstance(outcome, REFUSALS) else outcome
                log.error("%s is broken: %s", name, self._states[name].why, exc_info=trace)
            elif outcome is not None:
                raise outcome  # cancelled

    async def _load(self, name: str, source: str) -> None:
        began = time.perf_counter()
        self._states[name] = State("loading")
        loaded = await self._engine.call(lambda: self._read(name, source))
        read = time.perf_counter()
        model = self._described(name, loaded)
        worker, model = await self._engine.call(lambda: self._employ(model, loaded))
        await self._engine.call(worker.warm_up)
        self._engine.add(name, worker)
        self._models[name], self._states[name] = model, State("ready", 1.0)
        self._told.loaded(model)
        warm = time.perf_counter() - read
        size = loaded.weight_bytes / 2**20
        log.info(
            "%s is ready: %s, %s, %.0f MiB; read in %.2f s, warm in %.2f s",
            *(name, model.family, model.task, size, read - began, warm),
        )

    def _read(self, name: str, source: str) -> Checkpoint:
        """On the engine thread."""

        def progress(done: int, total: int) -> None:
            self._states[name] = State("loading", min(done / total, 1.0) if total else 0.0)

        return checkpoint.load(source, dtype=self._place.dtype, device=self._place.device, progress=progress)

    def _described(self, name: str, loaded: Checkpoint) -> Model:
        return Model(
            name=name,
            task=loaded.task,
            family=loaded.family,
            labels=loaded.labels,
            max_tokens=loaded.max_tokens,
            vocab_size=loaded.config.vocab_size,
            width=loaded.config.width,
            dtype=loaded.dtype,
            source=loaded.source,
            created=int(time.time()),
            tokenizer=loaded.tokenizer,
            chat=loaded.chat,
            stop_tokens=loaded.stop_tokens,
        )

    def _employ(self, model: Model, loaded: Checkpoint) -> tuple[Worker, Model]:
        """A worker for a model, and the model as this worker can serve it.  On the engine thread."""
        settings = self._settings
        if not isinstance(loaded.head, LanguageHead):
            executor = TorchExecutor(loaded.network)
            budget = settings.encoder_step_tokens
            head = cast(Head, loaded.head)
            return Encoder(executor, head, model=model.name, task=model.task, token_budget=budget), model
        blocks = self._cache_blocks(loaded)
        executor = TorchExecutor(loaded.network, loaded.head, block_count=blocks, block_size=settings.block_size)
        worker = Generator(
            executor,
            model=model.name,
            token_budget=settings.step_tokens,
            sequence_budget=settings.max_running,
            prefill_chunk=settings.prefill_chunk,
        )
        fits = blocks * settings.block_size
        if fits < model.max_tokens:
            log.warning("%s: its context is %d tokens, its cache holds %d", model.name, model.max_tokens, fits)
        return worker, replace(model, max_tokens=min(model.max_tokens, fits))

    def _cache_blocks(self, loaded: Checkpoint) -> int:
        """As many as are asked for, or as are useful and fit in this model's share of the free memory."""
        size, place = self._settings.block_size, self._place
        if self._settings.cache_tokens:
            return math.ceil(self._settings.cache_tokens / size)
        pending = sum(not state.settled for state in self._states.values())
        share = machine.free_memory(place.device) * CACHE_SHARE[place.device.type] / pending
        block_bytes = TorchExecutor.block_bytes(loaded.config, size, place.dtype)
        useful = self._settings.max_running * loaded.max_tokens
        if place.device.type == "cpu":
            useful = min(useful, max(loaded.max_tokens, CACHE_TOKENS))
        blocks = min(math.ceil(useful / size), int(share // block_bytes))
        if not blocks:
            raise CheckpointError(
                f"no memory is left for a cache: a block needs {block_bytes} bytes; free some or set cache_tokens",
                file=loaded.source,
            )
        return blocks

    def _unavailable(self, name: str) -> PolyheadError:
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


def wanted(tasks: Collection[Task]) -> str:
    return " or ".join(DOES[task] for task in sorted(tasks))


def sentence(error: Exception) -> str:
    """The first line of what went wrong; libraries add hints and stacks below it."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
