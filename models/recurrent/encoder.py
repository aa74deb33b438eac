"""What reads a source: a recurrent network over its rows, which says something of each token and remembers all.

Knows nothing of tokens, or of who will look.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .recurrent_config import RecurrentConfig
from .sequence_layouts import Packing

CELL_CLASSES: dict[str, type[nn.GRU] | type[nn.LSTM]] = {"gru": nn.GRU, "lstm": nn.LSTM}


class RecurrentEncoder(nn.Module):
    """GRU (Cho et al. 2014, arXiv:1406.1078) or LSTM (Hochreiter and Schmidhuber 1997), in one direction or in both
    (Schuster and Paliwal 1997).  In one it may read the last token first, so that what a target begins with was read
    just before (Sutskever et al. 2014, arXiv:1409.3215); annotations stand in the source's own order all the same."""

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
        """[T, W] rows to [T, H] annotations, and what was remembered last: [M, depth, directions, N, H / directions],
        where M is 2 of an LSTM."""
        packing = Packing.of(lengths, x.device, backwards=self.config.reversed_source)
        out, last = self.layers(packing.pack(x))
        memory = torch.stack(last if isinstance(last, tuple) else (last,))
        shape = (self.config.state_tensors, self.config.depth, self.config.directions, len(lengths), -1)
        return packing.unpack(out.data), memory.view(shape)
