"""Weights of four bits, calibrated (GPTQ, Frantar et al. 2022, arXiv:2210.17323).

Knows no files and no packing.  The one idea: what a column of weights loses by rounding is made good, as far as real
inputs allow it, by the columns that are not rounded yet.  The weights stay in the network, as whole multiples -8 .. 7
of one half-precision scale for FINE inputs of an output (GGUF's Q4_0): whoever packs or stores them finds codes and
scales in the weights themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor, nn

from ..network.attention import AttentionContext, attend
from ..network.heads import LanguageHead
from ..network.ragged import RaggedBatch
from ..network.transformer import PreBlock, Transformer

INT4_GROUP = 32  # inputs of an output that share a scale
DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it
SCALE_FRACTIONS = tuple(1 - step / 40 for step in range(17))  # scales tried, of the one that cuts nothing off

QUERY_STRIDE = 4
LINEAR_GROUPS = (
    ("attention.query", "attention.key"),
    ("attention.value",),
    ("attention.output",),
    ("mlp.gate", "mlp.up"),
    ("mlp.down",),
)

BlockInput = tuple[Tensor, AttentionContext]  # what a block is given for one sequence


@dataclass(frozen=True)
class Int4Matrix:
    """A matrix [N, K] as (codes - 8) * scales: whole numbers 0 to 15, and float16 scales [N, K / FINE], rounded up."""

    codes: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """[N, K] float32, exactly."""
        wide = self.scales.float().repeat_interleave(INT4_GROUP, 1)[:, : self.codes.size(1)]
        return (self.codes.float() - 8) * wide


def ignore_layers(done: int, total: int) -> None:
    """Nobody asked how far it is."""


@torch.no_grad()
def calibrate(
    network: Transformer,
    head: LanguageHead | None,
    sequences: Sequence[Sequence[int]],
    progress: Callable[[int, int], None] = ignore_layers,
) -> dict[str, Int4Matrix]:
    """Round the matrices of all blocks, and of `head` if there is one, in place, to suit `sequences` of tokens.

    Float32 on any device; some ten thousand tokens are enough.  Gives what the matrices became by their parameters'
    names.  A tied head is parted from the embeddings, which stay as they are.
    """
    device = network.tokens.weight.device
    shown = [network.embed(RaggedBatch.of([sequence], device=device)) for sequence in sequences]
    found: dict[str, Int4Matrix] = {}
    for layer, module in enumerate(network.blocks):
        block = cast(PreBlock, module)
        found |= {f"blocks.{layer}.{name}": grid for name, grid in quantize_block(block, shown).items()}
        shown = [(block(x, frame), frame) for x, frame in shown]
        progress(layer + 1, len(network.blocks) + 1)
    if head is not None:
        head.output.weight = nn.Parameter(head.output.weight.detach().clone())
        seen = InputHessian(head.output)
        for x, _ in shown:
            seen.add(network.final_norm(x))
        seen.hook.remove()
        found["head.output.weight"] = quantize_linears([head.output], seen.hessian)[0]
    progress(len(network.blocks) + 1, len(network.blocks) + 1)
    return found


class InputHessian:
    """The sum of x xT over the inputs x of a matrix: how much an error in one column shows, and in which others."""

    def __init__(self, linear: nn.Linear) -> None:
        self.hessian = linear.weight.new_zeros(linear.in_features, linear.in_features)
        self.last = linear.weight.new_zeros(0, linear.in_features)
        self.hook = linear.register_forward_pre_hook(lambda _, inputs: self.add(inputs[0]))

    def add(self, x: Tensor) -> None:
        self.hessian.addmm_(x.T, x)


class ValueHessian(InputHessian):
    """The same for values: attention mixes them before anybody sees them, so mixtures of inputs are what counts.

    The first tokens of a text are few, and half of what all others see: their errors would be lost in a plain sum.
    """

    def add(self, x: Tensor) -> None:
        self.last = x

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """As attend, of one sequence.  Every STRIDE-th row is enough: neighbours see much the same."""
        heads, kv_heads, width = query.size(2), key.size(1), query.size(3)
        rows = slice(QUERY_STRIDE - 1, None, QUERY_STRIDE)
        keys = key[0].repeat_interleave(heads // kv_heads, 0)  # [H, K, D]
        scores = query[0, rows].transpose(0, 1) @ keys.transpose(1, 2) * (scale or width**-0.5)
        if mask is not None:
            scores += mask[0, :, rows]
        mixtures = scores.softmax(-1).flatten(0, 1) @ self.last  # [H * Q / STRIDE, W]
        self.hessian.addmm_(mixtures.T, mixtures)
        return attend(query, key, value, mask, scale)


def quantize_block(block: PreBlock, shown: list[BlockInput]) -> dict[str, Int4Matrix]:
    """Matrices with the same inputs are rounded as one."""
    linears = [
        {name: linear for name in names if isinstance(linear := attrgetter(name)(block), nn.Linear)}
        for names in LINEAR_GROUPS
    ]
    hessians = measure_hessians(block, shown, [next(iter(each.values())) for each in linears])
    found: dict[str, Int4Matrix] = {}
    for each, hessian in zip(linears, hessians, strict=True):
        names = [f"{name}.weight" for name in each]
        found |= zip(names, quantize_linears(list(each.values()), hessian), strict=True)
    return found


def measure_hessians(block: PreBlock, shown: list[BlockInput], linears: list[nn.Linear]) -> list[Tensor]:
    """The Hessian of each matrix."""
    attention = block.attention
    seen = [ValueHessian(linear) if linear is attention.value else InputHessian(linear) for linear in linears]
    before = attention.mix
    attention.mix = next(watcher.mix for watcher in seen if isinstance(watcher, ValueHessian))
    for x, frame in shown:
        block(x, frame)
    attention.mix = before
    for watcher in seen:
        watcher.hook.remove()
    return [watcher.hessian for watcher in seen]


def quantize_linears(linears: list[nn.Linear], hessian: Tensor) -> list[Int4Matrix]:
    """In place."""
    codes, scales = quantize_gptq(torch.cat([linear.weight for linear in linears]), hessian)
    made, start = [], 0
    for linear in linears:
        end = start + linear.out_features
        grid = Int4Matrix(codes[start:end], scales[start:end])
        linear.weight.copy_(grid.dequantize())
        made.append(grid)
        start = end
    return made


def quantize_gptq(weights: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, K] and scales [N, K / FINE] of weights [N, K]; see Grid.  `weights` are used up."""
    spread = inverse_factor(hessian)  # [K, K]
    importance = spread.diagonal() ** -2
    count, inputs = weights.shape
    codes = torch.empty(count, inputs, dtype=torch.uint8, device=weights.device)
    scales = []
    for start in range(0, inputs, INT4_GROUP):
        end = min(start + INT4_GROUP, inputs)
        scale = best_scale(weights[:, start:end], importance[start:end])
        errors = torch.empty(count, end - start, device=weights.device)
        for i in range(start, end):
            code = nearest_codes(weights[:, i], scale)
            codes[:, i] = code + 8
            errors[:, i - start] = (weights[:, i] - code * scale) / spread[i, i]
            weights[:, i + 1 : end].addr_(errors[:, i - start], spread[i, i + 1 : end], alpha=-1)
        weights[:, end:].addmm_(errors, spread[start:end, end:], alpha=-1)
        scales.append(scale.half())
    return codes, torch.stack(scales, 1)


def inverse_factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse: row i says how what column i lost is shared out among those after it.

    In float64: inputs of a small network are nearly dependent.
    """
    hessian = hessian.double()
    diagonal = hessian.diagonal()
    diagonal += DAMPING * diagonal.mean().clamp(min=1e-20)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    spread: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return spread.float()


def nearest_codes(weights: Tensor, scale: Tensor) -> Tensor:
    """The nearest codes from -8 to 7, as floats; 0 where the scale is 0."""
    return (weights / scale.where(scale != 0, 1)).round().clamp(-8, 7)


def best_scale(group: Tensor, importance: Tensor) -> Tensor:
    """[N] scales, exact in half precision, for weights [N, FINE]: the least squares of what is lost.

    A negative scale gives the code -8 to the largest positive weight.
    """
    top = group.abs().amax(1) / 8
    best = torch.zeros_like(top)
    least = torch.full_like(top, torch.inf)
    for share in SCALE_FRACTIONS:
        for sign in (1, -1):
            scale = (top * (share * sign)).half().float()
            lost = group - nearest_codes(group, scale[:, None]) * scale[:, None]
            cost = lost.square() @ importance
            better = cost < least
            best, least = scale.where(better, best), cost.where(better, least)
    return best
