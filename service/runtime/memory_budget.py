"""One memory budget for all models: the memory that each will need is predicted before it is loaded.

A prediction is a function of a checkpoint's description and the settings. So the settings that would fit are found by
predicting again with other settings.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import nn

from polyhead.models.checkpoint.default_precision import DefaultPrecision
from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.load_estimate import LoadSize, estimate_load, estimate_reading
from polyhead.models.checkpoint.unmerged_adapter import LoraPlan
from polyhead.models.checkpoint.weight_reader import WeightReader
from polyhead.models.core.errors import UnsupportedError
from polyhead.models.core.label_prompt import MAX_LABELS
from polyhead.models.executors.seq2seq_executor import MAX_SOURCE_TOKENS
from polyhead.models.executors.workspace import (
    LargestStep,
    block_bytes,
    forward_bytes,
    gather_bytes,
    graph_bytes,
    self_test_bytes,
)
from polyhead.models.invariant.invariant_linear import linear_test_bytes
from polyhead.models.native import step_memory as native
from polyhead.models.native.packed_network import Precision
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.recurrent_state import state_bytes
from polyhead.models.parallel import Share, cut_parameters, share_config

from ..config.settings import Settings
from ..core.errors import InsufficientMemory
from ..core.request import Task
from ..engine.encoder_worker import MAX_READINGS, SMALLER_BATCH
from ..engine.head_outputs import reading_bytes
from ..engine.sampler import sampling_bytes
from ..engine.state_slots import smallest_slot_count
from ..engine.window_blocks import held_limit
from ..resources import machine
from ..resources.connection_memory import connection_bytes
from .executor_choice import choose_kernel, encoder_step_tokens, sampling_instructions
from .placement import Placement, choose_placement
from .self_test import precision_test_bytes

CHECKPOINT_STATES = 16  # states that stay cached while all sequences run, where memory allows
CPU_CACHE_TOKENS = 16_384  # a generator's cache on a CPU, unless its context is longer or memory is short
MIN_CACHE_TOKENS = 256  # the smallest cache that an error message suggests
MIB = 1 << 20
FLOAT_BYTES = 4
LAYER_FEATURES = 16  # vectors of a token that exist in a layer of the head, as multiples of their width
WORD_FEATURES = 8  # vectors of a word that exist while its spans are scored, as multiples of their width
# Of an adapter's description: its configuration, a place in two mappings for each tensor of base and adapter, and for
# each update the entries of its two matrices and of their product.
DESCRIPTION_BYTES, ENTRY_BYTES, UPDATE_BYTES = 8 << 10, 200, 2 << 10
GROWTH_FACTOR = 3  # a state that grows: the old one, the new one, and its spare capacity


def count_head_columns(description: Description) -> int:
    """Return how many scores the head has for a token or a text; of an embedding its width."""
    match description.head.task:
        case "fill":
            return description.config.vocab_size
        case "embed":
            return max(description.vector_width, description.config.width)
        case "label_spans":
            assert description.labels is not None, "it reads labels"
            # scores of a word, and its features while its spans are scored
            return MAX_LABELS * description.labels.columns + WORD_FEATURES * description.head.width
        case "decide":
            return max(LAYER_FEATURES * description.head.width, 2)
        case _:
            return max(len(description.head.labels), 2)


@dataclass(frozen=True)
class ModelSize:
    """What determines a model's memory, apart from the settings.

    `columns`: scores that its head has for a token or a text. `context`: tokens of its longest input. `companion`:
    the size of its draft model or of its network for queries, if it has one.
    """

    name: str
    config: ModelConfig
    task: Task
    columns: int
    context: int
    checkpoint_size: LoadSize
    default_precision: DefaultPrecision
    world_size: int = 1  # ranks; `config` and `checkpoint_size` are those of rank 0's share
    companion: "ModelSize | None" = None
    encoder_config: ModelConfig | None = None  # of an encoder-decoder

    @property
    def generates(self) -> bool:
        return self.task == "generate"

    @property
    def has_vocabulary_head(self) -> bool:
        """Whether its head has as many columns as the vocabulary has tokens."""
        return self.task in ("generate", "fill")


def measure_model(
    name: str,
    description: Description,
    companion: Description | None = None,
    world: int = 1,
    weights: WeightReader | None = None,
) -> ModelSize:
    """Measure a described model for `world` processes. `weights`: its network, if one process has it and built it.

    Raises CheckpointError if the files do not hold what the description requires, and UnsupportedError if so many
    processes cannot compute it together.
    """
    own = description if world == 1 else shard_description(description, Share(0, world))
    return ModelSize(
        name=name,
        config=description.decoder_config if world == 1 else share_config(description.decoder_config, Share(0, world)),
        world_size=world,
        encoder_config=description.config if description.head.decoding else None,
        task="generate" if description.head.decoding else cast(Task, description.head.task),
        columns=count_head_columns(description),
        context=description.max_tokens,
        checkpoint_size=estimate_load(own) if weights is None else estimate_reading(weights),
        default_precision=description.default_precision,
        companion=measure_model(f"{name}'s companion", companion) if companion else None,
    )


def shard_description(description: Description, share: Share) -> Description:
    """Return the description of one rank's share. Raises UnsupportedError for encoder-decoders."""
    if description.head.decoder_configs:
        message = "a network with an encoder and a decoder is not shared out; serve it with tensor_parallel 1"
        raise UnsupportedError(message, file=description.file)
    return replace(description, cut_network=partial(cut_parameters, share=share))


