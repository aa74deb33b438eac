"""Loads a LoRA adapter, a PEFT folder or a GGUF file, as low-rank matrices and a head for a base model that is already
served, without merging it.

The adapter is described as if it were merged, from its own small files and the base's description. So it is refused for
the same reasons as a merged one, and only its own numbers are read: those of one matrix of the base after the other, as
an executor asks for them.
"""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import nn

from ..core.errors import UnsupportedError
from ..core.turns import PART_NUMBERS, rows_of_part
from ..native.packed_lora import LowRankSize, packed_bytes, packed_products
from ..network.lora import Lora, LowRank, adaptable_shapes
from . import folder
from . import merged_adapter as adapter
from .description import Description, build_on_meta, match_entries, translate_shape
from .gguf_adapter import apply_gguf_adapter, read_gguf_adapter
from .merged_adapter import MergedEntry
from .row_orders import translate_by_parts
from .tensor_files import PIECE_BYTES, TensorEntry, ignore_bytes
from .tensor_slices import EntryReader
from .unread_formats import check_file

MAX_RANK = 256  # of one matrix; larger ones are not low-rank
FLOAT_BYTES = 4
PART_BYTES = 12  # for each number of a part that is packed: itself and its place
MERGE_HINT = "load it merged (BASE+ADAPTER, or merge: true)"


@dataclass(frozen=True)
class LoraPlan:
    """An adapter that is described but not read.

    `description` is of the merged checkpoint. `updates` are the entries of the low-rank updates, `head_entries` those
    of the head, by their names in the files; `shared_names` are those of the head that the base has too. `head` has no
    numbers yet; it is None if the base's head is used.
    """

    description: Description
    updates: Mapping[str, MergedEntry]
    head_entries: Mapping[str, TensorEntry]
    shared_names: AbstractSet[str]
    head: nn.Module | None

    @property
    def parameter_counts(self) -> tuple[int, int]:
        """Count of numbers in the low-rank matrices, and of those that only this head has."""
        low = sum(prod(side.shape) for update in self.updates.values() for side in update.pair)
        return low, sum(prod(entry.shape) for name, entry in self.head_entries.items() if name not in self.shared_names)

    @cached_property
    def products(self) -> dict[str, str]:
        """The linear layers that it updates, each with the update that has its matrices."""
        return {
            ours.removesuffix(".weight"): name
            for name, entry in self.updates.items()
            for ours, _ in translate_shape(self.description, name, entry)
        }

    @property
    def packed_bytes(self) -> int:
        """Bytes of the low-rank matrices as the compiled step has them."""
        sizes = {
            product: LowRankSize(self.updates[name].pair[0].shape[0], name) for product, name in self.products.items()
        }
        return packed_bytes(self.description.config, sizes)

    def loading_bytes(self, packed: bool) -> int:
        """Bytes beside the attached matrices while these are read. `packed`: the compiled step packs those of several
        linear layers together, which are all in memory then; else there are those of one."""
        if not self.updates:
            return 0
        products, config = self.products, self.description.config
        together = [names for *_, names in packed_products(config)] if packed else [[name] for name in products]
        numbers = {name: sum(prod(side.shape) for side in update.pair) for name, update in self.updates.items()}
        read = max(
            sum(numbers[name] for name in {products[each] for each in some if each in products}) for some in together
        )
        reordered = max(prod(update.pair[1].shape) for update in self.updates.values())  # a B is copied then
        largest = max(prod(side.shape) for update in self.updates.values() for side in update.pair)
        pieces = 2 * min(PIECE_BYTES, largest * FLOAT_BYTES) + min(PART_NUMBERS, largest) * PART_BYTES
        return (read + reordered) * FLOAT_BYTES + pieces


class AdapterWeights(Mapping[str, LowRank]):
    """The low-rank matrices of an adapter in float32, by the name of the product that they update. They are read when
    they are asked for; those that were asked for last are kept.

    CheckpointError if a file cannot be read, or holds infinite numbers or NaN.
    """

    def __init__(self, plan: LoraPlan, report_bytes: Callable[[int], None]) -> None:
        self._plan, self._products = plan, plan.products
        self._read = EntryReader(torch.float32, torch.device("cpu"), report_bytes)
        self._name, self._pieces = "", dict[str, LowRank]()

    def __getitem__(self, product: str) -> LowRank:
        if self._name != (name := self._products[product]):
            self._name, self._pieces = "", {}  # freed first
            self._pieces = self._read_update(name)
            self._name = name
        return self._pieces[product]

    def __iter__(self) -> Iterator[str]:
        return iter(self._products)

    def __len__(self) -> int:
        return len(self._products)

    def _read_update(self, name: str) -> dict[str, LowRank]:
        """One A, and B for each of the products that the files have as one matrix."""
        update = self._plan.updates[name]
        a, b = map(self._read, update.pair)
        for some in torch.split(b, rows_of_part(b)):
            some *= update.scale
            self._read.yield_turn()
        b = b.t() if update.transposed else b
        pieces = translate_by_parts(self._plan.description, name, b, self._read.yield_turn)
        return {ours.removesuffix(".weight"): LowRank(a, piece) for ours, piece in pieces}


