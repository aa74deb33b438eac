"""What is done to logits before a token is drawn.  A first version: masks alone."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.request import Generate, Sampling


class Shape:
    def __init__(self, request: Generate) -> None:
        self.request = request

    def push(self, token: int) -> None:
        pass


Row = tuple[Shape | None, tuple[int, ...]]


def shaped(sampling: Sampling) -> bool:
    return False


def shape(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    return logits


def restrict(logits: Tensor, rows: Sequence[int], words: NDArray[np.int32]) -> Tensor:
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : logits.size(1)]
    out = logits.clone()
    out[list(rows)] = out[list(rows)].masked_fill(torch.from_numpy(bits == 0).to(logits.device), float("-inf"))
    return out