@dataclass(frozen=True)
class CachePlan:
    """What a generator may keep between steps: blocks of keys and values, the sequences that run at once, states of
    recurrent layers that stay cached while they run, and blocks of windowed layers. If there are none of these,
    windowed layers use the blocks of the others; there are never more than of the others.
    """

    blocks: int = 0
    sequences: int = 0
    checkpoints: int = 0
    window_blocks: int = 0


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that a model needs, in bytes. A generator's cache has `blocks` of `block_size` tokens; an encoder has
    0 blocks. `sequences` of a generator may run at once.

    `loading` is needed beside the weights while they are read, when cache and workspace are not in use yet. `states`
    are `state_count` slots for the states of recurrent layers. `window_blocks` of the cache are of windowed layers, and
    `blocks` then of the others.
    """

    name: str
    weights: int
    cache: int
    workspace: int
    loading: int
    blocks: int
    block_size: int
    sequences: int = 0
    states: int = 0
    state_count: int = 0
    window_blocks: int = 0

    @property
    def total(self) -> int:
        return self.weights + max(self.cache + self.states + self.workspace, self.loading)

    @property
    def cache_tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def all_layers_tokens(self) -> int:
        """The tokens of one sequence that the cache holds in every layer, also in windowed ones."""
        own = self.window_blocks or self.blocks
        return min(self.blocks, own) * self.block_size

    @property
    def cache_contents(self) -> str:
        """The tokens that the cache holds, for a message."""
        windows = f", {self.window_blocks * self.block_size} in windows" if self.window_blocks else ""
        return f"{self.cache_tokens} tokens{windows}"

    def __str__(self) -> str:
        cache = f", cache {ceil_mib(self.cache)} ({self.cache_contents})" if self.blocks else ""
        states = f", states {ceil_mib(self.states)} ({self.state_count} slots)" if self.state_count else ""
        parts = f"weights {ceil_mib(self.weights)}{cache}{states}, workspace {ceil_mib(self.workspace)}"
        return f"{ceil_mib(self.total)} MiB ({parts})"


def adapter_memory_need(name: str, plan: LoraPlan, placement: Placement) -> MemoryNeed:
    """Predict the memory of an adapter: its matrices, padded if the compiled step packs them, its own head, and its
    description, which is kept to explain its answers.
    """
    is_packed = bool(placement.instructions)
    low, head = plan.parameter_counts
    weights = plan.packed_bytes if is_packed else low * placement.dtype.itemsize
    linears = [] if plan.head is None else [each for each in plan.head.modules() if isinstance(each, nn.Linear)]
    tests = [linear_test_bytes(each.in_features, each.out_features) for each in linears if is_packed]
    loading = max(plan.loading_bytes(is_packed), max(tests, default=0))
    weights += head * placement.dtype.itemsize
    weights += DESCRIPTION_BYTES + ENTRY_BYTES * len(plan.description.entries) + UPDATE_BYTES * len(plan.updates)
    return MemoryNeed(name, weights, cache=0, workspace=0, loading=loading, blocks=0, block_size=0)


def adapter_bytes(needs: Collection[MemoryNeed]) -> int:
    """Return the bytes for adapters that are loaded one after the other."""
    return sum(need.weights for need in needs) + max((need.loading for need in needs), default=0)


class MemoryPrediction:
    """Predicts the memory of a model, and of its companion, under some settings.

    Raises what `choose_placement` raises.
    """

    def __init__(self, model: ModelSize, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.placement = choose_placement(settings, model.default_precision, model.config)
        self.companion = MemoryPrediction(model.companion, settings) if model.companion is not None else None

    def need(self, plan: CachePlan) -> MemoryNeed:
        """Predict the memory with such a cache; that of the draft model has as many blocks."""
        own = self._own_need(plan)
        if self.companion is None:
            return own
        other = self.companion.need(replace(plan, window_blocks=0))  # it has the numbers of one kind of block only
        return replace(
            own,
            weights=own.weights + other.weights,
            cache=own.cache + other.cache,
            workspace=own.workspace + other.workspace,
            loading=max(other.loading, own.loading + other.cache),  # it is read first
        )

    def smallest_plan(self) -> CachePlan:
        """Return the smallest useful cache: one full context, or the setting `cache_tokens`, and the states of one
        sequence.
        """
        model, settings = self.model, self.settings
        if not model.generates:
            return CachePlan()
        blocks = math.ceil((settings.cache_tokens or model.context) / self.placement.block_size)
        sequences = 1 if model.config.is_recurrent else settings.max_running
        return CachePlan(blocks, sequences, window_blocks=self._window_limit)

    def largest_plan(self) -> CachePlan:
        """Return the largest useful cache, with as many blocks as the setting `cache_tokens` asks for."""
        model, settings = self.model, self.settings
        if not model.generates:
            return CachePlan()
        useful, size, limit = settings.max_running * model.context, self.placement.block_size, self._window_limit
        only_windows = limit > 0 and len(model.config.windowed_layers) == len(model.config.cached_layers)
        takes_memory = not only_windows or self.companion is not None  # it has as many blocks, and no windows
        if self.placement.device.type == "cpu" and takes_memory:
            useful = min(useful, max(model.context, CPU_CACHE_TOKENS))
        blocks = math.ceil((settings.cache_tokens or useful) / size)
        checkpoints = CHECKPOINT_STATES if model.config.is_recurrent else 0
        return CachePlan(blocks, settings.max_running, checkpoints, min(self._useful_window_blocks, blocks))

    @property
    def _window_limit(self) -> int:
        """The blocks of windowed layers that one sequence needs; 0 if these layers use the blocks of the others: where
        there are none, a context is no longer, or the executor reads one block table.
        """
        model, settings, size = self.model, self.settings, self.placement.block_size
        config, one_table = model.config, choose_kernel(self.placement, model.config) or model.world_size > 1
        if not model.generates or model.encoder_config is not None or one_table or not config.windowed_layers:
            return 0
        limit = held_limit(config.window, min(settings.prefill_chunk, settings.step_tokens), size)
        return limit if limit < math.ceil((settings.cache_tokens or model.context) / size) else 0

    @property
    def _useful_window_blocks(self) -> int:
        """The blocks of windowed layers for as many sequences as may run, whatever their lengths; on a CPU no more than
        for CPU_CACHE_TOKENS, unless the setting `cache_tokens` says how many tokens the cache has.
        """
        settings, size, limit = self.settings, self.placement.block_size, self._window_limit
        if not limit:
            return 0
        useful = settings.max_running * held_limit(self.model.config.window, 1, size)
        useful += math.ceil(settings.step_tokens / size)
        if self.placement.device.type == "cpu" and not settings.cache_tokens:
            useful = min(useful, math.ceil(CPU_CACHE_TOKENS / size))
        return max(useful, limit)

    def largest_need(self, room: int) -> MemoryNeed:
        """Predict the memory with the largest cache that takes at most `room` bytes, or else the smallest one.

        Sequences that run at once come before more blocks for them, those of windowed layers first, and these before
        cached states.
        """
        plan, largest = self.smallest_plan(), self.largest_plan()

        for part in ("sequences", "window_blocks", "blocks", "checkpoints"):
            fits = partial(self._fits, plan, part, room)
            plan = replace(plan, **{part: search_highest(getattr(plan, part), getattr(largest, part), fits)})
        return self.need(plan)

    def _fits(self, plan: CachePlan, part: str, room: int, count: int) -> bool:
        return self.need(replace(plan, **{part: count})).total <= room

    def _own_need(self, plan: CachePlan) -> MemoryNeed:
        """The memory without the companion."""
        model, placement, blocks = self.model, self.placement, plan.blocks
        state_count = smallest_slot_count(plan.sequences) + plan.checkpoints if model.config.is_recurrent else 0
        largest = largest_step(model, self.settings, placement, plan)
        parts = (
            native_parts(model, placement, largest)
            if placement.instructions
            else torch_parts(model, self.settings, placement, largest)
        )
        own = min(plan.window_blocks, blocks)
        windowed = own or blocks  # blocks that windowed layers have
        return MemoryNeed(
            name=model.name,
            weights=parts.weights,
            cache=blocks * (parts.block - parts.window_block) + windowed * parts.window_block if model.generates else 0,
            workspace=model.checkpoint_size.tokenizer + parts.computing,
            loading=model.checkpoint_size.tokenizer + parts.loading,
            blocks=blocks,
            block_size=placement.block_size,
            sequences=plan.sequences,
            states=state_count * parts.state,
            state_count=state_count,
            window_blocks=own,
        )


def memory_need(model: ModelSize, settings: Settings, blocks: int) -> MemoryNeed:
    """Predict the memory of a model whose cache has so many blocks, with as many sequences as the settings allow."""
    return MemoryPrediction(model, settings).need(CachePlan(blocks, settings.max_running if model.generates else 0))


def smallest_need(model: ModelSize, settings: Settings) -> MemoryNeed:
    prediction = MemoryPrediction(model, settings)
    return prediction.need(prediction.smallest_plan())


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of the weights, of one cache block of all layers, of the largest step, of what is needed beside the weights
    while they are loaded, of one state of the recurrent layers, and of the windowed layers' part of a block.
    """

    weights: int
    block: int
    computing: int
    loading: int
    state: int = 0
    window_block: int = 0