class BaseModel:
    """A served base model, as its adapters need it: its description, and the head parameters that adapters share."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self._shared: WeakValueDictionary[str, nn.Parameter] = WeakValueDictionary()

    def plan_adapter(self, source: Path) -> LoraPlan:
        """Describe an adapter. Raises what loading it merged would raise, and UnsupportedError if it can only be
        merged."""
        merged = self._describe_merged(source)
        base_entries = self.description.entries
        check_same_task(source, self.description, merged)
        network, head = build_on_meta(merged)
        entries = match_entries(merged, network, head)
        changed = {name: entry for name, entry in merged.entries.items() if base_entries.get(name) is not entry}
        check_targets(merged, changed)
        own = {name: entry for name, entry in entries.items() if belongs_to_head(merged, name, entry)}
        updates = {
            name: entry
            for name, entry in changed.items()
            if isinstance(entry, MergedEntry) and name in entries.keys() - own.keys()
        }
        same = has_same_head(self.description, merged)
        if merged.head.task == "generate" or (same and not own.keys() & changed.keys()):
            return LoraPlan(merged, updates, {}, frozenset(), None)
        if {*head.parameters()} & {*network.parameters()}:
            message = f"it changes a head that is tied to the token embeddings, which needs a merge: {MERGE_HINT}"
            raise UnsupportedError(message, file=str(source))
        return LoraPlan(merged, updates, own, own.keys() - changed.keys(), head)

    def _describe_merged(self, source: Path) -> Description:
        """The base with the adapter merged into it. UnsupportedError for a source that is no adapter of this base."""
        if not source.is_dir():
            check_file(source)
            return apply_gguf_adapter(read_gguf_adapter(source), self.description)
        if self.description.parts is None:
            message = "an adapter folder needs a base in a safetensors folder; serve the one this file was made from"
            raise UnsupportedError(message, file=self.description.file)
        parts = adapter.apply_adapter(adapter.read_adapter(source), self.description.parts)
        return folder.describe_changed(parts, self.description)

    def load_adapter(
        self,
        plan: LoraPlan,
        dtype: torch.dtype,
        device: torch.device,
        report_bytes: Callable[[int], None] = ignore_bytes,
    ) -> tuple[Lora, nn.Module | None]:
        """The low-rank matrices, which are read when they are asked for, and the head as `dtype` on `device`.
        CheckpointError if a file cannot be read. `report_bytes`: see TensorEntry.read."""
        if plan.head is not None:
            self._load_head(plan, plan.head, EntryReader(dtype, device, report_bytes))
        return AdapterWeights(plan, report_bytes), plan.head

    def _load_head(self, plan: LoraPlan, head: nn.Module, read: EntryReader) -> None:
        """Load the head's parameters. Those from the base's files exist once for all heads that use them."""
        for name, entry in plan.head_entries.items():
            places = [piece.removeprefix("head.") for piece, _ in translate_shape(plan.description, name, entry)]
            common = name in plan.shared_names
            known = [self._shared.get(f"{read.dtype} {name} {place}") for place in places] if common else []
            if not known or None in known:
                pieces = translate_by_parts(plan.description, name, read(entry), read.yield_turn)
                known = [nn.Parameter(piece) for _, piece in pieces]
            for place, parameter in zip(places, known, strict=True):
                owner, _, leaf = place.rpartition(".")
                head.get_submodule(owner).register_parameter(leaf, parameter)
                if common and parameter is not None:
                    self._shared[f"{read.dtype} {name} {place}"] = parameter


def has_same_head(base: Description, merged: Description) -> bool:
    """Whether the heads have the same task, labels and settings; their numbers may differ."""
    if base.parts is None or merged.parts is None:
        return True  # an adapter in a GGUF file changes numbers alone
    return merged.parts.spec is base.parts.spec and merged.parts.config == base.parts.config


def belongs_to_head(merged: Description, name: str, entry: TensorEntry) -> bool:
    return any(piece.startswith("head.") for piece, _ in translate_shape(merged, name, entry))


def check_same_task(source: Path, base: Description, merged: Description) -> None:
    """UnsupportedError if base and adapter differ in kind: a generator computes logits, an encoder states, and no step
    does both."""
    if base.config.position == "distance":
        message = f"its base computes distance scores with matrices that adapters change: {MERGE_HINT}"
        raise UnsupportedError(message, file=str(source))
    if merged.parts is not None and merged.parts.spec.global_tokens != base.config.global_tokens:
        message = f"its head reads attention with other global tokens than its base computes: {MERGE_HINT}"
        raise UnsupportedError(message, file=str(source))
    if (base.head.task == "generate") != (merged.head.task == "generate"):
        message = f"its task is {merged.head.task}, and that of its base is {base.head.task}: {MERGE_HINT}"
        raise UnsupportedError(message, file=str(source))


def check_targets(merged: Description, changed: Mapping[str, TensorEntry]) -> None:
    """UnsupportedError for a change of a tensor that adapters of one base cannot have for themselves."""
    known = adaptable_shapes(merged.config)
    for name, entry in changed.items():
        side = entry.pair[0] if isinstance(entry, MergedEntry) else entry
        for ours, _ in translate_shape(merged, name, entry):
            if ours.startswith("head.") and merged.head.task != "generate":
                continue
            if not isinstance(entry, MergedEntry) or ours.removesuffix(".weight") not in known:
                message = f"it changes {ours}, which all adapters of a base share: {MERGE_HINT}"
                raise UnsupportedError(message, file=str(side.file), tensor=side.name)
            if side.shape[0] > MAX_RANK:
                message = f"its rank is {side.shape[0]}, and at most {MAX_RANK} is served unmerged: {MERGE_HINT}"
                raise UnsupportedError(message, file=str(side.file), tensor=side.name)
