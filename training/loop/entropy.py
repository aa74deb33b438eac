"""Cross-entropy over a large vocabulary, without all scores in memory at once.

The gradient of a row follows from the scores of that row alone.  So scores are computed for some rows at a time, and
their gradients of states and matrix are taken before they are freed (as in Hsu et al. 2024, arXiv:2410.10989, and
Wijmans et al. 2024, arXiv:2411.09009, for GPUs).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

CHUNK_SCORES = 1 << 22  # scores at once, 16 MiB: they fit in a cache, with enough rows for matrix products
OutputLayer = tuple[Tensor, Tensor | None]  # the output layer: a matrix [V, W], and a bias [V] or none


def mean_entropy(states: Tensor, last: OutputLayer, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of targets [M] given states [M, W]; 0 if M is 0.

    With `smoothing`, that share of the target is spread over all classes (Szegedy et al. 2016, arXiv:1512.00567).
    """
    loss: Tensor = ChunkedEntropy.apply(states, targets, smoothing, *last)  # type: ignore[no-untyped-call]
    return loss


def entropy_and_hits(states: Tensor, last: OutputLayer, targets: Tensor) -> tuple[float, int]:
    """Return the sum of cross-entropies, and how many targets have the largest score."""
    loss, hits = 0.0, 0
    for rows in row_chunks(len(states), len(last[0])):
        scores = F.linear(states[rows], *last).float()
        loss += F.cross_entropy(scores, targets[rows], reduction="sum").item()
        hits += int((scores.argmax(dim=-1) == targets[rows]).sum())
    return loss, hits


def row_chunks(rows: int, classes: int) -> Iterator[slice]:
    size = max(1, CHUNK_SCORES // classes)
    return (slice(at, at + size) for at in range(0, rows, size))


class ChunkedEntropy(torch.autograd.Function):
    """Cross-entropy in chunks.  The gradient is computed in the forward pass and scaled in the backward pass."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, targets: Tensor, smoothing: float, *last: Tensor | None) -> Tensor:
        (weight, bias), loss = last, states.new_zeros((), dtype=torch.float32)
        assert weight is not None
        of_states, of_weight = torch.empty_like(states), torch.zeros_like(weight)
        of_bias = None if bias is None else torch.zeros_like(bias)
        for rows in row_chunks(len(states), len(weight)):
            x, chunk_targets = states[rows], targets[rows, None]
            scores = F.linear(x, weight, bias).float()  # [m, V]
            scores -= scores.amax(dim=-1, keepdim=True)
            loss -= (1 - smoothing) * scores.gather(1, chunk_targets).sum()
            if smoothing:
                loss -= smoothing * scores.mean(dim=-1).sum()
            shares = scores.exp_()  # in place, to save memory
            total = shares.sum(dim=-1, keepdim=True)
            loss += total.log().sum()
            shares.scatter_add_(1, chunk_targets, (smoothing - 1) * total)
            if smoothing:
                shares -= total * (smoothing / len(weight))
            of_states[rows] = (shares @ weight) / total
            of_weight.addmm_(shares.T, x / total)
            if of_bias is not None:
                of_bias.addmv_(shares.T, 1 / total[:, 0])
        ctx.save_for_backward(of_states, of_weight, of_bias)
        ctx.count = max(1, len(states))
        loss /= ctx.count
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        states, *last = (None if part is None else part * (grad_output / ctx.count) for part in ctx.saved_tensors)
        return states, None, None, *last
