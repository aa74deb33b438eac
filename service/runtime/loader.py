"""From a checkpoint source to a worker that is ready: describe, plan memory, read and pack the weights, warm up.

Whatever the description shows to be impossible is rejected on a separate thread, before weights are read; the network
is built there, too. Weights are read on the engine's thread, which lets the loaded models compute every few
milliseconds.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from torch import nn

from polyhead.models import checkpoint
from polyhead.models.checkpoint import Checkpoint
from polyhead.models.checkpoint.default_precision import DefaultPrecision
from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.folder_files import JsonObject
from polyhead.models.checkpoint.hub import DownloadOptions
from polyhead.models.checkpoint.published_rerankers import TASK_MARK
from polyhead.models.checkpoint.source_policy import SourcePolicy
from polyhead.models.checkpoint.unmerged_adapter import BaseModel, LoraPlan
from polyhead.models.checkpoint.weight_reader import WeightReader
from polyhead.models.executors.contract import Executor
from polyhead.models.invariant import SafeSizes, make_head_invariant
from polyhead.models.native.packed_network import PackHooks, free_weights, unsupported_reason
from polyhead.models.network.heads import LanguageHead

from ..concurrency.outcome import run_on_daemon_thread
from ..config.settings import Settings
from ..core.calibration import Calibration
from ..core.errors import InsufficientMemory
from ..core.model import Model
from ..core.names import join_names
from ..core.request import Task
from ..engine.draft_model import DraftModel
from ..engine.encoder_worker import EncoderWorker, QueryNetwork
from ..engine.engine import Engine
from ..engine.generator_worker import GeneratorWorker
from ..engine.head_outputs import OutputHead
from ..engine.speculation import Speculation
from ..engine.worker import Worker
from ..resources import machine
from ..resources.process_info import trim_heap
from .calibration_choice import WeightsInUse, choose_calibration
from .draft_choice import NO_RECURRENT_DRAFTS, choose_draft_model
from .executor_choice import (
    CacheSize,
    build_executor,
    build_sampler,
    choose_kernel,
    context_cost,
    encoder_step_tokens,
    make_deterministic,
)
from .load_task import GRACE_S, LoadTask
from .memory_budget import (
    MemoryBudget,
    MemoryNeed,
    ModelSize,
    adapter_memory_need,
    ceil_mib,
    describe_state_shortage,
    measure_model,
    memory_limit,
    smallest_need,
)
from .placement import Placement, choose_placement, native_step_obstacle
from .rank_processes import DistributedModel, RankProcesses, check_adapter_allowed
from .self_test import SelfTest, apply_known_cost, describe_cost, is_tested, prefer_float32
from .served_model import build_adapter_model, build_model
from .tokenizer_check import TokenizerCheck, TokenizerMemory

STAGES = {  # the phrase for each stage in errors and in the log
    "describe": "was being described",
    "read and pack": "was being read and packed",
    "warm up": "was being warmed up",
}
TEST_PHRASE = "was being tested for what its precision costs"  # a part of "read and pack"
READ_SLICE_S = 0.02  # seconds the engine's thread reads before the other models may compute

ExecutorHook = Callable[[Executor], Executor]
log = logging.getLogger("polyhead.loader")


@dataclass(frozen=True)
class DescribedModel:
    """A checkpoint whose description was read, and not its weights. `companion`: the description of its draft model, or
    of its network for queries.

    `weights` and `companion_weights` read those of a network that is built already, for one load; there are none for a
    model that several processes compute.
    """

    source: str
    description: Description
    size: ModelSize
    placement: Placement
    weights: WeightReader | None
    companion: Description | None = None
    companion_weights: WeightReader | None = None

    @property
    def tokenizer_bytes(self) -> int:
        """What it takes in memory before it is loaded."""
        return sum(each.checkpoint_size.tokenizer for each in (self.size, self.size.companion) if each is not None)


@dataclass(frozen=True)
class UnmergedAdapter:
    """An adapter whose description was read, and not its weights, the memory that it needs, and where its base model
    is.
    """

    source: str
    plan: LoraPlan
    need: MemoryNeed
    placement: Placement


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that takes requests, and the memory that it holds of the budget. An adapter has the worker and the base
    model of another. `description` is what the weights were read by; that of an adapter is merged with its base.
    """

    model: Model
    worker: Worker
    need: MemoryNeed
    base_model: BaseModel
    description: Description
    distributed: DistributedModel | None = None  # if several processes compute it together


