"""Packed weights: codes and scales of a file's blocks are kept, other weights are rounded by group."""

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from torch import Tensor, nn

from polyhead.models.checkpoint import load_estimate as estimate
from polyhead.models.native import packed_network
from polyhead.models.native.block_weights import BlockWeights
from polyhead.models.native.library import BLOCK_KINDS, Linear, load_library
from polyhead.models.native.packed_network import (
    COLUMNS,
    INT4,
    INT4_SHIFTED,
    INT8,
    INT8_SHIFTED,
    INT8_WIDE,
    WEIGHT_BITS,
    PackedNetwork,
    Precision,
    unsupported_reason,
)
from polyhead.models.native.step_memory import int8_bits
from polyhead.models.network.model_config import ModelConfig
from tests.models.native.test_step import BERT, LLAMA, SETS, multiplied, pytestmark
from tests.support import gguf_files

__all__ = ["pytestmark"]
GROUP, WIDE = 32, 64  # inputs of an output that share a scale, as in src/gemm.hpp; the second in INT8_WIDE
ADDED = {INT8: 128, INT4: 8, INT4_SHIFTED: 0, INT8_SHIFTED: 0, INT8_WIDE: 128}  # added to codes
OWN_FORMATS = {"Q8_0": INT8, "Q4_0": INT4, "Q4_1": INT4_SHIFTED, "Q5_0": INT8, "Q5_1": INT8_SHIFTED}
KINDS = [*OWN_FORMATS, "Q4_K", "Q5_K", "Q6_K"]


@dataclass(frozen=True)
class Unpacked:
    """A packed matrix: codes [N, K], and for each group of inputs a scale and a least weight [N, K / group]."""

    format: int
    codes: NDArray[numpy.int32]
    scales: NDArray[numpy.float32]
    least: NDArray[numpy.float32]

    def weights(self) -> Tensor:
        """The exact weights [N, K]."""
        group = group_of(self.format)
        scales, least = (each.repeat(group, 1)[:, : self.codes.shape[1]] for each in (self.scales, self.least))
        return torch.from_numpy(self.codes.astype(numpy.float32) * scales + least)


def group_of(format: int) -> int:
    """Inputs of an output that share a scale."""
    return WIDE if format == INT8_WIDE else GROUP


def linear_of(weights: Tensor) -> nn.Linear:
    made = nn.Linear(weights.size(1), weights.size(0), bias=False)
    made.weight = nn.Parameter(weights)
    return made


