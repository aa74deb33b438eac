"""Dropout (Srivastava et al. 2014), put behind a network's parts from outside.

It doesn't know what they compute.  The one idea: it is a hook, so neither the network nor its file knows of it.
"""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn import functional as F

PARTS = ("attention.output", "cross.output", "mlp.down", "embedding_norm")


def drop(network: nn.Module, share: float, parts: Iterable[str] = PARTS) -> None:
    """While it learns, a `share` of what comes out of every part whose name ends so is zero, and the rest larger."""

    def dropped(part: nn.Module, _: object, out: Tensor) -> Tensor:
        return F.dropout(out, share, part.training)

    for name, module in network.named_modules():
        if share and any(f".{name}".endswith(f".{part}") for part in parts):
            module.register_forward_hook(dropped)
