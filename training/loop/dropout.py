"""Dropout (Srivastava et al. 2014), put behind a network's parts from outside.

It doesn't know what they compute.  The one idea: it is a hook, so neither the network nor its file knows of it.
"""

from collections.abc import Iterable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

DropoutRate = Annotated[float, Field(ge=0, lt=1)]  # of what is left out
DROPOUT_PARTS = ("attention.output", "cross.output", "mlp.down", "embedding_norm")


def add_dropout(network: nn.Module, share: float, parts: Iterable[str] = DROPOUT_PARTS) -> None:
    """While it learns, a `share` of what comes out of every part whose name ends so is zero, and the rest larger."""

    def dropped(part: nn.Module, _: object, out: Tensor) -> Tensor:
        return apply_dropout(out, share) if part.training else out

    for name, module in network.named_modules():
        if share and any(f".{name}".endswith(f".{part}") for part in parts):
            module.register_forward_hook(dropped)


def apply_dropout(x: Tensor, share: float) -> Tensor:
    """A `share` of it zero, and the rest as much larger.

    A CPU draws one number at a time.  Here one draw is for four: 16 bits tell a share to 1 in 65,536.
    """
    if x.device.type != "cpu":
        return F.dropout(x, share)
    drawn = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    kept = drawn.view(torch.int16)[: x.numel()].view(x.shape) >= round(share * 2**16) - 2**15
    return x * (kept.to(x.dtype) / (1 - share))
