"""A linear layer whose rows do not depend on their number, and an activation with the same property.

Rows are multiplied in pieces whose sizes were tested to give the same bits (safe_sizes.py). On a CPU the weights are
stored input by input, because those kernels add in one order for nearly every number of rows, and are faster for few
rows.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.errors import InvarianceError
from ..core.turns import YieldTurn, copy_by_parts, keep_turn, rows_of_part
from .safe_sizes import ROW_COUNTS, is_prefix_of, matching_sizes, split_rows

REFERENCE_TILE = 16  # rows of the reference product
MAX_ROWS = ROW_COUNTS[-1]
SINGLE_THREAD_ELEMENTS = 32768  # elements below which torch uses one thread for a loop (at::internal::GRAIN_SIZE)
VECTOR_MULTIPLE = 64  # a multiple of every vector loop's width; the rest of a count goes through a scalar loop
MAX_ROWS_WIDE = 32  # tested rows of a product as wide as a vocabulary, which takes long
WIDE_OUTPUTS = 16384
NARROW_OUTPUTS = 64  # outputs below which a layer is padded to whole vectors
VECTOR_WIDTH = 16


class InvariantLinear(nn.Module):
    """x @ weight.T + bias in pieces of `sizes` rows; `features` is the number of real outputs of a widened layer."""

    def __init__(self, linear: nn.Linear, sizes: tuple[int, ...], features: int) -> None:
        super().__init__()
        self.weight, self.bias, self.sizes, self.features = linear.weight, linear.bias, sizes, features

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, features]."""
        return self.padded_product(x)[:, : self.features].contiguous()

    def padded_product(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out], with the outputs of widening."""
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
    """x @ weight.T + bias, by the same call whether or not `out` is given."""
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def pad_rows(x: Tensor, size: int) -> Tensor:
    """[T, in] padded with zeros to `size` rows."""
    missing = size - len(x)
    return torch.cat((x, _zeros(missing, x.size(1), x.dtype, x.device))) if missing else x


@lru_cache(maxsize=256)
def _zeros(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(rows, width, dtype=dtype, device=device)


def widen_linear(linear: nn.Linear) -> nn.Linear:
    """A layer of few outputs with zero outputs added. Some libraries compute the outputs that do not fill a vector with
    other kernels, which give a row other bits at another place."""
    more = -linear.out_features % VECTOR_WIDTH if linear.out_features < NARROW_OUTPUTS else 0
    if not more:
        return linear
    wide = nn.Linear(linear.in_features, linear.out_features + more, bias=linear.bias is not None, device="meta")
    wide.weight = nn.Parameter(F.pad(linear.weight, (0, 0, 0, more)), requires_grad=False)
    if linear.bias is not None:
        wide.bias = nn.Parameter(F.pad(linear.bias, (0, more)), requires_grad=False)
    return wide


def store_transposed(weight: Tensor, yield_turn: YieldTurn = keep_turn) -> None:
    """Store a float32 matrix on a CPU so that an input's weights lie side by side; its shape and values stay the
    same."""
    turned = weight.data.t()
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and not turned.is_contiguous():
        weight.data = copy_by_parts(turned, torch.empty(turned.shape), yield_turn).t()


def find_safe_sizes(linear: nn.Linear, yield_turn: YieldTurn = keep_turn) -> tuple[int, ...]:
    """Numbers of rows for which the product with such a matrix gives each row the same bits as tiles of 16 rows.

    The test uses numbers whose products cancel, so that the result is rounding error only: another order of addition
    changes nearly every element. Ordinary numbers would hide it in half precision. InvarianceError if a row's bits
    depend on its place in a tile, or on its neighbours. `yield_turn` is called after each product, and after each part
    of the matrix.
    """
    most = max_tested_rows(linear.out_features)
    x, weight = cancelling_inputs(most + REFERENCE_TILE, linear.weight, yield_turn)

    def made(rows: Tensor) -> Tensor:
        out = linear_product(rows, weight, linear.bias)
        yield_turn()
        return out

    reference = torch.cat([made(tile) for tile in torch.split(x, REFERENCE_TILE)])
    moved = all(is_prefix_of(made(x[at : at + REFERENCE_TILE]), reference[at:]) for at in (1, 7, REFERENCE_TILE // 2))
    beside_others = is_prefix_of(made(torch.cat((x[:1], x[1 - REFERENCE_TILE :])))[:1], reference)
    if not (moved and beside_others):
        raise InvarianceError(
            f"a product of {linear.in_features} to {linear.out_features} features in {tensor_kind(weight)} gives a row "
            "other bits at another place of the batch"
        )
    shifted = reference[1:]  # so that each row has another place in its tile
    return matching_sizes((size for size in ROW_COUNTS if size <= most), shifted, lambda size: made(x[1 : size + 1]))


def max_tested_rows(outputs: int) -> int:
    """The largest number of rows computed at once."""
    return MAX_ROWS_WIDE if outputs > WIDE_OUTPUTS else MAX_ROWS


def linear_test_bytes(inputs: int, outputs: int) -> int:
    """Bytes while a matrix is tested: a second matrix, and the product of all rows twice, in float32."""
    return outputs * (inputs + 2 * (max_tested_rows(outputs) + REFERENCE_TILE)) * torch.float32.itemsize


def cancelling_inputs(rows: int, like: Tensor, yield_turn: YieldTurn = keep_turn) -> tuple[Tensor, Tensor]:
    """[rows, in] inputs and a matrix in the layout of `like`, whose products are zero up to rounding."""
    generator = torch.Generator().manual_seed(0)
    features = like.size(1)
    order = torch.randperm(features // 2, generator=generator)

    def mirrored_rows(height: int, sign: int) -> Tensor:
        shape = (height, features // 2)
        spread = torch.randint(-6, 7, shape, generator=generator)
        half = torch.ldexp(torch.randn(shape, generator=generator), spread)
        return F.pad(torch.cat((half, sign * half[:, order]), dim=1), (0, features % 2)).to(like.device, like.dtype)

    weight = torch.empty_like(like)
    for part in torch.split(weight, rows_of_part(weight)):
        part.copy_(mirrored_rows(len(part), -1))
        yield_turn()
    return mirrored_rows(rows, 1), weight


def tensor_kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"


class InvariantActivation:
    """An elementwise function that treats every element in the same loop.

    A vectorised loop leaves its last elements, and those at the border of two threads, to a scalar loop that rounds
    differently. So the function is called with counts of elements that leave no rest.
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
    """`count` elements, a multiple of VECTOR_MULTIPLE, in sizes of which each thread gets whole multiples."""
    pieces = []
    while count:
        whole = count
        while over := whole % (VECTOR_MULTIPLE * min(threads, math.ceil(whole / SINGLE_THREAD_ELEMENTS))):
            whole -= over
        pieces.append(whole)
        count -= whole
    return pieces or [0]


def self_test_rows(name: str, function: Callable[[Tensor], Tensor], width: int, like: Tensor) -> None:
    """InvarianceError if `function` of [T, width] gives a row other bits than for that row alone."""
    x = torch.randn(67, width, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
    alone = torch.cat([function(row) for row in torch.split(x, 1)])
    for count in (2, 3, 8, 33, 67):
        if not is_prefix_of(function(x[:count]), alone) or not is_prefix_of(function(x[1:count]), alone[1:]):
            raise InvarianceError(
                f"{name} of {width} features in {tensor_kind(like)} gives a row other bits in a batch"
            )