def torch_parts(model: ModelSize, settings: Settings, placement: Placement, largest: LargestStep) -> MemoryParts:
    config, dtype = model.config, placement.dtype
    block = block_bytes(config, placement.block_size, dtype)
    if model.encoder_config is not None:
        return seq2seq_parts(model, model.encoder_config, placement, largest)
    states = largest.rows * config.width * FLOAT_BYTES
    computing = max(forward_bytes(config, dtype, largest), states + head_output_bytes(model, largest))
    if largest.beside:
        small = replace(largest, rows=largest.beside, sequences=largest.beside)
        computing += (MAX_READINGS - 1) * forward_bytes(config, dtype, small)
    if model.generates:
        logit_bytes = 0 if dtype.itemsize == 4 else dtype.itemsize  # logits are converted to float32
        logit_bytes += dtype.itemsize if model.world_size > 1 else 0  # and gathered from several ranks
        computing = max(computing, max_sampling_bytes(model, largest, placement, logit_bytes))
        if largest.in_place:  # and the spare block to which padding rows are written
            computing += graph_bytes(config, dtype, settings.max_running) + block
    test = self_test_bytes(config, dtype, model.has_vocabulary_head) if settings.deterministic else 0
    return MemoryParts(
        model.checkpoint_size.weight_bytes(dtype),
        block,
        computing + gather_bytes(config, dtype, largest),
        max(model.checkpoint_size.temporary_bytes(dtype), test),
        state_bytes(config),
        block_bytes(config, placement.block_size, dtype, windowed=True),
    )


