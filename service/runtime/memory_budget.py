"""One budget of memory for all models: what each will take, told before it is loaded, and whether that fits.

Knows descriptions of checkpoints, no network.  The one idea: prediction is a function of a description and the
settings, so what should be set otherwise is found by asking it again with other settings.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from polyhead.models.checkpoint.default_precision import Suited
from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.load_estimate import Size, size
from polyhead.models.checkpoint.unmerged_adapter import Laid
from polyhead.models.core.errors import UnsupportedError
from polyhead.models.executors.seq2seq_executor import READ
from polyhead.models.executors.workspace import (
    Largest,
    block_bytes,
    forward_bytes,
    gathered_bytes,
    proof_bytes,
    recorded_bytes,
)
from polyhead.models.invariant.invariant_linear import proving_bytes
from polyhead.models.native import step_memory as native
from polyhead.models.native.packed_network import Precision
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.parallel import Share, cut, local

from ..config.settings import Settings
from ..core.errors import NoRoom
from ..core.request import Task
from ..engine.head_outputs import reading_bytes
from ..engine.sampler import drawing_bytes
from ..resources import machine
from .executor_choice import drawing_instructions, kernel_for
from .placement import Place, placed
from .self_test import testing_bytes

CACHE_TOKENS = 16_384  # of a generator on a CPU, unless its context is longer or memory scarce
FEWEST = 256  # tokens of a cache that are worth proposing
MIB = 1 << 20
PADDED = 1.1  # an adapter's matrices as they are packed, of their own size
FLOAT = 4
GROWN = 3  # what a state takes while it grows: as it was, as it will be, and room ahead


def columns_of(what: Description) -> int:
    match what.head.task:
        case "fill":
            return what.config.vocab_size
        case "embed":
            return what.config.width
        case _:
            return max(len(what.head.labels), 2)


@dataclass(frozen=True)
class Sized:
    """What of a model decides how much it takes, apart from the settings.  `columns`: scores that its head has for a
    token or a text.  `context`: tokens of its longest input.  `draft`: the model that drafts for it, if one does."""

    name: str
    config: ModelConfig
    task: Task
    columns: int
    context: int
    size: Size
    suited: Suited
    world: int = 1  # how many compute it together; `config` and `size` are those of the first's share
    draft: "Sized | None" = None
    reader: ModelConfig | None = None  # of the body that reads for it, where there are two

    @property
    def generates(self) -> bool:
        return self.task == "generate"

    @property
    def spells(self) -> bool:
        """Whether its head is as wide as the vocabulary."""
        return self.task in ("generate", "fill")


def sized(name: str, what: Description, draft: Description | None = None, world: int = 1) -> Sized:
    """Raises CheckpointError where the files do not hold what the description asks for, and UnsupportedError where so
    many cannot compute it together."""
    own = what if world == 1 else shared(what, Share(0, world))
    return Sized(
        name=name,
        config=what.body if world == 1 else local(what.body, Share(0, world)),
        world=world,
        reader=what.config if what.head.writing else None,
        task="generate" if what.head.writing else cast(Task, what.head.task),
        columns=columns_of(what),
        context=what.max_tokens,
        size=size(own),
        suited=what.suited,
        draft=sized(f"{name}'s draft", draft) if draft else None,
    )


def shared(what: Description, share: Share) -> Description:
    """Of which only that is counted."""
    if what.head.writing:
        message = "a network that reads one text and writes another is not shared out; serve it with tensor_parallel 1"
        raise UnsupportedError(message, file=what.file)
    return replace(what, cutting=partial(cut, share=share))


@dataclass(frozen=True)
class Need:
    """What a model takes, in bytes; `blocks` of `block_size` tokens make its cache, none that of an encoder.

    `loading` is what stands beside the weights while they are read, instead of cache and workspace.
    """

    name: str
    weights: int
    cache: int
    workspace: int
    loading: int
    blocks: int
    block_size: int

    @property
    def total(self) -> int:
        return self.weights + max(self.cache + self.workspace, self.loading)

    @property
    def cache_tokens(self) -> int:
        return self.blocks * self.block_size

    def __str__(self) -> str:
        cache = f", cache {mib(self.cache)} ({self.cache_tokens} tokens)" if self.blocks else ""
        return f"{mib(self.total)} MiB (weights {mib(self.weights)}{cache}, workspace {mib(self.workspace)})"


def need_beside(name: str, laid: Laid, place: Place) -> Need:
    """Of an adapter: its matrices, packed with padding where the compiled step reads them, and what its head has for
    itself."""
    low, head = laid.numbers
    each = FLOAT * PADDED if place.instructions else place.dtype.itemsize
    weights = int(low * each) + head * place.dtype.itemsize
    return Need(name, weights, cache=0, workspace=0, loading=0, blocks=0, block_size=0)


def need(model: Sized, settings: Settings, blocks: int) -> Need:
    """Of a model with a cache of so many blocks, and of its draft, whose has as many."""
    own = need_alone(model, settings, blocks)
    if model.draft is None:
        return own
    draft = need_alone(model.draft, settings, blocks)
    return replace(
        own,
        weights=own.weights + draft.weights,
        cache=own.cache + draft.cache,
        workspace=own.workspace + draft.workspace,
        loading=max(draft.loading, own.loading + draft.cache),  # it is read first
    )


def need_alone(model: Sized, settings: Settings, blocks: int) -> Need:
    place = placed(settings, model.suited, model.config)
    largest = largest_step(model, settings, blocks)
    taken = native_parts(model, place, largest) if place.instructions else torch_parts(model, settings, largest)
    return Need(
        name=model.name,
        weights=taken.weights,
        cache=blocks * taken.block if model.generates else 0,
        workspace=model.size.tokenizer + taken.computing,
        loading=model.size.tokenizer + taken.loading,
        blocks=blocks,
        block_size=place.block_size,
    )


@dataclass(frozen=True)
class Parts:
    """Bytes of weights, of a block of the cache, of the largest step, and of what stands beside weights at load."""

    weights: int
    block: int
    computing: int
    loading: int


def torch_parts(model: Sized, settings: Settings, largest: Largest) -> Parts:
    config, place = model.config, placed(settings, model.suited, model.config)
    dtype, block = place.dtype, block_bytes(config, place.block_size, place.dtype)
    if model.reader is not None:
        return written_parts(model, model.reader, settings, largest)
    states = largest.rows * config.width * FLOAT
    computing = max(forward_bytes(config, dtype, largest), states + read_bytes(model, largest))
    if model.generates:
        before = 0 if dtype.itemsize == 4 else dtype.itemsize  # the logits are float32
        before += dtype.itemsize if model.world > 1 else 0  # and come from several
        computing = max(computing, drawn_bytes(model, largest, place, before))
        if largest.in_place:  # and the spare block that padding is written to
            computing += recorded_bytes(config, dtype, settings.max_running) + block
    proof = proof_bytes(config, dtype, model.spells) if settings.deterministic else 0
    return Parts(
        model.size.weights(dtype),
        block,
        computing + gathered_bytes(config, dtype, largest),
        max(model.size.passing(dtype), proof),
    )


def written_parts(model: Sized, reader: ModelConfig, settings: Settings, largest: Largest) -> Parts:
    """Of two bodies: what was read and what is written take blocks alike, and states are there twice as they grow."""
    config, place = model.config, placed(settings, model.suited, model.config)
    read = replace(largest, rows=max(READ, model.context), context=model.context, cached=False)
    computing = max(forward_bytes(reader, place.dtype, read), forward_bytes(config, place.dtype, largest))
    logits = largest.sequences * config.vocab_size * FLOAT
    return Parts(
        model.size.weights(place.dtype),
        GROWN * block_bytes(config, place.block_size, place.dtype),
        computing + 2 * logits + drawn_bytes(model, largest, place, 0),
        model.size.passing(place.dtype),
    )


def native_parts(model: Sized, place: Place, largest: Largest) -> Parts:
    config, precision = model.config, cast(Precision, place.precision)
    computing = native.workspace_bytes(config, largest, place.threads, model.generates)
    if model.generates:
        computing += drawn_bytes(model, largest, place, 0)
    else:
        computing += read_bytes(model, largest)
    testing = testing_bytes(place, config.vocab_size) if model.generates else 0
    stored = (config, precision, model.generates, model.size.tied, model.size.bits)
    packed, part, kept = native.weight_bytes(*stored), native.loading_bytes(*stored), 0
    if not model.generates:  # the head stays with torch, and is made invariant before anything is packed
        kept = model.size.head * FLOAT
        part = max(part, part_of_head(model) - packed)
    return Parts(
        packed + kept,
        native.block_bytes(config, precision),
        computing,
        part + testing + model.size.passing(place.dtype),
    )


def part_of_head(model: Sized) -> int:
    """Beside its numbers, while it is proven; where it shares those of the tokens, they are there as read, too."""
    width = model.config.width
    shared = model.config.vocab_size * width * FLOAT if model.task == "fill" else 0
    return shared + proving_bytes(width, max(model.columns, width))


def read_bytes(model: Sized, largest: Largest) -> int:
    """What the head makes of the states."""
    return reading_bytes(model.task, largest.rows, model.columns)


def drawn_bytes(model: Sized, largest: Largest, place: Place, before: int) -> int:
    rows, sorts = min(largest.sequences, largest.rows), not drawing_instructions(place)
    return drawing_bytes(rows, model.config.vocab_size, before, sorts=sorts)


def largest_step(model: Sized, settings: Settings, blocks: int) -> Largest:
    place = placed(settings, model.suited, model.config)
    in_place = kernel_for(place, model.config) is not None
    if model.generates:
        return Largest(
            rows=settings.step_tokens,
            sequences=settings.max_running,
            context=min(model.context, blocks * place.block_size),
            cached=True,
            invariant=settings.deterministic,
            in_place=in_place,
        )
    rows = max(settings.encoder_step_tokens, model.context)
    return Largest(
        rows=rows,
        sequences=rows,
        context=model.context,
        cached=False,
        invariant=settings.deterministic,
        in_place=in_place,
    )


def least(model: Sized, settings: Settings) -> Need:
    """With the smallest cache it is served with: one full context, or what is asked for."""
    if not model.generates:
        return need(model, settings, 0)
    return need(model, settings, math.ceil((settings.cache_tokens or model.context) / placed(settings).block_size))


def most_blocks(model: Sized, settings: Settings) -> int:
    """Of its cache: as many as are asked for, or as are useful."""
    if not model.generates:
        return 0
    useful = settings.max_running * model.context
    if placed(settings).device.type == "cpu":
        useful = min(useful, max(model.context, CACHE_TOKENS))
    return math.ceil((settings.cache_tokens or useful) / placed(settings).block_size)


def limit_of(settings: Settings, device: torch.device) -> int:
    """Bytes for a process's models: what is set, or what is free.  Processes on CPUs have equal parts of that."""
    free = machine.spendable_memory(device) // (1 if device.type == "cuda" else settings.tensor_parallel)
    return settings.memory_mib * MIB or free


