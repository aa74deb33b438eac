"""From a source to a worker that is warm: described, planned, read, employed, one stage after the other.

Knows no names that clients use.  The one idea: what can be refused is refused from the description, on a thread of its
own; only then the engine's thread reads, letting the models that are ready have a turn every few milliseconds.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from torch import nn

from polyhead.models import checkpoint
from polyhead.models.checkpoint import Checkpoint
from polyhead.models.checkpoint.default_precision import Suited
from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.source_policy import Reach
from polyhead.models.checkpoint.unmerged_adapter import Laid, Trunk
from polyhead.models.executors.contract import Executor
from polyhead.models.invariant import Sizes, make_head_invariant
from polyhead.models.native.packed_network import hollow, unfit
from polyhead.models.network.heads import LanguageHead

from ..concurrency.outcome import aside
from ..config.settings import Settings
from ..core.errors import NoRoom
from ..core.model import Model
from ..core.request import Task
from ..engine.draft_model import Drafter
from ..engine.encoder_worker import Encoder
from ..engine.engine import Engine
from ..engine.generator_worker import Generator
from ..engine.head_outputs import Head
from ..engine.speculation import Speculation
from ..engine.worker import Worker
from ..resources import machine
from ..resources.process_info import trim
from .draft_choice import drafting_for
from .executor_choice import executor_of, kernel_for, prepare, sampler_of
from .load_task import GRACE_S, Loading, ignore
from .memory_budget import Budget, Need, Sized, limit_of, need_beside, sized
from .model_card import adapted, model_of
from .placement import Place, placed, unable
from .rank_processes import Part, Ranks, refuse_adapter
from .self_test import SelfTest, describe_cost, is_tested, prefer_float32, with_known_cost
from .tokenizer_check import Vetting

STAGES = {  # what errors and the log say of each
    "describe": "was being described",
    "read and pack": "was being read and packed",
    "warm up": "was being warmed up",
}
HOLD_S = 0.02  # how long the engine's thread reads before the others have a turn

Executed = Callable[[Executor], Executor]
Heard = Callable[[float], None]
log = logging.getLogger("polyhead.loader")


@dataclass(frozen=True)
class Described:
    """A source that is understood but not read."""

    source: str
    what: Description
    sized: Sized
    draft: Description | None = None


@dataclass(frozen=True)
class Beside:
    """An adapter that is understood but not read, and what it needs."""

    source: str
    laid: Laid
    need: Need


@dataclass(frozen=True, eq=False)
class Served:
    """A model at work, and what it holds of the budget.  An adapter has the worker and the trunk of another."""

    model: Model
    worker: Worker
    need: Need
    trunk: Trunk
    part: Part | None = None  # where several processes compute it


class Unfaithful(Exception):
    """The default precision of a model costs more than it may."""

    def __init__(self, place: Place, cost: float) -> None:
        super().__init__(f"{place.precision} costs {cost}")
        self.place, self.cost = place, cost


class Loader:
    """Lives on the event loop thread.  Every executor goes through `executed` once."""

    def __init__(self, engine: Engine, settings: Settings, executed: Executed) -> None:
        self._engine, self._settings, self._executed = engine, settings, executed
        self.place = placed(settings)
        if not self.place.instructions:
            gpu = self.place.device.type == "cuda"
            log.info("torch computes, not the compiled step: %s", unable(settings, self.place.precision, gpu))
        self.budget = Budget(limit_of(settings, self.place.device), settings)
        if (free := machine.free_memory(self.place.device)) < self.budget.limit:
            log.warning("memory_mib %d is more than the %d MiB that are free", settings.memory_mib, free >> 20)
        self._ranks = Ranks(settings, self.place, engine.lose) if settings.tensor_parallel > 1 else None
        self.reach = Reach(Path(settings.model_root or settings.model_dir).expanduser(), known(settings))
        self.vetting = Vetting()
        self._proven: Sizes = {}  # of the heads of adapters
        self.spent = dict.fromkeys(STAGES, 0.0)  # seconds, on all models

    async def describe(self, loading: Loading, source: str) -> Described:
        """Raises ModelError, and whatever a checkpoint makes a library raise."""

        def read() -> Described:
            what = with_known_cost(checkpoint.describe(source, self.reach, self.vetting.vet), self._settings)
            draft = drafting_for(loading.name, what, self._settings, self.vetting.vet)
            size = sized(loading.name, what, draft, self._settings.tensor_parallel)
            placed(self._settings, size.suited, size.config)  # refused now, it troubles no other model's plan
            return Described(source, what, size, draft)

        with self._timed(loading, "describe"):
            return await aside(read)

    async def lay(self, loading: Loading, source: str, trunk: Trunk) -> Beside:
        """An adapter over a trunk, described.  Raises as `describe` does."""

        def read() -> Beside:
            refuse_adapter(loading.name, self._settings)
            laid = trunk.lay(self.reach.place(source))
            place = placed(self._settings, trunk.what.suited, trunk.what.config)
            return Beside(source, laid, need_beside(loading.name, laid, place))

        with self._timed(loading, "describe"):
            return await aside(read)

    async def attach(self, loading: Loading, beside: Beside, trunk: Served) -> Served:
        """Let requests for an adapter in.  Raises NoRoom, ModelError, StepFailed."""
        began = time.perf_counter()
        with ExitStack() as undo:
            self.budget.take_beside(beside.need)
            undo.callback(self.budget.release, beside.need)
            with self._timed(loading, "read and pack"):
                attach = partial(self._attach, loading, beside, trunk)
                number = await loading.on_engine(self._engine, attach, undo=trunk.worker.detach)
            model = adapted(trunk.model, beside.need.name, beside.source, beside.laid, number)
            self._engine.join(trunk.worker, number, model.name, model.task)
            undo.pop_all()
        size, seconds = beside.need.weights / 2**20, time.perf_counter() - began
        log.info("%s is ready: laid over %s, %.1f MiB, in %.3f s", model.name, trunk.model.name, size, seconds)
        return Served(model, trunk.worker, beside.need, trunk.trunk)

    def _attach(self, loading: Loading, beside: Beside, trunk: Served) -> int:
        """On the engine's thread."""
        what = trunk.trunk.what
        place = placed(self._settings, what.suited, what.config)
        lora, head = trunk.trunk.read(beside.laid, place.dtype, place.device)
        if isinstance(trunk.worker, Encoder):
            if head is not None and place.instructions:
                make_head_invariant(head, self._proven)
            loading.check()
            return trunk.worker.attach(lora, cast(Task, beside.laid.what.head.task), cast(Head | None, head))
        assert isinstance(trunk.worker, Generator)
        loading.check()
        return trunk.worker.attach(lora)

    async def load(self, loading: Loading, described: Described, others: Sequence[Sized] = (), kept: int = 0) -> Served:
        """A worker that takes requests.

        Its default precision is float32 where a self-test finds that the usual one costs more than `max_kl`.  Raises
        NoRoom, Stopped, ModelError, and what a checkpoint makes a library raise.  `others` come later, and what takes
        `kept` bytes.
        """
        try:
            return await self._load(loading, described, others, kept)
        except Unfaithful as error:
            what = prefer_float32(described.what, error.place, error.cost, self._settings)
            described = await aside(lambda: self._resized(described, what))
        except NoRoom as error:  # the cost was known before
            if described.what.preferred is None:
                raise
            return await self._load_narrow(loading, described, error, others, kept)
        try:
            return await self._load(loading, described, others, kept)
        except NoRoom as error:
            return await self._load_narrow(loading, described, error, others, kept)

    async def _load_narrow(
        self, loading: Loading, wide: Described, error: NoRoom, others: Sequence[Sized], kept: int
    ) -> Served:
        """In the precision that suits how it is stored, though it costs too much: float32 has no room."""
        log.warning("%s: %s; and float32 has no room: %s", wide.sized.name, wide.what.suited.reason, error.message)
        narrow = await aside(lambda: self._resized(wide, replace(wide.what, preferred=None)))
        return await self._load(loading, narrow, others, kept, strict=False)

    def _resized(self, described: Described, what: Description) -> Described:
        size = sized(described.sized.name, what, described.draft, self._settings.tensor_parallel)
        return replace(described, what=what, sized=size)

    async def _load(
        self, loading: Loading, described: Described, others: Sequence[Sized], kept: int, *, strict: bool = True
    ) -> Served:
        """Raises Unfaithful where the default precision costs too much, unless it is not `strict`."""
        place = placed(self._settings, described.sized.suited, described.sized.config)
        if place.instructions and self._settings.precision == "auto":
            log.info("%s: %s", described.sized.name, explained(described.sized.suited))
        if self.place.instructions and not place.instructions:
            log.info("%s: %s", described.sized.name, apart(unfit(described.sized.config), self.place))
        self.vetting.close()
        need, began = self.budget.plan(described.sized, others, kept), time.perf_counter()
        part, in_place = None, kernel_for(place, described.sized.config) is not None
        if self._ranks is not None:
            part = self._ranks.part(described.source, self.reach, need, place, in_place=in_place)
        async with AsyncExitStack() as undo:
            self.budget.take(need)
            undo.callback(self.budget.release, need)
            if part is not None:
                undo.push_async_callback(self._engine.call, part.drop)
            loaded, worker, cost = await self._read_and_pack(loading, described, need, part)
            if strict and cost is not None and cost > self._settings.max_kl and self._settings.precision == "auto":
                raise Unfaithful(place, cost)
            read = time.perf_counter()
            with self._timed(loading, "warm up"):
                await loading.on_engine(self._engine, lambda: worker.warm_up(self._breathe(loading)))
                await self._engine.call(trim)  # of what was read the allocator keeps as much again
            self._engine.add(worker, self._settings.weights.get(need.name, 1.0))
            undo.pop_all()
        model = model_of(need, loaded, place)
        how = f"{place.precision} by {model.executor}" + (
            f", {describe_cost(cost, described.what)}" if cost is not None else ""
        )
        times = read - began, time.perf_counter() - read
        facts = need.name, loaded.family, loaded.task, how, need.weights / 2**20, *times
        log.info("%s is ready: %s, %s, %s, %.0f MiB; read in %.2f s, warm in %.2f s", *facts)
        return Served(model, worker, need, Trunk(described.what), part)

    async def _read_and_pack(
        self, loading: Loading, described: Described, need: Need, part: Part | None
    ) -> tuple[Checkpoint, Worker, float | None]:
        """A worker that is not warm yet, and what its precision costs, if that is measured (`self_test`)."""
        place, test = placed(self._settings, described.sized.suited, described.sized.config), None
        engine = self._engine
        with self._timed(loading, "read and pack"):
            drafter = await loading.on_engine(engine, lambda: self._drafter(loading, described, need))
            if is_tested(place):
                longest = need.cache_tokens or described.what.max_tokens
                loading.stage = "was being tested for what its precision costs"
                test = await aside(lambda: SelfTest(described.what, place, self._settings, longest, loading.check))
                await loading.on_engine(engine, lambda: test.expect(self._progress(loading, ignore)))
                await engine.call(trim)
                loading.stage = STAGES["read and pack"]
            loaded = await loading.on_engine(engine, lambda: self._read(loading, described, loading.hear, part))
            worker = await loading.on_engine(
                engine,
                lambda: self._employ(need, loaded, drafter, self._executor(loading, need, loaded, part, test)),
            )
        return loaded, worker, test.cost if test is not None else None

    @contextmanager
    def _timed(self, loading: Loading, stage: str) -> Iterator[None]:
        began, loading.stage = time.perf_counter(), STAGES[stage]
        yield
        self.spent[stage] += time.perf_counter() - began

    async def retire(self, served: Served, drain_s: float) -> None:
        """Nothing new is submitted: what runs may end in time, then the worker is let go of."""
        if served.model.adapter:
            await self._engine.part(served.worker, served.model.adapter, drain_s)
        else:
            await self._engine.retire(served.worker, drain_s)
            if served.part is not None:
                await self._engine.call(served.part.drop)
        self.budget.release(served.need)

    async def give_back(self) -> None:
        """After the last reference to something large is gone.  An engine that is busy does it later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self._engine.call(machine.give_back)

    def _drafter(self, loading: Loading, described: Described, need: Need) -> Drafter | None:
        """Its draft model, read and ready."""
        name, settings = described.sized.name, self._settings
        if described.draft is None:
            return None
        source, size = settings.drafts[name], described.sized.draft
        assert size is not None
        loaded = self._read(loading, Described(source, described.draft, size), ignore, None)  # whole, and here alone
        words = min(loaded.config.vocab_size, described.sized.config.vocab_size)
        log.info("%s: %s drafts for it", name, source)
        executor = self._executor(loading, need, loaded, None)
        return Drafter(executor, budget=settings.step_tokens, longest=loaded.max_tokens, words=words)

    def _breathe(self, loading: Loading) -> Callable[[], None]:
        """For long functions on the engine's thread: the others get a turn, and a load that is ended is left."""

        def breathe() -> None:
            loading.check()
            self._engine.breathe()

        return breathe

    def _progress(self, loading: Loading, heard: Heard) -> Callable[[int, int], None]:
        return breathing(self._breathe(loading), loading.check, heard)

    def _read(self, loading: Loading, described: Described, heard: Heard, part: Part | None) -> Checkpoint:
        """On the engine's thread, as the next.  For the compiled step weights are read later, as they are packed."""
        if part is not None:
            return part.read(described.what, self._progress(loading, heard))
        place = placed(self._settings, described.sized.suited, described.sized.config)
        read = checkpoint.begin if place.instructions else checkpoint.read
        progress = self._progress(loading, heard)
        return read(described.source, described.what, dtype=place.dtype, device=place.device, progress=progress)

    def _executor(
        self, loading: Loading, need: Need, loaded: Checkpoint, part: Part | None, test: SelfTest | None = None
    ) -> Executor:
        if part is not None:
            return self._executed(part.executor(loaded))
        settings, breathe = self._settings, self._breathe(loading)

        @contextmanager
        def held(part: nn.Module) -> Iterator[None]:
            loaded.fill(part)
            yield
            hollow(part)
            trim()  # else the allocator keeps what was read, part after part
            breathe()

        prepare(loaded, settings, breathe)
        executor = executor_of(loaded, settings, need.blocks, held)
        if test is not None:
            test.compare(executor)
        return self._executed(executor)

    def _employ(self, need: Need, loaded: Checkpoint, drafter: Drafter | None, executor: Executor) -> Worker:
        settings = self._settings
        if not (loaded.writing or isinstance(loaded.head, LanguageHead)):
            head, tokens = cast(Head, loaded.head), settings.encoder_step_tokens
            return Encoder(executor, head, model=need.name, task=cast(Task, loaded.task), token_budget=tokens)
        generator = Generator(
            executor,
            model=need.name,
            token_budget=settings.step_tokens,
            sequence_budget=settings.max_running,
            prefill_chunk=settings.prefill_chunk,
        )
        generator.sampler = sampler_of(placed(settings, loaded.suited, loaded.body))
        if not loaded.writing:  # a state that is not the newest is made again from the beginning
            generator.speculation = Speculation(settings.draft_tokens, settings.max_running, drafter)
        return generator


