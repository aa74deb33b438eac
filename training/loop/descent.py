"""A short training loop for experiments that generate their data and save nothing.

training.loop.trainer is the loop for models that are kept.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

WARM_UP = 10  # steps
REPORT_EVERY = 50  # losses whose mean is reported


def descend(
    network: nn.Module, loss: Callable[[], Tensor], steps: int, rate: float, report: Callable[[str], object] = len
) -> list[float]:
    """Train with AdamW at a rate that rises to `rate` and falls to 0.  Returns the losses; `report` gets progress
    lines.
    """
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
            report(f"step {len(losses)}/{steps}  loss {sum(losses[-REPORT_EVERY:]) / REPORT_EVERY:.4f}\n")
    network.eval()
    return losses