def unpacked(linear: Linear, count: int, inputs: int) -> Unpacked:
    """The first `count` outputs and `inputs` of a packed matrix; see src/gemm.hpp."""
    eight, shifted = linear.format not in (INT4, INT4_SHIFTED), linear.format in (INT4_SHIFTED, INT8_SHIFTED)
    group = group_of(linear.format)
    groups, size = linear.inputs // group, group * COLUMNS // (1 if eight else 2)
    assert linear.outputs * linear.inputs * WEIGHT_BITS[linear.format] / 8 == linear.outputs // COLUMNS * groups * (
        size + COLUMNS * (4 if shifted else 2)
    )
    taken = int(linear.outputs * linear.inputs * WEIGHT_BITS[linear.format] / 8)
    raw = numpy.frombuffer(ctypes.string_at(linear.weights, taken), numpy.uint8)
    blocks = raw.reshape(linear.outputs // COLUMNS, groups, -1)  # [B, G, bytes]
    if eight:
        codes = blocks[..., :size].reshape(*blocks.shape[:2], group // 4, COLUMNS, 4).transpose(0, 3, 1, 2, 4)
    else:
        both = blocks[..., :size].reshape(*blocks.shape[:2], 4, COLUMNS, 4)
        codes = numpy.stack([both & 15, both >> 4], 3).transpose(0, 4, 1, 2, 3, 5)

    def halves(start: int) -> NDArray[numpy.float32]:
        found = blocks[..., start : start + 2 * COLUMNS].copy().view(numpy.float16).astype(numpy.float32)
        return found.transpose(0, 2, 1).reshape(linear.outputs, groups)[:count, : -(-inputs // group)]

    whole = codes.reshape(linear.outputs, linear.inputs)[:count, :inputs].astype(numpy.int32) - ADDED[linear.format]
    scales = halves(size) * numpy.float32(linear.unit if linear.format in (INT8, INT8_WIDE) else 1)
    return Unpacked(linear.format, whole, scales, halves(size + 2 * COLUMNS) if shifted else 0 * scales)


def packed(
    weights: Tensor, precision: Precision, instructions: str = SETS[-1] if SETS else "", config: ModelConfig = LLAMA
) -> Unpacked:
    pack = PackedNetwork(load_library(instructions), config, precision)
    return unpacked(pack.pack_linear([linear_of(weights)]), *weights.shape)


def stored(kind: str, count: int = 77, inputs: int = 256, scale: float = 0.07) -> tuple[NDArray[numpy.uint8], Tensor]:
    """Blocks of random numbers [N, K / 32, bytes] (K-quants [N, K / 256, bytes]), and the weights they stand for."""
    each, size = gguf_files.gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if kind in OWN_FORMATS:
        weights = torch.randn(count, inputs, generator=torch.Generator().manual_seed(3)) * scale
        raw = quantize(weights.numpy(), GGMLQuantizationType[kind])
    else:
        raw = gguf_files.random_blocks(kind, count, inputs)
    kept = torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind]).astype(numpy.float32))
    return raw.reshape(count, inputs // each, size), kept.view(count, inputs)


def read_blocks(kind: str, blocks: NDArray[numpy.uint8]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Codes, scales and least weights of blocks of 32, read as their format is documented."""
    count = len(blocks)
    shifted, five = kind.endswith("_1"), kind.startswith("Q5")
    scales = blocks[..., :2].copy().view(numpy.float16).astype(numpy.float32)[..., 0]
    if kind == "Q8_0":
        return blocks[..., 2:].view(numpy.int8).reshape(count, -1).astype(int), scales, 0 * scales
    least = blocks[..., 2:4].copy().view(numpy.float16).astype(numpy.float32)[..., 0] if shifted else 0 * scales
    start = 4 if shifted else 2
    low = blocks[..., start + (4 if five else 0) :]
    codes = numpy.concatenate([low & 15, low >> 4], -1).astype(int)
    if five:
        codes += 16 * numpy.unpackbits(blocks[..., start : start + 4], axis=-1, bitorder="little").astype(int)
    return (codes - (0 if shifted else 16 if five else 8)).reshape(count, -1), scales, least


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("kind", OWN_FORMATS)
def test_codes_and_scales_of_blocks_are_kept(kind: str, instructions: str) -> None:
    """All codes and scales. In 8 bits the sign of a scale without a least weight may differ."""
    blocks, weights = stored(kind)
    found = packed(weights, "int4", instructions)
    codes, scales, least = read_blocks(kind, blocks)
    assert found.format == OWN_FORMATS[kind]
    sign = numpy.sign(scales) if found.format == INT8 else numpy.ones_like(scales)
    assert (found.codes == codes * sign.repeat(GROUP, 1)).all()
    assert (found.scales == scales * sign).all()
    assert (found.least == least).all()
    assert torch.equal(found.weights(), weights)


@pytest.mark.parametrize("kind", OWN_FORMATS)
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 30.0])
def test_blocks_are_packed_exactly_in_eight_bits(kind: str, scale: float) -> None:
    """Also for scales that are subnormal half-precision numbers in the file."""
    _, weights = stored(kind, scale=scale)
    found = packed(weights, "int8")
    assert found.format == (INT8_SHIFTED if kind.endswith("_1") else INT8)
    assert torch.equal(found.weights(), weights)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_k_quant_blocks_are_packed_to_a_32nd_of_a_scale(kind: str, precision: Precision, instructions: str) -> None:
    _, weights = stored(kind)
    found = packed(weights, precision, instructions)
    assert found.format == (INT4_SHIFTED if (kind, precision) == ("Q4_K", "int4") else INT8_SHIFTED)
    off = (found.weights() - weights).abs().unflatten(1, (-1, GROUP)).amax(-1)
    alike = numpy.where(found.scales == 0, numpy.abs(found.least), 0)  # a group of one number
    assert (off <= torch.from_numpy(found.scales / 32 * 1.0001 + alike / 2048)).all()


def groups_of(weights: Tensor, group: int = GROUP) -> Tensor:
    """[N, K] as [N, K / group, group]."""
    return nn.functional.pad(weights, (0, -weights.size(1) % group)).unflatten(1, (-1, group))


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize(("config", "format"), [(LLAMA, INT8), (BERT, INT8_WIDE)])
@pytest.mark.parametrize(("count", "inputs"), [(64, 128), (33, 100)])
def test_floats_are_rounded_to_half_a_scale_of_their_group(
    instructions: str, config: ModelConfig, format: int, count: int, inputs: int
) -> None:
    """127 scales equal the largest weight of a group, with the scale rounded up to half precision."""
    weights = torch.randn(count, inputs, generator=torch.Generator().manual_seed(1)) * torch.rand(inputs).exp2() * 0.05
    found = packed(weights, "int8", instructions, config)
    assert found.format == format
    scales, largest = torch.from_numpy(found.scales), groups_of(weights, group_of(format)).abs().amax(-1)
    assert (scales >= largest / 127 * (1 - 2**-23)).all()
    assert (scales <= largest / 127 * (1 + 2**-10)).all()
    off = groups_of(found.weights() - weights, group_of(format)).abs().amax(-1)
    assert (off <= scales / 2 * 1.0001).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_in_both_directions_keeps_the_codes_of_a_file(kind: str) -> None:
    """Only weights that no narrow format stores are rounded with wide groups: of blocks those of Q6_K."""
    raw, weights = stored(kind)
    pack = PackedNetwork(load_library(SETS[0]), BERT, "int8")
    blocks = torch.from_numpy(raw).reshape(len(weights), -1)
    linear = linear_of(weights)
    linear.weight = BlockWeights(blocks, kind)
    found = unpacked(pack.pack_linear([linear]), *weights.shape)
    expected = packed(weights, "int8", SETS[0], BERT)
    assert (found.format == INT8_WIDE) == (kind == "Q6_K")
    assert found.format == expected.format
    assert torch.equal(found.weights(), expected.weights())


def test_weights_that_are_no_numbers_stay_so_in_wide_groups() -> None:
    """One NaN or infinity makes a product NaN, the others' scales are as without it."""
    weights = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    clean = packed(weights, "int8", config=BERT).scales
    weights[3, 70], weights[5, 1] = torch.nan, torch.inf
    found = packed(weights, "int8", config=BERT)
    assert found.format == INT8_WIDE
    assert numpy.argwhere(numpy.isnan(found.scales)).tolist() == [[3, 1], [5, 0]]
    assert numpy.isclose(found.scales, clean)[~numpy.isnan(found.scales)].all()


def test_large_and_small_weights_keep_their_precision() -> None:
    """A matrix of ten orders of magnitude, more than float16 has: scales are relative to a unit of the matrix."""
    choice = torch.Generator().manual_seed(1)
    weights = torch.randn(64, 256, generator=choice)
    sizes = 10.0 ** torch.linspace(-7, 3, 64 * 8)[torch.randperm(64 * 8, generator=choice)].view(64, 8)
    weights = (groups_of(weights) / groups_of(weights).abs().amax(-1, keepdim=True) * sizes[..., None]).flatten(1)
    off = groups_of(packed(weights, "int8").weights() - weights).abs().amax(-1) / sizes
    assert off.max() < 0.01
    assert off[sizes >= 1e3 * 2**-22].max() <= (1 + 2**-10) / 254


@pytest.mark.parametrize("exponent", [-137, -120, -40, 40, 120])
def test_scaling_a_matrix_scales_only_its_scales(exponent: int) -> None:
    """A matrix times a power of two has the same codes, and scales times that power."""
    weights = torch.randn(40, 128, generator=torch.Generator().manual_seed(1)).half().float()
    sized = (weights.double() * 2.0**exponent).float()
    found, plain = packed(sized, "int8"), packed(weights, "int8")
    if exponent > -126:
        assert (found.codes == plain.codes).all()
        assert (found.scales == plain.scales * numpy.float64(2.0) ** exponent).all()
    assert (found.weights() - sized).abs().max() <= 2.0**exponent / 16


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("precision", ["float32", "int8", "int4"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_makes_its_output_nan(
    precision: Precision, wrong: float, instructions: str
) -> None:
    _, weights = stored("Q4_0")
    weights[50, 77] = wrong
    x = torch.randn(3, weights.size(1), generator=torch.Generator().manual_seed(1))
    out = multiplied(PackedNetwork(load_library(instructions), LLAMA, precision), linear_of(weights), x)
    assert (out.isfinite().all(0) == (torch.arange(77) != 50)).all()


@pytest.mark.parametrize(
    ("kinds", "precision", "format", "exactly"),
    [
        (("Q4_0", "Q8_0"), "int4", INT8, True),
        (("Q4_0", "Q5_0"), "int8", INT8, True),
        (("Q4_0", "Q4_1"), "int4", INT4_SHIFTED, False),
        (("Q4_1", "Q5_1"), "int4", INT8_SHIFTED, True),
        (("Q4_1", "Q8_0"), "int4", INT8, False),
        (("Q4_K", "Q6_K"), "int4", INT8, False),
        (("Q5_K", "Q8_0"), "int8", INT8, False),
    ],
)
def test_matrices_of_several_kinds_share_a_format(
    kinds: tuple[str, str], precision: Precision, format: int, exactly: bool
) -> None:
    """The shared format holds both kinds. If there is none, all are rounded to 8 bits."""
    both = [stored(kind)[1] for kind in kinds]
    pack = PackedNetwork(load_library(SETS[0]), LLAMA, precision)
    found = unpacked(pack.pack_linear([linear_of(each) for each in both]), 154, 256)
    weights = torch.cat(both)
    assert found.format == format
    assert torch.equal(found.weights(), weights) == exactly
    assert (groups_of(found.weights() - weights).abs().amax(-1) <= torch.from_numpy(found.scales) / 2 * 1.0001).all()


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_format_is_estimated_before_packing(kind: str, precision: Precision) -> None:
    estimated = WEIGHT_BITS[estimate.STORED_BITS.get(kind, INT8)]
    taken = WEIGHT_BITS[packed(stored(kind)[1], precision).format]
    assert taken == (int8_bits(estimated) if precision == "int8" else estimated)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0"])
def test_blocks_without_their_largest_code_are_packed_exactly(kind: str) -> None:
    """A scale that a quantiser searched for may have either sign, and a block may lack the largest code."""
    raw = gguf_files.random_blocks(kind, 64, 256)
    raw.reshape(-1, 22 if kind == "Q5_0" else 18)[::3, 1] ^= 0x80
    weights = torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind]).astype(numpy.float32)).view(64, 256)
    found = packed(weights, "int8")
    assert found.format == INT8
    assert torch.equal(found.weights(), weights)


def test_what_the_compiled_step_cannot_compute_is_named() -> None:
    for changes, reason in (
        ({"position": "relative"}, "keys and values depend on distances"),
        ({"position": "bias", "distances": 8}, "a bias by distance"),
        ({"shared": True, "opening_norm": False}, "except for the first norm"),
        ({"has_cross_attention": True}, "cross-attention"),
        ({"shared": True, "position": "alibi", "embedding_width": 16}, ""),
    ):
        found = unsupported_reason(replace(LLAMA, **changes))  # type: ignore[arg-type]
        assert reason in found
        assert bool(reason) == bool(found)


def packed_bits(linear: nn.Linear, precision: Precision, instructions: str) -> tuple[int, float, bytes]:
    """Format, unit and all bytes of a packed matrix."""
    pack = PackedNetwork(load_library(instructions), LLAMA, precision, threads=2)
    packed = pack.pack_linear([linear])
    return packed.format, packed.unit, b"".join(array.tobytes() for array in pack.arrays)


def varied_blocks(kind: str, style: str) -> NDArray[numpy.uint8]:
    """Blocks [77, bytes] in which the search of a scale goes other ways than in random ones."""
    size, choice = BLOCK_KINDS[kind].size, numpy.random.default_rng(0)
    raw = gguf_files.random_blocks(kind, 77, 512).reshape(-1, size).copy()
    scales = raw[:, :2].copy().view(numpy.float16)
    if style == "few codes":
        few = numpy.array([0x88, 0xF8, 0x1F, 0x44, 0x77, 0x99, 0xFF, 0x11], numpy.uint8)
        raw[:, -16:] = choice.choice(few, (len(raw), 16))
    elif style == "negative scales":
        raw[:, :2] = (-scales).view(numpy.uint8)
    elif style == "small scales":
        factors = choice.choice([0, 1e-6, 1e-3, 1], scales.shape)
        raw[:, :2] = (scales * factors).astype(numpy.float16).view(numpy.uint8)
    return raw.reshape(77, -1)


@pytest.mark.parametrize("precision", ["int4", "int8", "float32"])
@pytest.mark.parametrize(
    ("kind", "style"),
    [(kind, "random") for kind in BLOCK_KINDS]
    + [(kind, style) for kind in OWN_FORMATS for style in ("few codes", "negative scales", "small scales")],
)
def test_blocks_are_packed_to_the_bits_of_their_floats(kind: str, style: str, precision: Precision) -> None:
    """What is known from a block's own codes is what a search in its floats finds."""
    raw = varied_blocks(kind, style)
    weights = torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind]).astype(numpy.float32))
    blocks = nn.Linear(1, 1, bias=False)
    blocks.weight = BlockWeights(torch.from_numpy(raw), kind)
    for instructions in SETS:
        assert packed_bits(blocks, precision, instructions) == packed_bits(linear_of(weights), precision, instructions)


