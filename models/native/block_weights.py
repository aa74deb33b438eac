"""Weights of a layer as blocks of a GGUF file: the compiled step packs them without making floats of them first."""

import torch
from torch import Tensor, nn

from .library import BLOCK_KINDS


class BlockWeights(nn.Parameter):
    """A matrix [N, K] as the blocks of its rows: uint8 [N, bytes]. `kind` names their format, one of BLOCK_KINDS."""

    kind: str

    def __new__(cls, blocks: Tensor, kind: str) -> "BlockWeights":
        assert blocks.dtype == torch.uint8, "bytes"
        assert blocks.dim() == 2, "rows"
        assert blocks.is_contiguous(), "rows side by side"
        assert blocks.size(1) % BLOCK_KINDS[kind].size == 0, "whole blocks"
        made: BlockWeights = torch.Tensor._make_subclass(cls, blocks, False)
        made.kind = kind
        return made

    @property
    def inputs(self) -> int:
        """K."""
        kind = BLOCK_KINDS[self.kind]
        return self.size(1) // kind.size * kind.numbers
