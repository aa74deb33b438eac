"""Quantises weights to 4 bits with calibration (GPTQ, Frantar et al. 2022, arXiv:2210.17323).

The rounding error of a column of weights is compensated by the columns that are not rounded yet, as far as real inputs
allow it. The weights stay in the network as whole multiples -8 .. 7 of one half-precision scale for INT4_GROUP inputs
of an output (GGUF's Q4_0). So codes and scales can be recovered from the weights when they are packed or saved.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor, nn

from ..core.errors import UnsupportedError
from ..network.attention import Attention, AttentionContext, attend
from ..network.heads import LanguageHead
from ..network.ragged import RaggedBatch
from ..network.scoring import Scoring
from ..network.transformer import PreBlock, Transformer

INT4_GROUP = 32  # inputs of an output that share a scale
HESSIAN_BYTES = 32  # of memory for each entry [K, K] of a matrix with K inputs: one float32, and float64 copies
DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it
SCALE_FRACTIONS = tuple(1 - step / 40 for step in range(17))  # tried scales, as fractions of the one without clipping

QUERY_STRIDE = 4
LINEAR_GROUPS = (
    ("attention.query", "attention.key"),
    ("attention.value",),
    ("attention.output",),
    ("mlp.gate", "mlp.up"),
    ("mlp.down",),
)

BlockInput = tuple[Tensor, AttentionContext]  # a block's input for one sequence


@dataclass(frozen=True)
class Int4Matrix:
    """A matrix [N, K] as (codes - 8) * scales: integers 0 to 15, and float16 scales [N, ceil(K / INT4_GROUP)]."""

    codes: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """[N, K] float32, exact."""
        wide = self.scales.float().repeat_interleave(INT4_GROUP, 1)[:, : self.codes.size(1)]
        return (self.codes.float() - 8) * wide


def ignore_layers(done: int, total: int) -> None:
    """The default progress callback: does nothing."""


@torch.no_grad()
def calibrate(
    network: Transformer,
    head: LanguageHead | None,
    sequences: Sequence[Sequence[int]],
    progress: Callable[[int, int], None] = ignore_layers,
) -> dict[str, Int4Matrix]:
    """Quantise the matrices of all blocks, and of `head` if given, in place, calibrated on `sequences` of tokens.

    It works in float32 on any device; about ten thousand tokens are enough. Returns the quantised matrices by parameter
    name. A tied head gets its own matrix, and the embeddings stay as they are.
    """
    if network.config.experts is not None:
        raise UnsupportedError("its MLPs are mixtures of experts, for which no calibration is implemented")
    if network.config.key_layers or any(network.config.tied_values):
        raise UnsupportedError("it has layers without values of their own, for which no calibration is implemented")
    if network.config.global_tokens:
        raise UnsupportedError("its global tokens have projections, for which no calibration is implemented")
    if network.config.is_recurrent:
        raise UnsupportedError("it has recurrent layers, for which no calibration is implemented")
    device = network.tokens.weight.device
    block_inputs = [network.embed(RaggedBatch.of([sequence], device=device)) for sequence in sequences]
    found: dict[str, Int4Matrix] = {}
    for layer, module in enumerate(network.blocks):
        block = cast(PreBlock, module)
        found |= quantize_block(block, block_inputs)
        block_inputs = [(block(x, frame), frame) for x, frame in block_inputs]
        progress(layer + 1, len(network.blocks) + 1)
    if head is not None:
        head.output.weight = nn.Parameter(head.output.weight.detach().clone())
        seen = InputHessian(head.output)
        for x, _ in block_inputs:
            seen.add(network.close(x))
        seen.hook.remove()
        found |= quantize_linears({"head.output.weight": head.output}, seen.hessian)
    progress(len(network.blocks) + 1, len(network.blocks) + 1)
    return found


class InputHessian:
    """The Hessian of a linear layer: the sum of x xT over its inputs x. It gives how much an error in one column
    changes the output, and which other columns can compensate it."""

    def __init__(self, linear: nn.Linear) -> None:
        self.hessian = linear.weight.new_zeros(linear.in_features, linear.in_features)
        self.last = linear.weight.new_zeros(0, linear.in_features)
        self.hook = linear.register_forward_pre_hook(lambda _, inputs: self.add(inputs[0]))

    def add(self, x: Tensor) -> None:
        self.hessian.addmm_(x.T, x)


class ValueHessian(InputHessian):
    """The Hessian of the value projection, whose outputs are mixed by attention, so the sum is over mixtures of inputs.

    The first tokens of a text are few but get half of all attention; a plain sum would neglect their errors.
    """

    def add(self, x: Tensor) -> None:
        self.last = x

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
        """As attend, for one sequence. Only every QUERY_STRIDE-th row is used: neighbouring rows have similar
        weights."""
        heads, kv_heads = query.size(2), key.size(1)
        rows = slice(QUERY_STRIDE - 1, None, QUERY_STRIDE)
        keys = key[0].repeat_interleave(heads // kv_heads, 0)  # [H, K, D]
        scores = scoring.score(query[0, rows].transpose(0, 1), keys, None if mask is None else mask[0, :, rows])
        sinks = None if scoring.sinks is None else scoring.sinks[:, None, None]
        mixtures = scoring.weigh(scores, sinks).flatten(0, 1) @ self.last  # [H * Q / STRIDE, W]
        self.hessian.addmm_(mixtures.T, mixtures)
        return attend(query, key, value, mask, scoring)


def quantize_block(block: PreBlock, block_inputs: list[BlockInput]) -> dict[str, Int4Matrix]:
    """Quantise a block's matrices; those with the same inputs together."""
    linears = [
        {name: linear for name in names if isinstance(linear := attrgetter(name)(block), nn.Linear)}
        for names in LINEAR_GROUPS
    ]
    hessians = measure_hessians(block, block_inputs, [next(iter(each.values())) for each in linears])
    found: dict[str, Int4Matrix] = {}
    for each, hessian in zip(linears, hessians, strict=True):
        found |= quantize_linears(
            {f"blocks.{block.layer}.{name}.weight": linear for name, linear in each.items()}, hessian
        )
    return found