def breathing(breathe: Callable[[], None], check: Callable[[], None], heard: Heard) -> Callable[[int, int], None]:
    """For what reads on the engine's thread: tells how much is read, calls `check` each time, and `breathe`, which lets
    the others have their turns, as often as is needed."""
    breathed = time.perf_counter()

    def progress(done: int, total: int) -> None:
        nonlocal breathed
        check()
        heard(min(done / total, 1.0) if total else 0.0)
        if time.perf_counter() - breathed > HOLD_S:
            breathe()
            breathed = time.perf_counter()

    return progress


def known(settings: Settings) -> frozenset[str]:
    """The sources that whoever runs the server names, and both parts of a model with an adapter merged; any other was
    named over HTTP."""
    named = settings.models.values()
    return frozenset(part for source in named for part in (source, *source.rpartition("+")[::2]) if part)


def explained(suited: Suited) -> str:
    """What is computed in, why, and what else could be asked for."""
    faster = "; --precision int8 is faster, smaller and less exact" if suited.precision == "float32" else ""
    return f"{suited.precision}, since {suited.reason}{faster}"


def apart(reason: str, place: Place) -> str:
    """Why torch computes one model beside others, and what else could be asked for."""
    told = f"torch computes it, not the compiled step: {reason}"
    if place.threads == place.torch_threads:
        return told
    return f"{told}; it has {place.torch_threads} thread, and with --executor torch, for all models, {place.threads}"
