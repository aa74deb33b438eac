"""Estimates what loading a checkpoint takes, from its description alone. The parameters are counted on the meta device;
no tensor is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..explain.cost_estimate import HeadSize, measure_head
from ..native.packed_network import INT4, INT4_SHIFTED, INT8, INT8_SHIFTED, WEIGHT_BITS
from ..network.heads import LanguageHead
from ..parallel import Cut
from .default_precision import kind_precision
from .description import Description, NamedPieces, translate_shape
from .merged_adapter import MergedEntry
from .quantized.quantized_entry import QuantizedEntry
from .tensor_files import PIECE_BYTES, TensorEntry
from .tensor_slices import locate_pieces
from .weight_reader import WeightReader

STORED_BITS = {
    **dict.fromkeys(("Q4_0", "Q1_0", "TQ1_0", "TQ2_0", "int4"), INT4),
    "int4 with zero points": INT4_SHIFTED,
    "Q4_1": INT4_SHIFTED,
    "Q4_K": INT4_SHIFTED,
    "Q5_1": INT8_SHIFTED,
    "Q5_K": INT8_SHIFTED,
}  # the packed format of each stored format


@dataclass(frozen=True)
class LoadSize:
    """Counts of numbers: in the network (tied ones once), in the largest tensor that is copied to another layout, in
    the largest that is read whole and then cut. `computed`: the most float32 numbers beside the network while
    one tensor is computed (merged with an adapter, or multiplied by scales). `tokenizer` is in bytes, and so is
    `buffers`: what the description has read already, and the network keeps.

    `head`: numbers in the head, those shared with the network included. `explained_head`: its size where explanations
    compute all of it. `tied`: a generator whose output matrix is the token embedding. `bits`: see
    models.native.step_memory.
    """

    parameters: int
    head: int
    rearranged: int
    cut: int
    computed: int
    tokenizer: int
    buffers: int
    tied: bool
    bits: Mapping[str, float]
    explained_head: HeadSize

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights in memory, and of the network's buffers."""
        return self.parameters * dtype.itemsize + self.buffers

    def temporary_bytes(self, dtype: torch.dtype) -> int:
        """Bytes needed in addition while the weights are read."""
        return (
            max(self.rearranged, self.cut) * dtype.itemsize + self.computed * torch.float32.itemsize + 2 * PIECE_BYTES
        )


def estimate_load(description: Description) -> LoadSize:
    """The sizes of a described checkpoint. Raises CheckpointError if the files do not hold the described tensors."""
    return estimate_reading(WeightReader(description))


def estimate_reading(weights: WeightReader) -> LoadSize:
    """As `estimate_load`, for weights that nothing was read of yet."""
    description, network, head = weights.description, weights.network, weights.head
    tokenizer = description.tokenizer
    entries, cuts = weights.entries, weights.cuts
    stored = {name: torch.empty(entry.shape, device="meta") for name, entry in entries.items()}
    pieces = {name: translate_shape(description, name, each, stored[name]) for name, each in entries.items()}
    return LoadSize(
        parameters=weights.parameter_count,
        head=sum(parameter.numel() for parameter in head.parameters()),
        rearranged=max((_count_copied(stored[name], each) for name, each in pieces.items()), default=0),
        cut=max(
            (prod(each.shape) for name, each in entries.items() if _is_cut_after_read(description, name, each, cuts)),
            default=0,
        ),
        computed=max(map(_count_computed, entries.values()), default=0),
        tokenizer=tokenizer.memory_bytes + (tokenizer.spelled_bytes if isinstance(head, LanguageHead) else 0),
        buffers=sum(each.nbytes for each in network.buffers() if not each.is_meta),
        explained_head=measure_head(head),
        tied=isinstance(head, LanguageHead) and head.output.weight is network.tokens.weight,
        bits={
            ours: WEIGHT_BITS[format]
            for name, entry in entries.items()
            if (format := _stored_bits(entry)) is not None
            for ours, piece in pieces[name]
            if piece.stride(-1) == 1  # an output's weights are contiguous, as they were grouped
        },
    )


def _count_copied(whole: Tensor, pieces: NamedPieces) -> int:
    """Count of the numbers of a tensor that are copied: reordered, or not in the layout in which they are used."""
    storage = whole.untyped_storage()
    copied = [each for _, each in pieces if not each.is_contiguous() or each.untyped_storage() is not storage]
    return sum(map(Tensor.numel, copied))


def _is_cut_after_read(description: Description, name: str, entry: TensorEntry, cuts: Mapping[str, Cut]) -> bool:
    """Whether the tensor is read whole and cut afterwards."""
    is_cut = bool(cuts) and any(ours in cuts for ours, _ in translate_shape(description, name, entry))
    return is_cut and not locate_pieces(description, name, entry, cuts)


def _count_computed(entry: TensorEntry) -> int:
    """Count of float32 numbers that exist while the tensor is computed: of a merged one itself, a second copy, and A
    and B of the adapter; of a quantised one a slice and its scales."""
    if isinstance(entry, MergedEntry):
        return 2 * prod(entry.shape) + sum(prod(side.shape) for side in entry.pair) + _count_computed(entry.base)
    return entry.work_numbers if isinstance(entry, QuantizedEntry) else 0


def _stored_bits(entry: TensorEntry) -> int | None:
    """The bits of a weight when int4 packs matrices of this format; None if that depends on the numbers.

    For Q4_1 it is nearly certain: only blocks that lie 10,000 scales away from zero are not recognised.
    """
    if isinstance(entry, MergedEntry) or (
        isinstance(entry, QuantizedEntry)
        and kind_precision(entry.kind) == "int4"
        and entry.parts["scales"].kind != "F16"
    ):
        return None
    return STORED_BITS.get(entry.kind, INT8 if kind_precision(entry.kind) == "int8" else None)
