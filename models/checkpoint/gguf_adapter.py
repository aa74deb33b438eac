"""LoRA adapters in GGUF files, as llama.cpp's converter writes them from a PEFT folder (convert_lora_to_gguf.py).

An adapter names tensors of a GGUF file. It updates a GGUF file of the same model, or the safetensors folder that the
file was made from; there it finds its tensors by our names, and rows of B that the converter reordered are put back in
order.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..architectures.gguf_architectures import GGUF_ARCHITECTURES, rename_tensor
from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..network.model_config import ModelConfig
from .description import Description, translate_shape
from .folder import describe_changed
from .gguf_header import read_header
from .merged_adapter import MAX_ALPHA, MergedEntry, add_once, build_merged_entry, order_pair
from .tensor_files import TensorEntry, ignore_bytes

LOW_RANK = re.compile(r"(?P<tensor>.+)\.lora_(?P<side>[ab])")
ALPHA, INVOCATION = "adapter.lora.alpha", "adapter.alora.invocation_tokens"
EMBEDDING = "token_embd.weight"
MERGE_HINT = "merge it into its base with peft"


@dataclass(frozen=True)
class GgufAdapter:
    """An adapter's header: `alpha` over the rank is the scale of an update, 0 stands for a scale of 1. `pairs` are A
    and B by the tensor of a GGUF file that they update."""

    path: Path
    architecture: str
    alpha: float
    pairs: Mapping[str, tuple[TensorEntry, TensorEntry]]

    def scale(self, rank: int) -> float:
        return self.alpha / rank if self.alpha else 1.0


@dataclass(frozen=True)
class RestoredRows(TensorEntry):
    """A tensor whose rows are put into the order of the base's rows when it is read. All its other fields are those of
    `stored`."""

    stored: TensorEntry
    restore: Callable[[Tensor], Tensor]

    def read(
        self, dtype: torch.dtype, device: torch.device, report_bytes: Callable[[int], None] = ignore_bytes
    ) -> Tensor:
        return self.restore(self.stored.read(dtype, device, report_bytes))


def read_gguf_adapter(path: Path) -> GgufAdapter:
    """The adapter in a GGUF file. CheckpointError names the field or tensor that is wrong."""
    metadata, entries = read_header(path)
    check_kind(path, metadata)
    alpha = metadata.get(ALPHA, 0.0)
    if type(alpha) not in (int, float) or not abs(alpha) < MAX_ALPHA:
        raise CheckpointError(f"{ALPHA} is {show_value(alpha)}, which should be a number", file=str(path))
    sides: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        found = LOW_RANK.fullmatch(name)
        if not found or found["tensor"] == EMBEDDING:
            message = f"only pairs .lora_a and .lora_b of linear layers are used; {MERGE_HINT}"
            raise UnsupportedError(message, file=str(path), tensor=name)
        add_once(sides.setdefault(found["tensor"], {}), found["side"].upper(), entry)
    pairs = {tensor: order_pair(both) for tensor, both in sides.items()}
    return GgufAdapter(path, metadata["general.architecture"], float(alpha), pairs)


def check_kind(path: Path, metadata: Mapping[str, Any]) -> None:
    """UnsupportedError unless the file is a plain LoRA adapter of a known architecture."""
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if metadata.get(key) != expected:
            message = f"{key} is {show_value(metadata.get(key))}; a LoRA adapter has '{expected}'"
            raise UnsupportedError(message, file=str(path))
    if metadata.get(INVOCATION):
        message = f"{INVOCATION} starts the adapter in the middle of a text, which is not known here"
        raise UnsupportedError(message, file=str(path))
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        message = f"general.architecture {show_value(name)} is not known; known are {known}"
        raise UnsupportedError(message, file=str(path))


def apply_gguf_adapter(adapter: GgufAdapter, base: Description) -> Description:
    """The base with the adapter's updates. CheckpointError if the adapter is of another model."""
    family = GGUF_ARCHITECTURES[adapter.architecture].family
    if family != base.family:
        message = f"it is an adapter of the {family} family, and its base, {base.file}, is of {base.family}"
        raise CheckpointError(message, file=str(adapter.path))
    if base.parts is None:
        return replace(base, entries=update_entries(adapter, base, {name: name for name in base.entries}))
    places = locate_tensors(adapter, base)
    entries = update_entries(adapter, base, places)
    return describe_changed(replace(base.parts, entries=entries), base)


def update_entries(adapter: GgufAdapter, base: Description, places: Mapping[str, str]) -> dict[str, TensorEntry]:
    """The base's entries with the updates. `places`: the base's name of a tensor of a GGUF file."""
    entries = dict(base.entries)
    for tensor, (a, b) in adapter.pairs.items():
        if tensor not in places:
            message = f"the base, {base.file}, has no tensor that is {show_value(tensor)} of a GGUF file; {MERGE_HINT}"
            raise CheckpointError(message, file=str(adapter.path), tensor=a.name)
        place = places[tensor]
        if isinstance(entries[place], MergedEntry):
            message = "the base has an adapter in this tensor already; name one adapter"
            raise UnsupportedError(message, file=str(adapter.path), tensor=a.name)
        if base.parts is None:
            entries[place] = build_merged_entry(entries[place], (a, b), adapter.scale(a.shape[0]), transposed=False)
        else:
            pair = a, restore_rows(adapter, base.config, tensor, b)
            turned = is_transposed(base, place)
            entries[place] = build_merged_entry(entries[place], pair, adapter.scale(a.shape[0]), transposed=turned)
    return entries


def locate_tensors(adapter: GgufAdapter, base: Description) -> dict[str, str]:
    """The base's names of the tensors that an adapter updates: those which become the same tensors under our names."""
    ours = {
        frozenset(piece for piece, _ in translate_shape(base, name, entry)): name
        for name, entry in base.entries.items()
    }
    dialect, found = GGUF_ARCHITECTURES[adapter.architecture], {}
    for tensor, (_, b) in adapter.pairs.items():
        try:
            pieces = rename_tensor(dialect, base.config, tensor, torch.empty(b.shape, device="meta"))
        except (RuntimeError, ValueError, IndexError) as error:  # rows that cannot be divided among heads
            reason = str(error).splitlines()[0]
            message = f"its shape {list(b.shape)} is not that of such a tensor ({reason})"
            raise CheckpointError(message, file=str(adapter.path), tensor=b.name) from None
        if (name := ours.get(frozenset(piece for piece, _ in pieces))) and pieces:
            found[tensor] = name
    return found


def restore_rows(adapter: GgufAdapter, config: ModelConfig, tensor: str, b: TensorEntry) -> TensorEntry:
    """B with its rows in the order of the base's."""
    dialect = GGUF_ARCHITECTURES[adapter.architecture]

    def restore(stored: Tensor) -> Tensor:
        return torch.cat([piece for _, piece in rename_tensor(dialect, config, tensor, stored)])

    return RestoredRows(b.source, b.name, b.kind, b.shape, b.start, b.encoding, b, restore)


def is_transposed(base: Description, name: str) -> bool:
    """Whether the base stores the matrix as [in, out]."""
    entry = base.entries[name]
    [(_, piece), *_] = translate_shape(base, name, entry)
    return piece.dim() == 2 and piece.stride() == (1, entry.shape[-1]) and piece.stride(1) != 1