class Budget:
    """`limit` bytes, of which loaded models and those being loaded hold what they need."""

    def __init__(self, limit: int, settings: Settings) -> None:
        self.limit, self._settings = limit, settings
        self._held: list[Need] = []

    @property
    def free(self) -> int:
        return self.limit - sum(held.total for held in self._held)

    def plan(self, model: Sized, others: Sequence[Sized] = (), kept: int = 0) -> Need:
        """What a model is given.  Where memory is short its cache shrinks, and `others`, still to come, are left what
        they need at least, if that is possible; and so are `kept` bytes.  Raises NoRoom."""
        smallest = least(model, self._settings)
        if smallest.total > self.free:
            raise NoRoom(self.refusal(model, smallest))
        blocks = most_blocks(model, self._settings)
        if blocks <= smallest.blocks:
            return smallest
        spare = self.free - kept - smallest.total - sum(least(other, self._settings).total for other in others)
        room = smallest.total + max(spare, 0) // (1 + sum(other.generates for other in others))
        blocks = highest(smallest.blocks, blocks, lambda count: need(model, self._settings, count).total <= room)
        return need(model, self._settings, blocks)

    def take(self, need: Need) -> None:
        self._held.append(need)

    def take_beside(self, need: Need) -> None:
        """What an adapter needs.  Raises NoRoom."""
        if need.total > self.free:
            free = f"{mib(max(self.free, 0))} of {mib(self.limit)} MiB are free"
            raise NoRoom(f"{need.name} needs {mib(need.total)} MiB, and {free}")
        self.take(need)

    def release(self, need: Need) -> None:
        self._held.remove(need)

    def refusal(self, model: Sized, smallest: Need) -> str:
        """Each part, what is free, and what to change."""
        free = f"{mib(max(self.free, 0))} of {mib(self.limit)} MiB are free"
        ways = "; or ".join(self.remedies(model, smallest))
        return f"{model.name} needs {smallest}, and {free}. It would fit with {ways}"

    def remedies(self, model: Sized, smallest: Need) -> list[str]:
        """Changes of which each alone is enough."""
        ways = [f"{name} {value}" for name, value in self._smaller(model)]
        gain = [held for held in self._held if held.total >= smallest.total - self.free]
        if gain:
            ways.append(f"{min(gain, key=lambda held: held.total).name} unloaded")
        ways.append(f"memory_mib {math.ceil((smallest.total - self.free + self.limit) / MIB)}, if there is so much")
        return ways

    def _smaller(self, model: Sized) -> list[tuple[str, object]]:
        """Settings that would make it small enough, and their values."""
        settings, ways = self._settings, list[tuple[str, object]]()
        if model.generates:
            tokens = least(model, settings).cache_tokens
            ranges = {"cache_tokens": (FEWEST, tokens), "step_tokens": (settings.max_running + 1, settings.step_tokens)}
            ranges["max_running"] = (1, settings.max_running)
        else:
            ranges = {"encoder_step_tokens": (1, settings.encoder_step_tokens)}
        for name, (low, high) in ranges.items():
            if low < high and self._fits(model, name, low):
                ways.append((name, highest(low, high, partial(self._fits, model, name))))
        place = placed(settings, model.suited, model.config)
        smaller = "int8" if place.instructions else "bfloat16"
        if place.precision == "float32" and self._fits(model, "precision", smaller):
            ways.append(("precision", smaller))
        return ways

    def _fits(self, model: Sized, setting: str, value: object) -> bool:
        return least(model, self._settings.model_copy(update={setting: value})).total <= self.free


def highest(low: int, high: int, good: Callable[[int], bool]) -> int:
    """The highest number up to `high` that is good, where what is below a good one is good; `low` if none above is."""
    while low < high:
        middle = (low + high + 1) // 2
        if good(middle):
            low = middle
        else:
            high = middle - 1
    return low


def mib(count: int) -> int:
    return math.ceil(count / MIB)