@dataclass(frozen=True)
class LoadPlan:
    """What the engine's thread is to build.

    `part` is this process's part of a model that several processes compute. `tests` measure the cost of the precision,
    which may be at most `max_cost`; there is none or one.
    """

    described: DescribedModel
    need: MemoryNeed
    part: DistributedModel | None
    tests: Sequence[SelfTest]
    max_cost: float


@dataclass(frozen=True, eq=False)
class BuiltModel:
    """What the engine's thread makes of a described model. `cost` is that of its precision, if there is one (see
    `self_test`).
    """

    checkpoint: Checkpoint
    worker: Worker
    cost: float | None
    read_seconds: float
    warm_seconds: float


class PrecisionCostError(Exception):
    """The default precision of a model costs more accuracy than the setting `max_kl` allows."""

    def __init__(self, placement: Placement, cost: float) -> None:
        super().__init__(f"{placement.precision} costs {cost}")
        self.placement, self.cost = placement, cost


async def keep_room(*_: float) -> bool:
    return False


class Loader:
    """Used on the event loop thread. `executor_hook` is called once with each executor and returns the one to use.

    `make_room` is called before memory is reserved, with the bytes that are needed and those that are useful: it
    unloads what models come before, and returns whether anything was unloaded.
    """

    def __init__(self, engine: Engine, settings: Settings, executor_hook: ExecutorHook) -> None:
        self._engine, self._settings, self._executor_hook = engine, settings, executor_hook
        self.placement = choose_placement(settings)
        if not self.placement.instructions:
            gpu = self.placement.device.type == "cuda"
            log.info(
                "torch computes, not the compiled step: %s",
                native_step_obstacle(settings, self.placement.precision, gpu),
            )
        self.budget = MemoryBudget(memory_limit(settings, self.placement.device), settings)
        if (free := machine.free_memory(self.placement.device)) < self.budget.limit:
            log.warning("memory_mib %d is more than the %d MiB that are free", settings.memory_mib, free >> 20)
        self._ranks = (
            RankProcesses(settings, self.placement, engine.fail_permanently) if settings.tensor_parallel > 1 else None
        )
        self.make_room: Callable[[float, float], Awaitable[bool]] = keep_room
        self.source_policy = SourcePolicy(
            Path(settings.model_root or settings.model_dir).expanduser(), known_sources(settings)
        )
        self.tokenizer_check = TokenizerCheck()
        self._proven_sizes: SafeSizes = {}  # sizes of adapter heads whose batch invariance was tested
        self.stage_seconds = dict.fromkeys(STAGES, 0.0)  # seconds of all loads, by stage

    async def describe(self, loading: LoadTask, source: str, kept: int = 0) -> DescribedModel:
        """Describe the checkpoint, its draft model and their sizes. Raises InsufficientMemory if its tokenizer takes
        more memory than is free beside `kept` bytes, ModelError, and any error that a checkpoint causes in a library.
        """
        with self._time_stage(loading, "describe"):
            try:
                return await self._describe(loading, source, kept)
            except InsufficientMemory:  # what the tokenizer takes is known only now
                if not await self.make_room(0, math.inf):
                    raise
            return await self._describe(loading, source, kept)

    async def _describe(self, loading: LoadTask, source: str, kept: int) -> DescribedModel:
        room = self.budget.free - kept

        def check_tokenizer(source: Path, fields: JsonObject) -> int:
            check_memory = partial(check_tokenizer_fits, loading.name, room)
            return self.tokenizer_check.check_folder(source, fields, loading.check, check_memory)

        def read() -> DescribedModel:
            policy = self._with_downloads(loading)
            description = apply_known_cost(checkpoint.describe_source(source, policy, check_tokenizer), self._settings)
            draft = choose_draft_model(loading.name, description, self._settings, check_tokenizer)
            return self._place(loading.name, source, description, draft)

        return await run_on_daemon_thread(read)

    async def describe_adapter(self, loading: LoadTask, source: str, base: BaseModel) -> UnmergedAdapter:
        """Describe an adapter of a base model. Raises the same errors as `describe`."""

        def read() -> UnmergedAdapter:
            check_adapter_allowed(loading.name, self._settings)
            plan = base.plan_adapter(self._with_downloads(loading).locate(source))
            placement = choose_placement(self._settings, base.description.default_precision, base.description.config)
            return UnmergedAdapter(source, plan, adapter_memory_need(loading.name, plan, placement), placement)

        with self._time_stage(loading, "describe"):
            return await run_on_daemon_thread(read)

    def _with_downloads(self, loading: LoadTask) -> SourcePolicy:
        """Return the policy of sources, with downloads that are part of this load."""
        options = DownloadOptions(loading.record_download, self._settings.download_gib << 30, loading.check)
        return replace(self.source_policy, downloads=options)

    async def attach(self, loading: LoadTask, adapter: UnmergedAdapter, base: LoadedModel) -> LoadedModel:
        """Attach an adapter to the worker of its base model, and accept requests for it. Raises InsufficientMemory,
        ModelError or StepFailed.
        """
        began, name = time.perf_counter(), adapter.need.name
        weights = WeightsInUse(name, adapter.source, adapter.plan.description, base.model.dtype)
        calibration = await self._choose_calibration(loading, weights)
        await self.make_room(adapter.need.total, adapter.need.total)
        with ExitStack() as undo:
            self.budget.reserve_adapter(adapter.need)
            undo.callback(self.budget.release, adapter.need)
            with self._time_stage(loading, "read and pack"):
                attach = partial(self._attach_on_engine, loading, adapter, base)
                number = await loading.on_engine(self._engine, attach, undo=base.worker.detach)
            undo.pop_all()
            undo.callback(self.budget.release, need := self.budget.settle(adapter.need))
            model = build_adapter_model(base.model, name, adapter.source, adapter.plan, number)
            model = replace(model, calibration=calibration)
            self._engine.add_adapter(base.worker, number, model.name, model.task)
            undo.pop_all()
        size, seconds = adapter.need.weights / 2**20, time.perf_counter() - began
        log.info("%s is ready: an adapter of %s, %.1f MiB, in %.3f s", model.name, base.model.name, size, seconds)
        return LoadedModel(model, base.worker, need, base.base_model, adapter.plan.description)

    def _attach_on_engine(self, loading: LoadTask, adapter: UnmergedAdapter, base: LoadedModel) -> int:
        """Read the adapter's weights and attach them; returns its number. Called on the engine's thread."""
        placement, yield_turn = adapter.placement, sliced_turns(self._yield_callback(loading), loading)
        lora, head = base.base_model.load_adapter(
            adapter.plan, placement.dtype, placement.device, lambda _: yield_turn()
        )
        if isinstance(base.worker, EncoderWorker):
            if head is not None and placement.instructions:
                make_head_invariant(head, self._proven_sizes, yield_turn)
            task = cast(Task, adapter.plan.description.head.task)
            number = base.worker.attach(lora, task, cast(OutputHead | None, head), yield_turn)
        else:
            assert isinstance(base.worker, GeneratorWorker)
            number = base.worker.attach(lora, yield_turn)
        trim_heap()  # of what was read
        return number

    async def load(
        self, loading: LoadTask, described: DescribedModel, others: Sequence[ModelSize] = (), kept: int = 0
    ) -> LoadedModel:
        """Load a model and return it with a worker that accepts requests.

        If a self-test finds that the default precision costs more than `max_kl`, the model is loaded in float32
        instead. `others` are models that are loaded later, and adapters loaded later need `kept` bytes. Raises
        InsufficientMemory, Stopped, ModelError, and any error that a checkpoint causes in a library.
        """
        try:
            return await self._load(loading, described, others, kept)
        except PrecisionCostError as error:
            description = prefer_float32(described.description, error.placement, error.cost, self._settings)
            described = await run_on_daemon_thread(lambda: self._place_again(described, description))
        except InsufficientMemory as error:  # the cost was known from an earlier self-test
            if described.description.preferred_precision is None:
                raise
            return await self._load_stored_precision(loading, described, error, others, kept)
        try:
            return await self._load(loading, described, others, kept)
        except InsufficientMemory as error:
            return await self._load_stored_precision(loading, described, error, others, kept)

    async def _load_stored_precision(
        self,
        loading: LoadTask,
        described: DescribedModel,
        error: InsufficientMemory,
        others: Sequence[ModelSize],
        kept: int,
    ) -> LoadedModel:
        """Load the model in the precision that suits how it is stored, although that costs too much: float32 does not
        fit in memory.
        """
        log.warning(
            "%s: %s; and float32 does not fit: %s",
            described.size.name,
            described.description.default_precision.reason,
            error.message,
        )
        stored = await run_on_daemon_thread(
            lambda: self._place_again(described, replace(described.description, preferred_precision=None))
        )
        return await self._load(loading, stored, others, kept, strict=False)

    def _place(
        self, name: str, source: str, description: Description, draft: Description | None = None
    ) -> DescribedModel:
        """Build, measure and place a model. Raises now what is impossible, before other models are planned."""
        world = self._settings.tensor_parallel
        weights = WeightReader(description) if world == 1 else None
        companion = draft or description.queries
        size = measure_model(name, description, companion, world, weights)
        placement = choose_placement(self._settings, size.default_precision, size.config)
        companion_weights = None if companion is None else WeightReader(companion)
        for each in filter(None, (description, companion)):
            _ = each.text_tokenizer  # made here, and kept: the engine's thread needs it
        return DescribedModel(source, description, size, placement, weights, companion, companion_weights)

    def _log_recurrent_limits(self, size: ModelSize, need: MemoryNeed) -> None:
        if not size.config.is_recurrent:
            return
        if self._settings.draft_tokens:
            log.info("%s: nothing is drafted for it: %s", size.name, NO_RECURRENT_DRAFTS)
        if shortage := describe_state_shortage(size, need, self._settings):
            log.warning(shortage)

    def _place_again(self, described: DescribedModel, description: Description) -> DescribedModel:
        return self._place(described.size.name, described.source, description, described.companion)

    async def _load(
        self,
        loading: LoadTask,
        described: DescribedModel,
        others: Sequence[ModelSize],
        kept: int,
        *,
        strict: bool = True,
    ) -> LoadedModel:
        """Load with the description's default precision. Raises PrecisionCostError if that costs too much and `strict`
        is true.
        """
        placement = described.placement
        if placement.instructions and self._settings.precision == "auto":
            log.info("%s: %s", described.size.name, describe_precision(described.size.default_precision))
        if self.placement.instructions and not placement.instructions:
            log.info(
                "%s: %s",
                described.size.name,
                describe_torch_fallback(unsupported_reason(described.size.config), self.placement),
            )
        self.tokenizer_check.close()
        needed = smallest_need(described.size, self._settings).total
        await self.make_room(needed, self.budget.useful_bytes(described.size, others, kept))
        need = self.budget.plan(described.size, others, kept)
        self._log_recurrent_limits(described.size, need)
        part, in_place = None, choose_kernel(placement, described.size.config) is not None
        if self._ranks is not None:
            part = self._ranks.new_model(described.source, self.source_policy, need, placement, in_place=in_place)
        async with AsyncExitStack() as undo:
            self.budget.reserve(need)
            undo.callback(self.budget.release, need)
            if part is not None:
                undo.push_async_callback(self._engine.call, part.drop)
            tests = await self._prepare_tests(loading, described, need)
            max_cost = self._settings.max_kl if strict and self._settings.precision == "auto" else math.inf
            plan = LoadPlan(described, need, part, tests, max_cost)
            built = await loading.on_engine(self._engine, lambda: self._build(loading, plan))
            for test in tests:
                await run_on_daemon_thread(test.store_cost)
            if isinstance(built, PrecisionCostError):
                raise built
            weights = WeightsInUse(need.name, described.source, described.description, placement.precision)
            calibration = await self._choose_calibration(loading, weights)
            self._engine.add_worker(built.worker, self._settings.weights.get(need.name, 1.0))
            undo.pop_all()
        self.stage_seconds["read and pack"] += built.read_seconds
        self.stage_seconds["warm up"] += built.warm_seconds
        loaded = built.checkpoint
        model = build_model(need, loaded, placement, loaded.sampling if self._settings.generation_config else {})
        model = replace(model, calibration=calibration)
        how = f"{placement.precision} by {model.executor}" + (
            f", {describe_cost(built.cost, described.description)}" if built.cost is not None else ""
        )
        facts = need.name, loaded.family, loaded.task, how, need.weights / 2**20, built.read_seconds, built.warm_seconds
        log.info("%s is ready: %s, %s, %s, %.0f MiB; read in %.2f s, warm in %.2f s", *facts)
        if model.sampling:
            log.info("%s: requests that do not set them have %s", need.name, describe_sampling(model.sampling))
        description = described.description
        return LoadedModel(model, built.worker, need, BaseModel(description), description, part)

    async def _choose_calibration(self, loading: LoadTask, weights: WeightsInUse) -> Calibration:
        """Read the calibration of a model, if it has one. Raises CheckpointError (see choose_calibration)."""
        with self._time_stage(loading, "read and pack"):
            found = await run_on_daemon_thread(
                lambda: choose_calibration(weights, self._settings, self.source_policy, loading.check)
            )
        if found.maps:
            log.info(
                "%s: its decisions are calibrated: %s", weights.name, join_names([each.name for each in found.maps])
            )
        return found

    async def _prepare_tests(
        self, loading: LoadTask, described: DescribedModel, need: MemoryNeed
    ) -> Sequence[SelfTest]:
        """Return the test of what the precision costs; none if nothing is to be tested. It hashes the weights."""
        if not is_tested(described.placement):
            return []
        longest = need.all_layers_tokens or described.description.max_tokens
        with self._time_stage(loading, "read and pack"):
            loading.stage = TEST_PHRASE
            test = await run_on_daemon_thread(
                lambda: SelfTest(described.description, described.placement, self._settings, longest, loading.check)
            )
        return [test]

    def _build(self, loading: LoadTask, plan: LoadPlan) -> BuiltModel | PrecisionCostError:
        """Read and pack the weights, and warm up the worker. Called on the engine's thread.

        Returns an error if the precision costs too much. It is not raised here: its traceback would hold the weights.
        """
        described, need, tests = plan.described, plan.need, plan.tests
        began, loading.stage = time.perf_counter(), STAGES["read and pack"]
        yield_turn = self._yield_callback(loading)
        companion = self._build_companion(loading, described, need)
        for test in tests:
            loading.stage = TEST_PHRASE
            assert described.weights is not None, "one process computes what is tested"
            test.compute_reference(described.weights, yielding_progress(yield_turn, loading))
            trim_heap()
            loading.stage = STAGES["read and pack"]
        loaded = self._read_checkpoint(loading, described, plan.part)
        executor = self._build_executor(loading, described.placement, need, loaded, plan.part)
        for test in tests:
            test.compare(executor, yield_turn)
        worker = self._build_worker(described.placement, need, loaded, companion, self._executor_hook(executor))
        cost = next((test.cost for test in tests), None)
        if cost is not None and cost > plan.max_cost:
            free_weights(loaded.head)  # the rest is packed, and the packed weights are freed with the executor
            return PrecisionCostError(described.placement, cost)
        read, loading.stage = time.perf_counter(), STAGES["warm up"]
        worker.warm_up(yield_turn)
        trim_heap()  # else the allocator keeps as much memory again as was read
        return BuiltModel(loaded, worker, cost, read - began, time.perf_counter() - read)

    @contextmanager
    def _time_stage(self, loading: LoadTask, stage: str) -> Iterator[None]:
        began, loading.stage = time.perf_counter(), STAGES[stage]
        yield
        self.stage_seconds[stage] += time.perf_counter() - began

    async def retire(self, served: LoadedModel, drain_s: float) -> None:
        """Stop submitting to a model. Running requests have `drain_s` seconds to finish; then the worker and its memory
        are released.
        """
        if served.model.adapter:
            await self._engine.remove_adapter(served.worker, served.model.adapter, drain_s)
        else:
            await self._engine.remove_worker(served.worker, drain_s)
            if served.distributed is not None:
                await self._engine.call(served.distributed.drop)
        self.budget.release(served.need)

    async def release_memory(self) -> None:
        """Return freed memory to the operating system, after the last reference to something large is gone. A busy
        engine does it later.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self._engine.call(machine.return_free_memory)

    def _build_companion(
        self, loading: LoadTask, described: DescribedModel, need: MemoryNeed
    ) -> DraftModel | QueryNetwork | None:
        """Read the draft model or the network for queries and build it; None if there is neither."""
        name, settings, size = described.size.name, self._settings, described.size.companion
        if described.companion is None:
            return None
        is_draft = described.companion is not described.description.queries
        source = settings.drafts[name] if is_draft else described.source
        assert size is not None
        # A companion is never distributed over several processes.
        placement = choose_placement(settings, size.default_precision, size.config)
        loaded = self._read_checkpoint(
            loading,
            DescribedModel(source, described.companion, size, placement, described.companion_weights),
            None,
            is_shown=False,
        )
        own = replace(need, window_blocks=0)  # as it was predicted: it has the numbers of one kind of block only
        executor = self._executor_hook(self._build_executor(loading, placement, own, loaded, None))
        if not is_draft:
            tokens = encoder_step_tokens(settings, placement, loaded.decoder_config)
            return QueryNetwork(executor, cast(OutputHead, loaded.head), tokens)
        words = min(loaded.config.vocab_size, described.size.config.vocab_size)
        log.info("%s: %s drafts for it", name, source)
        return DraftModel(executor, budget=settings.step_tokens, longest=loaded.max_tokens, words=words)

    def _yield_callback(self, loading: LoadTask) -> Callable[[], None]:
        """Return a function that long work on the engine's thread calls often: it lets other models compute, and raises
        if the load was ended.
        """

        def yield_turn() -> None:
            loading.check()
            self._engine.yield_turn()

        return yield_turn

    def _read_checkpoint(
        self, loading: LoadTask, described: DescribedModel, part: DistributedModel | None, *, is_shown: bool = True
    ) -> Checkpoint:
        """Read a checkpoint. For the compiled step the weights themselves are read later, as they are packed. Called on
        the engine's thread, as are the next two.
        """
        placement, yield_turn = described.placement, self._yield_callback(loading)
        progress = yielding_progress(yield_turn, loading, is_shown=is_shown)
        if part is not None:
            return part.read(described.description, progress)
        assert described.weights is not None, "one process computes it"
        read = checkpoint.prepare if placement.instructions else checkpoint.load_built
        return read(
            described.source, described.weights, dtype=placement.dtype, device=placement.device, progress=progress
        )

    def _build_executor(
        self,
        loading: LoadTask,
        placement: Placement,
        need: MemoryNeed,
        loaded: Checkpoint,
        part: DistributedModel | None,
    ) -> Executor:
        if part is not None:
            return part.build_executor(loaded)
        settings, yield_turn = self._settings, self._yield_callback(loading)
        often = sliced_turns(yield_turn, loading)

        @contextmanager
        def load_part(module: nn.Module) -> Iterator[None]:
            loaded.load_blocks(module)
            yield
            free_weights(module, often)
            trim_heap()  # else the allocator keeps the memory of every part
            yield_turn()

        make_deterministic(loaded, settings, placement, often)
        cache = CacheSize(need.blocks, need.state_count, need.window_blocks)
        hooks = PackHooks(load_part, often)
        return build_executor(loaded, settings, placement, cache, hooks)

    def _build_worker(
        self,
        placement: Placement,
        need: MemoryNeed,
        loaded: Checkpoint,
        companion: DraftModel | QueryNetwork | None,
        executor: Executor,
    ) -> Worker:
        settings = self._settings
        if not (loaded.decoding or isinstance(loaded.head, LanguageHead)):
            head, task = cast(OutputHead, loaded.head), cast(Task, loaded.task)
            tokens = encoder_step_tokens(settings, placement, loaded.decoder_config)
            worker = EncoderWorker(executor, head, model=need.name, task=task, token_budget=tokens)
            if isinstance(companion, QueryNetwork):
                worker.add_query_network(companion)
            return worker
        generator = GeneratorWorker(
            executor,
            model=need.name,
            token_budget=settings.step_tokens,
            sequence_budget=need.sequences,
            prefill_chunk=1 if loaded.decoding else settings.prefill_chunk,  # it reads token by token
        )
        generator.set_context_cost(context_cost(placement, loaded.decoder_config))
        generator.sampler = build_sampler(placement)
        # An encoder-decoder computes any state but the newest from the beginning, recurrent layers cannot go back.
        if not (loaded.decoding or loaded.decoder_config.is_recurrent):
            drafter = companion if isinstance(companion, DraftModel) else None
            generator.speculation = Speculation(settings.draft_tokens, settings.max_running, drafter)
        return generator


def check_tokenizer_fits(name: str, room: int, memory: TokenizerMemory) -> None:
    """Raise InsufficientMemory if a tokenizer takes more than `room` bytes while it is read. It is read before anything
    is reserved for its model.
    """
    if memory.most > room:
        takes, free = ceil_mib(memory.most), max(room, 0) >> 20
        raise InsufficientMemory(
            f"to read the tokenizer of {name} takes {takes} MiB, and {free} MiB are free; it would fit with another "
            "model unloaded, or a larger memory_mib, if there is so much"
        )


def yielding_progress(
    yield_turn: Callable[[], None], loading: LoadTask, *, is_shown: bool = False
) -> Callable[[int, int], None]:
    """Return a progress callback for code that reads on the engine's thread. It raises if
    the load was ended, and calls `yield_turn`, which lets other models compute, every READ_SLICE_S seconds. `is_shown`:
    the fraction that is read is that of the load.
    """
    yielded_at = time.perf_counter()

    def progress(done: int, total: int) -> None:
        nonlocal yielded_at
        loading.check()
        if is_shown:
            loading.fraction = min(done / total, 1.0) if total else 0.0
        if time.perf_counter() - yielded_at > READ_SLICE_S:
            yield_turn()
            yielded_at = time.perf_counter()

    return progress


def sliced_turns(yield_turn: Callable[[], None], loading: LoadTask) -> Callable[[], None]:
    """As `yielding_progress`, for work that is not a number of bytes."""
    progress = yielding_progress(yield_turn, loading)
    return lambda: progress(0, 0)


def describe_sampling(sampling: Mapping[str, float]) -> str:
    """Sampling options for a log line."""
    return ", ".join(f"{name} {value:g}" for name, value in sampling.items())


def known_sources(settings: Settings) -> frozenset[str]:
    """Return the sources that the settings name, without what says a task, and both parts of a model with a merged
    adapter. Any other source was named over HTTP.
    """
    given = settings.models.values()
    named = [*given, *(source.rpartition(TASK_MARK)[0] for source in given)]
    return frozenset(part for source in named for part in (source, *source.rpartition("+")[::2]) if part)


def describe_precision(default: DefaultPrecision) -> str:
    """Return the precision for the log, with its reason, and with an alternative."""
    faster = "; --precision int8 is faster, smaller and less exact" if default.precision == "float32" else ""
    return f"{default.precision}, since {default.reason}{faster}"


def describe_torch_fallback(reason: str, placement: Placement) -> str:
    """Return why torch computes one model while the compiled step computes others, and what else could be set."""
    fallback = f"torch computes it, not the compiled step: {reason}"
    if placement.threads == placement.torch_threads:
        return fallback
    threads = f"it has {placement.torch_threads} thread, and with --executor torch, for all models, {placement.threads}"
    return f"{fallback}; {threads}"