def seq2seq_parts(model: ModelSize, encoder: ModelConfig, placement: Placement, largest: LargestStep) -> MemoryParts:
    """Bytes of an encoder-decoder. Encoder states and decoder tokens take blocks of the same size; a state exists twice
    while it grows. Sources are encoded between steps of the decoder.
    """
    config = model.config
    read = replace(largest, rows=max(MAX_SOURCE_TOKENS, model.context), context=model.context, cached=False)
    computing = forward_bytes(encoder, placement.dtype, read) + forward_bytes(config, placement.dtype, largest)
    logits = largest.sequences * config.vocab_size * FLOAT_BYTES
    return MemoryParts(
        model.checkpoint_size.weight_bytes(placement.dtype),
        GROWTH_FACTOR * block_bytes(config, placement.block_size, placement.dtype),
        computing + 2 * logits + max_sampling_bytes(model, largest, placement, 0),
        model.checkpoint_size.temporary_bytes(placement.dtype),
    )


def native_parts(model: ModelSize, placement: Placement, largest: LargestStep) -> MemoryParts:
    config, precision = model.config, cast(Precision, placement.precision)
    computing = native.workspace_bytes(config, largest, placement.threads, model.generates)
    if largest.beside:
        small = replace(largest, rows=largest.beside, sequences=largest.beside)
        computing += (MAX_READINGS - 1) * native.workspace_bytes(config, small, placement.threads, generates=False)
    if model.generates:
        computing += max_sampling_bytes(model, largest, placement, 0)
    else:
        computing += head_output_bytes(model, largest)
    testing = precision_test_bytes(placement, config.vocab_size) if model.generates else 0
    stored = (config, precision, model.generates, model.checkpoint_size.tied, model.checkpoint_size.bits)
    packed, part, kept = native.weight_bytes(*stored), native.loading_bytes(*stored), 0
    if not model.generates:  # torch computes the head, which is made batch-invariant before anything is packed
        kept = model.checkpoint_size.head * FLOAT_BYTES
        part = max(part, head_loading_bytes(model) - packed)
    return MemoryParts(
        packed + kept,
        native.native_block_bytes(config, precision),
        computing,
        part + testing + model.checkpoint_size.temporary_bytes(placement.dtype),
        native.native_state_bytes(config),
        native.native_block_bytes(config, precision, windowed=True),
    )


