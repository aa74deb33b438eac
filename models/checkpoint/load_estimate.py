"""How much there is to load of a checkpoint, from its description alone: nothing is read.

Knows no cache and no step.  The one idea: the network is laid out on the meta device anyway, before anything is read,
so its parameters can be counted there; and reading copies only what has to be laid out anew.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..native.packed_network import INT4, INT4_SHIFTED, INT8, INT8_SHIFTED, WEIGHT_BITS
from ..network.heads import LanguageHead
from ..parallel import Cut
from .compressed_tensors import CompressedEntry
from .default_precision import kind_precision
from .description import Description, build_on_meta, match_entries, translate_shape
from .merged_adapter import MergedEntry
from .tensor_files import PIECE_BYTES, TensorEntry
from .tensor_slices import locate_pieces

TOKEN = 300  # bytes that a tokenizer takes for an entry of its vocabulary, merges included
CHARACTER_BYTES = (
    50  # bytes for each character of its tokens, where they are long: most are nodes of the tree for grammars
)
FOUND = {
    "Q4_0": INT4,
    "int4": INT4,
    "Q4_1": INT4_SHIFTED,
    "Q4_K": INT4_SHIFTED,
    "Q5_1": INT8_SHIFTED,
    "Q5_K": INT8_SHIFTED,
}  # by packing, of what is stored so


@dataclass(frozen=True)
class LoadSize:
    """Numbers in a network (tied ones once), in the largest tensor that is laid out anew, in the largest that is read
    as a whole and then cut, and in the largest that is computed as it is read (merged with an adapter, multiplied by
    scales); bytes of the tokenizer.  `head`: numbers in the head, those it shares with the network too.  `tied`: a
    generator whose output matrix is that of its tokens.  `bits`: see models.native.step_memory.
    """

    parameters: int
    head: int
    rearranged: int
    cut: int
    merged: int
    tokenizer: int
    tied: bool
    bits: Mapping[str, float]

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that stay."""
        return self.parameters * dtype.itemsize

    def temporary_bytes(self, dtype: torch.dtype) -> int:
        """Bytes beside them while they are read."""
        return (
            max(self.rearranged, self.cut) * dtype.itemsize + 2 * self.merged * torch.float32.itemsize + 2 * PIECE_BYTES
        )


def estimate_load(what: Description) -> LoadSize:
    """Raises CheckpointError where the files do not hold what the description asks for."""
    network, head = build_on_meta(what)
    entries = match_entries(what, network, head)
    cuts = what.cut_network(network, head)
    numbers = {id(parameter): parameter.numel() for module in (network, head) for parameter in module.parameters()}
    pieces = {name: translate_shape(what, name, each) for name, each in entries.items()}
    return LoadSize(
        parameters=sum(numbers.values()),
        head=sum(parameter.numel() for parameter in head.parameters()),
        rearranged=max((_count_noncontiguous(piece for _, piece in each) for each in pieces.values()), default=0),
        cut=max(
            (prod(each.shape) for name, each in entries.items() if _is_cut_after_read(what, name, each, cuts)),
            default=0,
        ),
        merged=max(map(_merge_size, entries.values()), default=0),
        tokenizer=max(what.tokenizer.vocab_size * TOKEN, what.tokenizer.text_size * CHARACTER_BYTES),
        tied=isinstance(head, LanguageHead) and head.output.weight is network.tokens.weight,
        bits={
            ours: WEIGHT_BITS[format]
            for name, entry in entries.items()
            if (format := _stored_bits(entry)) is not None
            for ours, piece in pieces[name]
            if piece.stride(-1) == 1  # an output's weights side by side, as they were grouped
        },
    )


def _count_noncontiguous(pieces: Iterable[Tensor]) -> int:
    """Numbers that do not lie as they will be used."""
    return sum(piece.numel() for piece in pieces if not piece.is_contiguous())


def _is_cut_after_read(what: Description, name: str, entry: TensorEntry, cuts: Mapping[str, Cut]) -> bool:
    """Whether it is read as a whole, and something of it is cut then."""
    return any(ours in cuts for ours, _ in translate_shape(what, name, entry)) and not locate_pieces(
        what, name, entry, cuts
    )


def _merge_size(entry: TensorEntry) -> int:
    return prod(entry.shape) if isinstance(entry, MergedEntry | CompressedEntry) else 0


def _stored_bits(entry: TensorEntry) -> int | None:
    """The format in which int4 packs matrices that are stored so; None if that depends on their numbers.

    Of Q4_1 it is as good as certain: only blocks that lie 10,000 scales away from zero are not found again.
    """
    if isinstance(entry, MergedEntry) or (
        isinstance(entry, CompressedEntry) and entry.bits == 4 and entry.scales.kind != "F16"
    ):
        return None
    return FOUND.get(entry.kind, INT8 if kind_precision(entry.kind) == "int8" else None)