def test_floats_and_blocks_are_packed_as_one_matrix() -> None:
    """As where queries are stored in another format than values; the token table is decoded to the same numbers."""
    raw = gguf_files.random_blocks("Q5_K", 5000, 256)
    weights = torch.from_numpy(dequantize(raw, GGMLQuantizationType["Q5_K"]))
    blocks, plain = nn.Linear(1, 1, bias=False), linear_of(torch.randn(40, 256))
    blocks.weight = BlockWeights(torch.from_numpy(raw), "Q5_K")
    found: list[list[bytes]] = []
    for stored in (blocks, linear_of(weights)):
        pack = PackedNetwork(load_library(SETS[0]), LLAMA, "int4", threads=2)
        pack.pack_linear([plain, stored, plain])
        pack.pack_table(stored.weight)
        found.append([array.tobytes() for array in pack.arrays])
    assert found[0] == found[1]


class CountingLibrary:
    """The compiled library, which notes how many weights each call packs; a turn starts a new list."""

    def __init__(self) -> None:
        self.library, self.turns = load_library(SETS[0]), [list[int]()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name)

    def polyhead_pack(self, source: Any, outputs: int, inputs: int, k: int, *rest: Any) -> Any:
        self.turns[-1].append(outputs * k)
        return self.library.polyhead_pack(source, outputs, inputs, k, *rest)

    def yield_turn(self) -> None:
        self.turns.append([])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("precision", ["int4", "int8", "float32"])