def head_loading_bytes(model: ModelSize) -> int:
    """Bytes beside the head's own parameters while its batch invariance is tested. A head that shares the token
    embedding has them as read, too.
    """
    width = model.config.width
    shared = model.config.vocab_size * width * FLOAT_BYTES if model.task == "fill" else 0
    return shared + linear_test_bytes(width, max(model.columns, width))


def head_output_bytes(model: ModelSize, largest: LargestStep) -> int:
    """Bytes of the head's output for the states of the largest step."""
    return reading_bytes(model.task, largest.rows, model.columns)


def max_sampling_bytes(model: ModelSize, largest: LargestStep, placement: Placement, logit_bytes: int) -> int:
    """Return the bytes of sampling in the largest step. `logit_bytes`: bytes of each logit before it is converted to
    float32.
    """
    rows, sorts = min(largest.sequences, largest.rows), not sampling_instructions(placement)
    return sampling_bytes(rows, model.config.vocab_size, logit_bytes, sorts=sorts)


def largest_step(model: ModelSize, settings: Settings, placement: Placement, plan: CachePlan) -> LargestStep:
    in_place = choose_kernel(placement, model.config) is not None
    if model.generates:
        return LargestStep(
            rows=settings.step_tokens,
            sequences=plan.sequences,
            context=min(model.context, plan.blocks * placement.block_size),
            cached=True,
            invariant=settings.deterministic,
            in_place=in_place,
        )
    tokens = encoder_step_tokens(settings, placement, model.config)
    rows = max(tokens, model.context)
    return LargestStep(
        rows=rows,
        sequences=rows,
        context=model.context,
        cached=False,
        invariant=settings.deterministic,
        in_place=in_place,
        beside=tokens // SMALLER_BATCH if rows > tokens else 0,
    )


def memory_limit(settings: Settings, device: torch.device) -> int:
    """Return the bytes for the models of this process: the setting `memory_mib`, or the free memory. Processes on CPUs
    share that equally, without what connections take.
    """
    free = machine.spendable_memory(device)
    if device.type != "cuda":
        free = max(free - connection_bytes(settings), 0) // settings.tensor_parallel
    return settings.memory_mib * MIB or free


def count_shares(others: Sequence[ModelSize]) -> int:
    """Return the number of parts into which spare memory is divided before `others` are loaded."""
    return 1 + sum(other.generates for other in others)