def measure_hessians(block: PreBlock, block_inputs: list[BlockInput], linears: list[nn.Linear]) -> list[Tensor]:
    """The Hessian of each linear layer."""
    attention = cast(Attention, block.attention)
    seen = [ValueHessian(linear) if linear is attention.value else InputHessian(linear) for linear in linears]
    before = attention.mix
    attention.mix = next(watcher.mix for watcher in seen if isinstance(watcher, ValueHessian))
    for x, frame in block_inputs:
        block(x, frame)
    attention.mix = before
    for watcher in seen:
        watcher.hook.remove()
    return [watcher.hessian for watcher in seen]


def quantize_linears(linears: Mapping[str, nn.Linear], hessian: Tensor) -> dict[str, Int4Matrix]:
    """Quantise linear layers with the same inputs, in place, by the names of their matrices.

    UnsupportedError if their inputs overflow, so that the Hessian has no inverse.
    """
    try:
        codes, scales = quantize_gptq(torch.cat([linear.weight for linear in linears.values()]), hessian)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # it is documented, and not in __all__
        message = "on this text its inputs are so large that their products overflow, and int4 needs them; choose int8"
        raise UnsupportedError(message, tensor=next(iter(linears))) from None
    made, start = dict[str, Int4Matrix](), 0
    for name, linear in linears.items():
        end = start + linear.out_features
        made[name] = Int4Matrix(codes[start:end], scales[start:end])
        linear.weight.copy_(made[name].dequantize())
        start = end
    return made


def quantize_gptq(weights: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, K] and scales [N, K / INT4_GROUP] of weights [N, K]; see Int4Matrix. `weights` are overwritten."""
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
    """The upper Cholesky factor of the inverse Hessian: row i gives how the error of column i is distributed to later
    columns. LinAlgError if there is none.

    It is computed in float64, because inputs of a small network are nearly dependent.
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
    """[N] scales, exact in half precision, for weights [N, INT4_GROUP], with the least weighted squared error.

    A negative scale gives the code -8 to the largest positive weight.
    """
    top = group.abs().amax(1) / 8
    best = torch.zeros_like(top)
    least = torch.full_like(top, torch.inf)
    for share in SCALE_FRACTIONS:
        for sign in (1, -1):
            scale = (top * (share * sign)).half().float()
            error = group - nearest_codes(group, scale[:, None]) * scale[:, None]
            cost = error.square() @ importance
            better = cost < least
            best, least = scale.where(better, best), cost.where(better, least)
    return best
