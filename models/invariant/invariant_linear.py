"""A linear layer whose rows do not depend on how many there are, and an activation of which the same is true.

Knows nothing of transformers.  The one idea: rows are multiplied in pieces whose sizes were proven to give the same
bits (sizes.py); on a CPU over weights that lie input by input, because those kernels add in one order for nearly every
number of rows, and are the faster ones for few.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.errors import InvarianceError
from .safe_sizes import ROW_COUNTS, is_prefix_of, matching_sizes, split_rows

REFERENCE_TILE = 16  # rows of the product that others are compared with
MAX_ROWS = ROW_COUNTS[-1]
SINGLE_THREAD_ELEMENTS = 32768  # elements below which torch leaves a loop to one thread (at::internal::GRAIN_SIZE)
VECTOR_MULTIPLE = 64  # a multiple of what any vector loop takes at a time; what is left over goes through a scalar one
MAX_ROWS_WIDE = 32  # rows tried of a product as wide as a vocabulary, which takes long
WIDE_OUTPUTS = 16384
NARROW_OUTPUTS = 64  # outputs below which a layer is filled up to whole vectors
VECTOR_WIDTH = 16
DISTINCT_ROWS = 4096  # rows made up of a matrix at a time


class InvariantLinear(nn.Module):
    """x @ weight.T + bias in pieces of `sizes` rows; the first `features` of what a widened layer gives."""

    def __init__(self, linear: nn.Linear, sizes: tuple[int, ...], features: int) -> None:
        super().__init__()
        self.weight, self.bias, self.sizes, self.features = linear.weight, linear.bias, sizes, features

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, features]."""
        return self.padded_product(x)[:, : self.features].contiguous()

    def padded_product(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out], all of it."""
        pieces = split_rows(len(x), self.sizes)
        if len(pieces) == 1:
            return linear_product(pad_rows(x, pieces[0][1]), self.weight, self.bias)[: len(x)]
        out = x.new_empty(len(x), self.weight.size(0))
        for start, size in pieces:
            rows, place = x[start : start + size], out[start : start + size]
            if len(rows) == size:
                linear_product(rows, self.weight, self.bias, place)
            else:
                place.copy_(linear_product(pad_rows(rows, size), self.weight, self.bias)[: len(rows)])
        return out


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: the same call wherever it is stored."""
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def pad_rows(x: Tensor, size: int) -> Tensor:
    """[T, in] with zeros up to `size` rows."""
    missing = size - len(x)
    return torch.cat((x, _zeros(missing, x.size(1), x.dtype, x.device))) if missing else x


