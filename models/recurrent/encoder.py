"""The recurrent encoder of source texts."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .recurrent_config import RecurrentConfig
from .sequence_layouts import Packing

CELL_CLASSES: dict[str, type[nn.GRU] | type[nn.LSTM]] = {"gru": nn.GRU, "lstm": nn.LSTM}


class RecurrentEncoder(nn.Module):
    """GRU (Cho et al. 2014, arXiv:1406.1078) or LSTM (Hochreiter and Schmidhuber 1997), in one or both directions
    (Schuster and Paliwal 1997).

    In one direction it may read the source backwards, so that the first tokens are read last (Sutskever et al. 2014,
    arXiv:1409.3215); annotations are in the source's own order in any case.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = CELL_CLASSES[config.cell](
            config.width,
            config.hidden // config.directions,
            config.depth,
            bidirectional=config.bidirectional,
            dropout=config.dropout if config.depth > 1 else 0.0,
        )

    def forward(self, x: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[T, W] rows to [T, H] annotations and the last states [M, depth, directions, N, H / directions]; M is 2 for
        an LSTM."""
        packing = Packing.of(lengths, x.device, backwards=self.config.reversed_source)
        out, last = self.layers(packing.pack(x))
        memory = torch.stack(last if isinstance(last, tuple) else (last,))
        shape = (self.config.state_tensors, self.config.depth, self.config.directions, len(lengths), -1)
        return packing.unpack(out.data), memory.view(shape)
