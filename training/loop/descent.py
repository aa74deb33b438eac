"""Steps down a gradient, for experiments that draw their data as they go and keep nothing: what trains in seconds.

Knows no data.  What is trained to be kept goes through training.loop.trainer.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

WARM_UP = 10  # steps
REPORT_EVERY = 50  # of as many losses the mean is told


def descend(
    network: nn.Module, loss: Callable[[], Tensor], steps: int, rate: float, tell: Callable[[str], object] = len
) -> list[float]:
    """AdamW's, at a rate that rises to `rate` and falls to nothing; the losses.  `tell` hears how it goes."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate)
    network.train()
    losses: list[float] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARM_UP, 1.2 * (steps - step) / steps)
        optimizer.zero_grad()
        value = loss()
        torch.autograd.backward(value)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(value.item())
        if len(losses) % REPORT_EVERY == 0:
            tell(f"step {len(losses)}/{steps}  loss {sum(losses[-REPORT_EVERY:]) / REPORT_EVERY:.4f}\n")
    network.eval()
    return losses