@pytest.mark.parametrize("shape", [(2, 2560), (600, 256), (77, 1024)])  # long rows, many rows
def test_others_may_compute_between_pieces_of_a_matrix(
    shape: tuple[int, int], precision: Precision, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its shape, so many weights are packed between two turns at most, to the same bits as in one piece."""
    blocks, plain = nn.Linear(1, 1, bias=False), linear_of(torch.randn(shape))
    blocks.weight = BlockWeights(torch.from_numpy(gguf_files.random_blocks("Q4_K", *shape)).view(shape[0], -1), "Q4_K")
    found: list[tuple[int, float, bytes]] = []
    for is_whole in (True, False):
        if not is_whole:
            monkeypatch.setattr(packed_network, "PIECE_NUMBERS", 1 << 13)
            monkeypatch.setattr(packed_network, "TURN_NUMBERS", 1 << 14)
        library: Any = CountingLibrary()
        pack = PackedNetwork(library, LLAMA, precision, threads, library.yield_turn)
        made = pack.pack_linear([plain, blocks])
        pack.pack_table(plain.weight)
        found.append((made.format, made.unit, b"".join(array.tobytes() for array in pack.arrays)))
    assert found[0] == found[1]
    assert max(map(max, filter(None, library.turns))) <= 1 << 13
    assert max(map(sum, library.turns)) < (1 << 14) + (threads << 13)
    assert len(library.turns) > sum(map(sum, library.turns)) / ((1 << 14) + (threads << 13))
