"""Reads the weights of a network and its head part by part. A caller that packs a network loads one part, packs it and
frees it again, so that never more than the packed weights and one part are in memory.

For the compiled step, matrices of a GGUF file are read as the file's blocks: it packs their codes, and no floats are
made. So each expert is read alone, where a file has those of a layer in one tensor.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import cast

import torch
from torch import Tensor, nn

from ..core.turns import copy_by_parts, iterate_by_parts
from ..native.block_weights import BlockWeights
from ..native.library import BLOCK_KINDS, load_fastest
from ..network.transformer import Transformer
from .description import Description, build_on_meta, match_entries, translate_shape
from .tensor_files import TensorEntry
from .tensor_slices import EntryReader, read_cut_pieces

PIECE_NUMBERS = 1 << 22  # numbers of a matrix that are checked between two reports


def ignore_progress(done: int, total: int) -> None:
    """The default progress callback: does nothing."""


class WeightReader:
    """Builds `network` and `head` of a description on the meta device, where they have no weights, and reads these.

    Building is Python alone, a millisecond for each expert of a mixture, so it is done on a thread that others do not
    wait for; reading may be done on another one. After the shapes are compared with the files, the modules are cut
    to this process's share if the description has cuts. Raises CheckpointError unless the files hold exactly the
    needed tensors.
    """

    def __init__(self, description: Description) -> None:
        network, head = (module.eval() for module in build_on_meta(description))
        self.description, self.network, self.head = description, cast(Transformer, network), head
        self.entries = entries = match_entries(description, self.network, head)
        self.cuts = description.cut_network(self.network, head)
        self._progress: Callable[[int, int], None] = ignore_progress
        self._table = self.network.tokens
        self._owners = parameter_owners(self.network, head)
        self._unread = {place: parameter for parameter, places in self._owners.items() for place in places}
        self._parameters = {f"head.{name}": parameter for name, parameter in head.named_parameters()}
        self._parameters |= dict(self.network.named_parameters())
        self.parameter_count = sum(parameter.numel() for parameter in self._owners)
        self._entries: dict[nn.Parameter, tuple[str, TensorEntry]] = {}
        self._blocks: dict[nn.Parameter, TensorEntry] = {}  # matrices that can be read as blocks, each as an entry
        for name, entry in entries.items():
            whole = torch.empty(entry.shape, device="meta")
            pieces = translate_shape(description, name, entry, whole)
            for ours, _ in pieces:
                if ours in self._parameters:
                    self._entries[self._parameters[ours]] = name, entry
            self._blocks |= self._locate_blocks(entry, whole, pieces)
        self._total, self._done = sum(entry.read_size for entry in entries.values()), 0

    def begin(self, progress: Callable[[int, int], None]) -> None:
        """From now on, call `progress` with the bytes read since then, and with those of all tensors."""
        self._progress, self._done = progress, 0
        progress(0, self._total)

    def load(self, part: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Load those parameters of `part` that have no memory yet, at all places where they are used.

        CheckpointError if a file ends early, cannot be read, or holds infinite numbers or NaN.
        """
        self._load(self._walk(part), dtype, device)

    def _walk(self, part: nn.Module) -> Iterator[nn.Parameter]:
        """The parameters of a part, which has very many if it has all experts of a layer."""
        return iterate_by_parts(part.parameters(), self.yield_turn)

    def yield_turn(self) -> None:
        """Report a part of other work."""
        self._report_bytes(0)

    def _load(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype, device: torch.device) -> None:
        entries = dict(self._entries[parameter] for parameter in parameters if parameter in self._entries)
        for name, entry in sorted(entries.items(), key=lambda item: (str(item[1].file), item[1].start)):
            self._read(name, entry, dtype, device)

    def load_blocks(self, part: nn.Module) -> None:
        """As `load`, in float32; matrices whose blocks the compiled step can pack as they are become BlockWeights."""
        others = list[nn.Parameter]()
        for parameter in list(self._walk(part)):
            if (entry := self._blocks.get(parameter)) is None:
                others.append(parameter)
            else:
                kind = BLOCK_KINDS[entry.kind]
                blocks = entry.read_bytes(self._report_bytes)
                library = load_fastest()
                assert library is not None, "without it nothing is located"
                for some in torch.split(blocks.view(-1), PIECE_NUMBERS // kind.numbers * kind.size):
                    if not library.polyhead_are_finite(kind.code, some.data_ptr(), some.numel() // kind.size):
                        entry.raise_nonfinite()
                    self.yield_turn()
                self._register(parameter, BlockWeights(blocks, entry.kind))
        self._load(others, torch.float32, torch.device("cpu"))

    def unload(self, part: nn.Module) -> None:
        """Free the weights of `part`, at all places where they are used, so that they can be loaded again."""
        for owner in iterate_by_parts(part.modules(), self.yield_turn):
            for leaf, _ in list(owner.named_parameters(recurse=False)):
                unread = self._unread[owner, leaf]
                self._register(unread, unread)

    def _locate_blocks(
        self, entry: TensorEntry, whole: Tensor, pieces: Sequence[tuple[str, Tensor]]
    ) -> dict[nn.Parameter, TensorEntry]:
        """The matrices that `whole`, a tensor of a file without memory, becomes: each with its rows in the file. Empty
        unless the library decodes its blocks and all its pieces are matrices of whole rows, in their order: rows that
        are reordered are no view of the file's tensor."""
        columns = entry.shape[-1] if entry.shape else 0
        if (
            not columns
            or type(entry) is not TensorEntry
            or entry.kind not in BLOCK_KINDS
            or self.cuts
            or load_fastest() is None
        ):
            return {}
        found: dict[nn.Parameter, TensorEntry] = {}
        for ours, piece in pieces:
            if ours not in self._parameters or piece.dim() != 2 or piece.size(1) != columns or not piece.numel():
                return {}
            if piece.untyped_storage() is not whole.untyped_storage() or piece.stride() != (columns, 1):
                return {}
            parameter = self._parameters[ours]
            is_matrix = [isinstance(each, nn.Linear) or each is self._table for each, _ in self._owners[parameter]]
            if not all(is_matrix) or piece.storage_offset() % columns:
                return {}
            row_bytes = entry.size // prod(entry.shape[:-1])
            start = entry.start + int(piece.storage_offset()) // columns * row_bytes
            found[parameter] = replace(entry, shape=tuple(piece.shape), start=start)
        return found

    def _report_bytes(self, size: int) -> None:
        self._done += size
        self._progress(self._done, self._total)

    def _register(self, parameter: nn.Parameter, loaded: nn.Parameter) -> None:
        """Put `loaded` in the place of a parameter without memory, at all places where it is used."""
        for owner, leaf in self._owners[parameter]:
            owner.register_parameter(leaf, loaded)

    def _copy_contiguous(self, piece: Tensor) -> Tensor:
        """The tensor as it is, or, if its numbers are in another order, a copy that is made and reported in parts."""
        if piece.is_contiguous():
            return piece
        out = torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)
        return copy_by_parts(piece, out, self.yield_turn)

    def _read(self, name: str, entry: TensorEntry, dtype: torch.dtype, device: torch.device) -> None:
        before, read = self._done, EntryReader(dtype, device, self._report_bytes)
        for ours, piece in read_cut_pieces(self.description, name, entry, self.cuts, read):
            if ours in self._parameters:
                self._register(self._parameters[ours], nn.Parameter(self._copy_contiguous(piece)))
        self._done = before + entry.read_size


def parameter_owners(network: Transformer, head: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The modules and names of each parameter: a tied one has several."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in (*network.modules(), *head.modules()):
        for leaf, parameter in owner.named_parameters(recurse=False):
            found.setdefault(parameter, []).append((owner, leaf))
    return found
