"""Reads the weights of a network and its head part by part. A caller that packs a network loads one part, packs it and
frees it again, so that never more than the packed weights and one part are in memory."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..network.transformer import Transformer
from .description import Description, match_entries, translate_shape
from .tensor_files import TensorEntry
from .tensor_slices import read_cut_pieces


class WeightReader:
    """Reads the weights of `network` and `head`, both on the meta device. `progress` is called with the bytes read so
    far and in all.

    After the shapes are compared with the files, the modules are cut to this process's share if the description
    has cuts. Raises CheckpointError unless the files hold exactly the needed tensors.
    """

    def __init__(
        self, description: Description, network: Transformer, head: nn.Module, progress: Callable[[int, int], None]
    ) -> None:
        self._description, self._progress = description, progress
        entries = match_entries(description, network, head)
        self._cuts = description.cut_network(network, head)
        self._owners = parameter_owners(network, head)
        self._parameters = {f"head.{name}": parameter for name, parameter in head.named_parameters()}
        self._parameters |= dict(network.named_parameters())
        self._entries: dict[nn.Parameter, tuple[str, TensorEntry]] = {}
        for name, entry in entries.items():
            for ours, _ in translate_shape(description, name, entry):
                if ours in self._parameters:
                    self._entries[self._parameters[ours]] = name, entry
        self._total, self._done = sum(entry.read_size for entry in entries.values()), 0
        progress(0, self._total)

    def load(self, part: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Load those parameters of `part` that have no memory yet, at all places where they are used.

        CheckpointError if a file ends early, cannot be read, or holds infinite numbers or NaN.
        """
        entries = dict(self._entries[parameter] for parameter in part.parameters() if parameter in self._entries)
        for name, entry in sorted(entries.items(), key=lambda item: (str(item[1].file), item[1].start)):
            self._read(name, entry, dtype, device)

    def _read(self, name: str, entry: TensorEntry, dtype: torch.dtype, device: torch.device) -> None:
        before = self._done

        def report_bytes(size: int) -> None:
            self._done += size
            self._progress(self._done, self._total)

        def read(some: TensorEntry) -> Tensor:
            return some.read(dtype, device, report_bytes)

        for ours, piece in read_cut_pieces(self._description, name, entry, self._cuts, read):
            if ours in self._parameters:
                parameter = nn.Parameter(piece.contiguous())
                for owner, leaf in self._owners[self._parameters[ours]]:
                    owner.register_parameter(leaf, parameter)
        self._done = before + entry.read_size


def parameter_owners(network: Transformer, head: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The modules and names of each parameter: a tied one has several."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in (*network.modules(), *head.modules()):
        for leaf, parameter in owner.named_parameters(recurse=False):
            found.setdefault(parameter, []).append((owner, leaf))
    return found
