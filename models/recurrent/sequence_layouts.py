"""The two layouts of sequences that recurrent layers need beside the ragged one: step by step, and as a rectangle.

Torch's recurrent layers read sequences step by step, at each step all sequences that are long enough, the longest first
(its PackedSequence). Ragged rows get this order by one index, without padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Packing:
    """T rows of N sequences step by step: at step i the `sizes[i]` sequences longer than i, the longest first."""

    rows: Tensor  # [T] the ragged row of each packed one
    places: Tensor  # [T] the packed row of each ragged one
    sizes: list[int]
    order: Tensor  # [N] sequences, the longest first
    ranks: Tensor  # [N] where each sequence stands in that order

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, *, backwards: bool = False) -> "Packing":
        """For sequences laid end to end, none of them empty; `backwards` reverses each sequence."""
        length = torch.tensor(lengths)
        starts, order = length.cumsum(0) - length, length.argsort(descending=True, stable=True)
        step = torch.arange(max(lengths))[:, None]  # [L, 1]
        going = step < length[order]  # [L, N]
        row = starts + (length - 1 - step if backwards else step)  # [L, N]
        rows = row[:, order][going]
        found = [tensor.to(device) for tensor in (rows, rows.argsort(), order, order.argsort())]
        return cls(found[0], found[1], going.sum(dim=1).tolist(), found[2], found[3])

    def pack(self, x: Tensor) -> PackedSequence:
        """Ragged [T, W] rows as the input of torch's recurrent layers."""
        rows = cast_for_autocast(x.index_select(0, self.rows))
        return PackedSequence(rows, torch.tensor(self.sizes), self.order, self.ranks)

    def unpack(self, packed: Tensor) -> Tensor:
        """Packed [T, W] rows in ragged order."""
        return packed.index_select(0, self.places)


def pack_step(x: Tensor) -> PackedSequence:
    """[N, W] rows, one step of N sequences."""
    return PackedSequence(cast_for_autocast(x), torch.tensor([len(x)]))


def cast_for_autocast(x: Tensor) -> Tensor:
    """Cast to autocast's type if that is enabled: on a CPU torch casts an LSTM's weights but not its input, and then
    fails."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def padded_rows(lengths: Sequence[int], members: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Ragged rows [M, L] of some of the sequences, padded with the last row of each, and a mask that is False for
    padding."""
    length, at = torch.tensor(lengths), torch.tensor(members)
    starts, length = (length.cumsum(0) - length)[at, None], length[at, None]
    place = torch.arange(int(length.max()))
    return starts + place.minimum(length - 1), place < length
