"""Dropout (Srivastava et al. 2014), added to a network as forward hooks.  Neither the network nor its file changes."""

from collections.abc import Iterable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

DropoutRate = Annotated[float, Field(ge=0, lt=1)]  # the share of zeros
DROPOUT_PARTS = ("attention.output", "cross.output", "mlp.down", "embedding_norm")


def add_dropout(network: nn.Module, share: float, parts: Iterable[str] = DROPOUT_PARTS) -> None:
    """Add dropout to the output of every module whose name ends with one of `parts`, in training mode."""

    def drop_output(part: nn.Module, _: object, out: Tensor) -> Tensor:
        return apply_dropout(out, share) if part.training else out

    for name, module in network.named_modules():
        if share and any(f".{name}".endswith(f".{part}") for part in parts):
            module.register_forward_hook(drop_output)


def apply_dropout(x: Tensor, share: float) -> Tensor:
    """Set a `share` of values to zero, and scale the others.

    A CPU draws one random number at a time.  Here one draw of 64 bits is used for four values: 16 bits give the share
    to 1 in 65,536.
    """
    if x.device.type != "cpu":
        return F.dropout(x, share)
    random_bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    mask = random_bits.view(torch.int16)[: x.numel()].view(x.shape) >= round(share * 2**16) - 2**15
    return x * (mask.to(x.dtype) / (1 - share))
