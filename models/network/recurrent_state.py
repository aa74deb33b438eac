"""States of recurrent layers: a pool of slots, each with the whole state of one sequence after some token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import zero_pages
from .model_config import ModelConfig


def state_bytes(config: ModelConfig) -> int:
    """Bytes of a slot: float32 numbers of all recurrent layers."""
    recurrent = config.recurrent
    if recurrent is None:
        return 0
    numbers = sum(recurrent.state_numbers(config.mixer(layer), config.width) for layer in config.recurrent_layers)
    return numbers * torch.float32.itemsize


class RecurrentState:
    """Storage for `count` states in float32, with up to two tensors for each recurrent layer.

    Rows are the last inputs of a layer's convolution, matrices the state of each head. A slot that is read is never
    written in the same step, so nothing is copied between slots. A slot is written as a whole before it is read.
    """

    def __init__(self, config: ModelConfig, count: int, like: Tensor) -> None:
        """The tensors are on the device of `like`."""
        assert config.recurrent is not None
        recurrent, like = config.recurrent, like.new_empty(0, dtype=torch.float32)
        self.count = count
        self.rows: dict[int, Tensor] = {}  # by layer: [count, C, K - 1]
        self.matrices: dict[int, Tensor] = {}  # by layer: [count, H, P, N]
        for layer in config.recurrent_layers:
            channels = recurrent.convolved(config.mixer(layer), config.width)
            self.rows[layer] = zero_pages((count, channels, recurrent.kernel - 1), like)
            if config.mixer(layer) != "convolution":
                shape = (count, recurrent.heads, recurrent.head_width, recurrent.key_width)
                self.matrices[layer] = zero_pages(shape, like)

    def are_finite(self, slots: Tensor) -> Tensor:
        """[N] whether the states in `slots` are finite. Only the last recurrent layer is checked: NaN in an earlier
        layer reaches it."""
        last = max(self.rows)
        sums = self.rows[last][slots].flatten(1).sum(dim=1)
        if last in self.matrices:
            sums = sums + self.matrices[last][slots].flatten(1).sum(dim=1)
        return sums.isfinite()


@dataclass(frozen=True)
class StateView:
    """The states of one step: which slots each of N sequences reads and writes.

    `reads` is -1 for a sequence without earlier tokens. After `border_rows` rows (0: never) the state of a sequence is
    also written to the slot in `borders`.
    """

    state: RecurrentState
    reads: Tensor  # [N]
    writes: Tensor  # [N]
    border_rows: Sequence[int]  # [N]
    borders: Sequence[int]  # [N]

    def read(self, storage: Tensor) -> Tensor:
        """[N, ...] the states of the sequences in one of the pool's tensors, zeros for those without earlier tokens."""
        fresh = (self.reads < 0).view(-1, *[1] * (storage.dim() - 1))
        return storage.index_select(0, self.reads.clamp(min=0)).masked_fill_(fresh, 0.0)

    def write(self, storage: Tensor, states: Tensor) -> None:
        """Store [N, ...] states after the last rows."""
        storage.index_copy_(0, self.writes, states)