@lru_cache(maxsize=256)
def _zeros(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(rows, width, dtype=dtype, device=device)


def widen_linear(linear: nn.Linear) -> nn.Linear:
    """A layer of few outputs with more, all zero: what is left over of a vector goes, in some libraries, through
    kernels that give a row other bits at another place."""
    more = -linear.out_features % VECTOR_WIDTH if linear.out_features < NARROW_OUTPUTS else 0
    if not more:
        return linear
    wide = nn.Linear(linear.in_features, linear.out_features + more, bias=linear.bias is not None, device="meta")
    wide.weight = nn.Parameter(F.pad(linear.weight, (0, 0, 0, more)), requires_grad=False)
    if linear.bias is not None:
        wide.bias = nn.Parameter(F.pad(linear.bias, (0, more)), requires_grad=False)
    return wide


def store_transposed(weight: Tensor) -> None:
    """Turn a float32 matrix in a CPU's memory so that an input's weights lie side by side; it is read as before."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        weight.data = weight.data.t().contiguous().t()


def find_safe_sizes(linear: nn.Linear) -> tuple[int, ...]:
    """Numbers of rows whose product with such a matrix gives each row the same bits as tiles of 16 do.

    Tried with numbers whose products cancel, so that what is left is what rounding left: another order of adding shows
    in nearly every element.  With ordinary numbers, half precision would round nearly all of it away.
    InvarianceError where a row's bits depend on its place in a tile, or on its neighbours.
    """
    most = max_tested_rows(linear.out_features)
    x, weight = cancelling_inputs(most + REFERENCE_TILE, linear.weight)

    def made(rows: Tensor) -> Tensor:
        return linear_product(rows, weight, linear.bias)

    reference = torch.cat([made(tile) for tile in torch.split(x, REFERENCE_TILE)])
    moved = all(is_prefix_of(made(x[at : at + REFERENCE_TILE]), reference[at:]) for at in (1, 7, REFERENCE_TILE // 2))
    beside_others = is_prefix_of(made(torch.cat((x[:1], x[1 - REFERENCE_TILE :])))[:1], reference)
    if not (moved and beside_others):
        raise InvarianceError(
            f"a product of {linear.in_features} to {linear.out_features} features in {tensor_kind(weight)} gives a row "
            "other bits at another place of the batch"
        )
    shifted = reference[1:]  # so that no row stands where it stood in its tile
    return matching_sizes((size for size in ROW_COUNTS if size <= most), shifted, lambda size: made(x[1 : size + 1]))


def max_tested_rows(outputs: int) -> int:
    """Rows that are computed at once, at most."""
    return MAX_ROWS_WIDE if outputs > WIDE_OUTPUTS else MAX_ROWS


def linear_test_bytes(inputs: int, outputs: int) -> int:
    """While a matrix is tried: another like it, and the product of all rows twice, in float32."""
    return outputs * (inputs + 2 * (max_tested_rows(outputs) + REFERENCE_TILE)) * torch.float32.itemsize


def cancelling_inputs(rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, in] inputs and a matrix laid out `like` this one whose products are zero but for rounding."""
    generator = torch.Generator().manual_seed(0)
    count, features = like.shape
    order = torch.randperm(features // 2, generator=generator)

    def doubled(height: int, sign: int) -> Tensor:
        shape = (height, features // 2)
        spread = torch.randint(-6, 7, shape, generator=generator)
        half = torch.ldexp(torch.randn(shape, generator=generator), spread)
        return F.pad(torch.cat((half, sign * half[:, order]), dim=1), (0, features % 2)).to(like.device, like.dtype)

    weight = torch.empty_like(like)
    for part in torch.split(weight, DISTINCT_ROWS):
        part.copy_(doubled(min(DISTINCT_ROWS, count), -1)[: len(part)])
    return doubled(rows, 1), weight


def tensor_kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"


class InvariantActivation:
    """An elementwise function as if every element went through the same loop.

    A vectorised loop leaves its last few elements, and those where two threads meet, to a scalar one, which rounds
    differently.  So the function is given numbers of elements that leave none.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, x: Tensor) -> Tensor:
        """[T, W] to [T, W]."""
        width = x.size(1)
        if x.device.type != "cpu":
            return self.function(x)
        wide = F.pad(x, (0, -width % VECTOR_MULTIPLE)) if width % VECTOR_MULTIPLE else x.contiguous()
        flat = wide.view(-1)
        done = [
            self.function(piece) for piece in torch.split(flat, even_thread_size(len(flat), torch.get_num_threads()))
        ]
        whole = done[0] if len(done) == 1 else torch.cat(done)
        return whole.view(wide.shape)[:, :width]


def even_thread_size(count: int, threads: int) -> list[int]:
    """`count` elements, a multiple of LANES, as numbers that each thread gets whole LANES of."""
    pieces = []
    while count:
        whole = count
        while over := whole % (VECTOR_MULTIPLE * min(threads, math.ceil(whole / SINGLE_THREAD_ELEMENTS))):
            whole -= over
        pieces.append(whole)
        count -= whole
    return pieces or [0]


def self_test_rows(name: str, function: Callable[[Tensor], Tensor], width: int, like: Tensor) -> None:
    """InvarianceError where `function` of [T, width] gives a row other bits than of that row alone."""
    x = torch.randn(67, width, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
    alone = torch.cat([function(row) for row in torch.split(x, 1)])
    for count in (2, 3, 8, 33, 67):
        if not is_prefix_of(function(x[:count]), alone) or not is_prefix_of(function(x[1:count]), alone[1:]):
            raise InvarianceError(
                f"{name} of {width} features in {tensor_kind(like)} gives a row other bits in a batch"
            )