class MemoryBudget:
    """`limit` bytes, of which loaded models, and those that are being loaded, reserve what they need."""

    def __init__(self, limit: int, settings: Settings) -> None:
        self.limit, self._settings = limit, settings
        self._reserved: list[MemoryNeed] = []

    @property
    def free(self) -> int:
        return self.limit - sum(reserved.total for reserved in self._reserved)

    def plan(self, model: ModelSize, others: Sequence[ModelSize] = (), kept: int = 0) -> MemoryNeed:
        """Return the memory that a model gets. Raises InsufficientMemory.

        If memory is short, its cache is made smaller, and where sequences have recurrent states, fewer run at once. As
        far as possible, `others`, which are loaded later, are left the least that they need, and `kept` bytes are left
        free.
        """
        prediction = MemoryPrediction(model, self._settings)
        smallest = prediction.need(prediction.smallest_plan())
        if smallest.total > self.free:
            raise InsufficientMemory(self.describe_shortage(model, smallest))
        spare = self.free - smallest.total - self._needed_later(others, kept)
        room = smallest.total + max(spare, 0) // count_shares(others)
        return prediction.largest_need(room)

    def useful_bytes(self, model: ModelSize, others: Sequence[ModelSize] = (), kept: int = 0) -> int:
        """Return how many bytes must be free for the largest useful cache, with the arguments of `plan`."""
        prediction = MemoryPrediction(model, self._settings)
        smallest, largest = (
            prediction.need(plan).total for plan in (prediction.smallest_plan(), prediction.largest_plan())
        )
        return smallest + self._needed_later(others, kept) + max(largest - smallest, 0) * count_shares(others)

    def _needed_later(self, others: Sequence[ModelSize], kept: int) -> int:
        return kept + sum(smallest_need(other, self._settings).total for other in others)

    def reserve(self, need: MemoryNeed) -> None:
        self._reserved.append(need)

    def reserve_adapter(self, need: MemoryNeed) -> None:
        """Reserve what an adapter needs. Raises InsufficientMemory."""
        if need.total > self.free:
            free = f"{ceil_mib(max(self.free, 0))} of {ceil_mib(self.limit)} MiB are free"
            raise InsufficientMemory(f"{need.name} needs {ceil_mib(need.total)} MiB, and {free}")
        self.reserve(need)

    def settle(self, need: MemoryNeed) -> MemoryNeed:
        """Release what is needed only while an adapter is loaded, and return what stays reserved."""
        settled = replace(need, loading=0)
        self.release(need)
        self.reserve(settled)
        return settled

    def release(self, need: MemoryNeed) -> None:
        self._reserved.remove(need)

    def describe_shortage(self, model: ModelSize, smallest: MemoryNeed) -> str:
        """Return the error message: the parts of the need, the free memory, and what to change."""
        free = f"{ceil_mib(max(self.free, 0))} of {ceil_mib(self.limit)} MiB are free"
        changes = "; or ".join(self.suggest_changes(model, smallest))
        return f"{model.name} needs {smallest}, and {free}. It would fit with {changes}"

    def suggest_changes(self, model: ModelSize, smallest: MemoryNeed) -> list[str]:
        """Return changes of which each alone is enough."""
        changes = [f"{name} {value}" for name, value in self._suggest_settings(model)]
        gain = [reserved for reserved in self._reserved if reserved.total >= smallest.total - self.free]
        if gain:
            changes.append(f"{min(gain, key=lambda reserved: reserved.total).name} unloaded")
        changes.append(f"memory_mib {math.ceil((smallest.total - self.free + self.limit) / MIB)}, if there is so much")
        return changes

    def _suggest_settings(self, model: ModelSize) -> list[tuple[str, object]]:
        """Return the settings, each with a value, that would make the model small enough."""
        settings, changes = self._settings, list[tuple[str, object]]()
        if model.generates:
            tokens = smallest_need(model, settings).cache_tokens
            ranges = {
                "cache_tokens": (MIN_CACHE_TOKENS, tokens),
                "step_tokens": (settings.max_running + 1, settings.step_tokens),
            }
            ranges["max_running"] = (1, settings.max_running)
        else:
            ranges = {"encoder_step_tokens": (1, settings.encoder_step_tokens)}
        for name, (low, high) in ranges.items():
            if low < high and self._fits(model, name, low):
                changes.append((name, search_highest(low, high, partial(self._fits, model, name))))
        placement = choose_placement(settings, model.default_precision, model.config)
        smaller = "int8" if placement.instructions else "bfloat16"
        if placement.precision == "float32" and self._fits(model, "precision", smaller):
            changes.append(("precision", smaller))
        return changes

    def _fits(self, model: ModelSize, setting: str, value: object) -> bool:
        return smallest_need(model, self._settings.model_copy(update={setting: value})).total <= self.free


def describe_state_shortage(model: ModelSize, need: MemoryNeed, settings: Settings) -> str:
    """Say how many sequences of a recurrent network run at once, if fewer than the settings allow; empty otherwise."""
    if not model.config.is_recurrent or need.sequences >= settings.max_running:
        return ""
    return (
        f"{model.name}: {need.sequences} of its sequences run at once, not the {settings.max_running} of max_running, "
        f"since a state has {ceil_mib(need.states // need.state_count)} MiB"
    )


def search_highest(low: int, high: int, good: Callable[[int], bool]) -> int:
    """Return the highest number from `low` to `high` for which `good` is true, by bisection. `good` must be true up to
    some number and false above; `low` is not tested.
    """
    while low < high:
        middle = (low + high + 1) // 2
        if good(middle):
            low = middle
        else:
            high = middle - 1
    return low


def ceil_mib(count: int) -> int:
    return math.ceil(count / MIB)
