"""Embeddings of tokens without layers above them: the states of static embeddings (model2vec; Arora et al. 2017)."""

import torch
from torch import Tensor, nn

from .model_config import ModelConfig
from .ragged import RaggedBatch
from .work_pieces import Pieces


class StaticNetwork(nn.Module):
    """Token ids to the rows of one matrix, whatever is beside them. `forward(batch)`: T packed rows to [T, W], or to
    the output rows [M, W].

    `mapping` [V] has the row of each token if tokens share rows, of which there are `rows`; with `weighted` each token
    has a weight. `blocks` is empty: there are no layers.
    """

    def __init__(self, config: ModelConfig, rows: int, mapping: Tensor | None, *, weighted: bool) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(rows, config.width)
        self.weights = nn.Parameter(torch.empty(config.vocab_size)) if weighted else None
        self.register_buffer("mapping", mapping, persistent=False)
        self.blocks = nn.ModuleList()

    def forward(self, batch: RaggedBatch) -> Tensor:
        ids = batch.tokens if batch.output_rows is None else batch.tokens[batch.output_rows]
        mapping = self.get_buffer("mapping") if self.mapping is not None else None
        states: Tensor = self.tokens(ids if mapping is None else mapping[ids])
        return states if self.weights is None else states * self.weights[ids][:, None]

    def forward_in_pieces(self, batch: RaggedBatch) -> Pieces[Tensor]:
        """As `forward`, in one piece."""
        yield from ()
        return self(batch)  # type: ignore[no-any-return]
