"""Packs a torch network for the compiled step: packed weights, and a Plan structure that points to them.

Linear layers with the same input (query, key, value and the gate of attention; the parts of a recurrent mixer; gate and
up) are packed as one matrix, so a layer has at most four products.
"""

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..core.turns import YieldTurn, iterate_by_parts, keep_turn
from ..executors.bounds import TABLE_POSITIONS
from ..network.attention import Attention
from ..network.experts import MixtureOfExperts, MixtureWithOwnNorms
from ..network.heads import LanguageHead
from ..network.mlp import MLP
from ..network.model_config import ExpertConfig, MixerConfig, MixerName, ModelConfig
from ..network.positions import LearnedPositions, LinearBias, Rotary, SinusoidalPositions
from ..network.recurrent_mixers import DeltaNet, RecurrentMixer, ShortConvolution, StateSpace
from ..network.transformer import PreBlock, SandwichBlock, ScaledSandwichBlock, Transformer
from .block_weights import BlockWeights
from .large_pages import PageAllocator
from .library import (
    BLOCK_KINDS,
    FLOATS,
    Expert,
    Layer,
    Linear,
    Mixture,
    Norm,
    Plan,
    Recurrence,
    RecurrentWeights,
    Routing,
    SourceStruct,
)

Precision = Literal["float32", "int8", "int4"]
FLOAT32, INT8, INT4, INT4_SHIFTED, INT8_SHIFTED, INT8_WIDE = range(6)  # formats of weights, as in src/gemm.hpp
WEIGHT_BITS = (32, 8.5, 4.5, 5, 9, 8.25)  # of a weight in each format, scales included
TABLE_FORMATS = (FLOAT32, INT8)  # formats of a tied output matrix that also serve as the embedding table
INT8_FORMATS = (INT8, INT8_SHIFTED)  # formats tried for 8-bit weights; any others are rounded (rounded_format)
PRECISION_FORMATS: dict[Precision, tuple[int, ...]] = {
    "float32": (FLOAT32,),
    "int8": INT8_FORMATS,
    "int4": (INT4, INT4_SHIFTED, *INT8_FORMATS),
}
MIXER_CODES: dict[MixerName, int] = {"attention": 0, "convolution": 1, "state_space": 2, "delta": 3, "none": 4}
NORM_ORDER_CODES = {"pre": 0, "post": 1, "sandwich": 2, "inner": 3, "parallel": 4}
NORM_CODES = {"layer": 0, "rms": 1}
HEAD_NORM_CODES = {"": 0, "shared": 0, "per_head": 1, "joint": 2}
GLOBAL_CODES = {"": 0, "first": 1, "before_separator": 2, "after_separator": 3}
ACTIVATION_CODES = {"gelu": 0, "gelu_tanh": 1, "silu": 2, "relu": 3, "relu_squared": 4, "gelu_sigmoid": 5}
# The linear layers that are packed as the input product of attention; a network has some of them.
PACKED_ATTENTION = (
    *("attention.query", "attention.global_query", "attention.key", "attention.global_key"),
    *("attention.value", "attention.global_value", "attention.gate"),
)
COLUMNS, HALF, PADDING, WIDE = 32, 16, 64, 64  # as in src/gemm.hpp
BLOCK_TOKENS = 16  # tokens, as in src/attention.hpp
RUN_BLOCKS = 16  # blocks, as in src/step.cpp
TILE = 32  # columns of a state, as in src/recurrent.hpp
TABLE_ROWS = 4096  # of token embeddings that are decoded at a time, at most
PIECE_NUMBERS = 1 << 20  # weights that one thread packs at a time, in 5 to 50 ms
TURN_NUMBERS = 1 << 21  # weights that are packed before others may compute
PIECE_INPUTS = 1 << 8  # inputs of a piece of very long rows are a multiple of this: blocks of a file stay whole

T = TypeVar("T")
R = TypeVar("R")
Array = NDArray[Any]
# Inside the context, a part of the network has its weights.
LoadPart = Callable[[nn.Module], AbstractContextManager[object]]


@dataclass(frozen=True)
class PackHooks:
    """What is called while a network is packed. Each part of it is packed inside `load_part(part)`; `yield_turn`, which
    may let others compute, is called whenever a few million weights are packed.
    """

    load_part: LoadPart = nullcontext
    yield_turn: YieldTurn = keep_turn


def unsupported_reason(config: ModelConfig) -> str:
    """Why the compiled step cannot compute such a network; empty if it can."""
    reasons = (
        (config.static, "its states are embeddings, with no layers above them"),
        (config.position == "relative", "its keys and values depend on distances"),
        (config.distances, "its scores have a bias by distance"),
        (config.experts is not None and config.experts.scoring == "sparse_mixer", "its router is a sparse mixer"),
        (config.experts is not None and config.experts.shared_scale != 1.0, "its shared expert's output is scaled"),
        (config.experts is not None and config.experts.chosen_by_logits, "its experts are chosen by their logits"),
        (config.experts is not None and config.experts.output_norm, "the output of its experts is normed"),
        (config.experts is not None and config.experts.weighs_input, "the inputs of its experts are weighted"),
        (config.activation == "xielu", "its activation has learned slopes"),
        (config.logit_dense, "its head has a dense layer before the output matrix"),
        (config.latent is not None, "its attention is latent"),
        (config.qkv_limit, "its queries, keys and values are clamped"),
        (config.bottleneck, "a narrow MLP follows that of each layer"),
        (config.convolution, "a convolution is beside its first layer"),
        (config.shared and not config.opening_norm, "its layers share their weights except for the first norm"),
        (config.has_cross_attention, "its layers have cross-attention"),
        (config.norm_after_rotation, "its queries and keys are normed after their rotation"),
        (config.hides_rows, "its queries end in tokens that no token attends to"),
        (config.position_last, "its positions are added after the norm or the projection of the embeddings"),
        (config.output_width, f"its states are {config.output_width} wide, its layers {config.width}"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def rounded_format(config: ModelConfig) -> int:
    """The format of 8 bits to which weights are rounded that no narrow format stores exactly.

    Networks in both directions use INT8_WIDE, where a scale serves more weights and inputs: products take a fifth less
    time, and vectors stay nearer to float32's than with one scale for a whole row. Predictions of the next token keep
    the finer scales. So do networks whose widths are no multiples of WIDE: their matrices are saved in groups of 32
    (models.checkpoint.save_folder).
    """
    experts = (config.experts.width, config.experts.shared_width) if config.experts else ()
    widths = config.width, config.heads * config.head_width, config.mlp_width, config.embedding_width, *experts
    return INT8 if config.causal or any(width % WIDE for width in widths) else INT8_WIDE


class PackedNetwork:
    """A Plan, and everything it points to. `threads` share the work of packing; `yield_turn`: see PackHooks."""

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        precision: Precision,
        threads: int = 1,
        yield_turn: YieldTurn = keep_turn,
    ) -> None:
        self.library, self.config, self.precision, self.threads = library, config, precision, threads
        self._yield_turn, self._worked = yield_turn, 0  # weights since others could compute
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="pack")
        self.formats = PRECISION_FORMATS[precision]
        self.plan = Plan()
        self.memory = PageAllocator()
        self.arrays: list[Any] = []
        self.weight_bytes = 0
        self.token_table: Array = np.empty(0, np.float32)  # embeddings, where they are not in the output matrix

    def pack_floats(self, values: Tensor | None, padding: int = PADDING) -> int:
        """The address of [.., n] float32 numbers, padded with zeros; 0 for None."""
        if values is None:
            return 0
        count = values.numel()
        out = self.memory.zeros(-(-count // padding) * padding, np.float32)
        flat = values.detach().reshape(-1)
        for first in range(0, count, PIECE_NUMBERS):
            some = flat[first : first + PIECE_NUMBERS]
            out[first : first + len(some)] = some.float().numpy(force=True)
            self._count_work(len(some))
        return self._keep_array(out)

    def _count_work(self, numbers: int) -> None:
        """Let others compute, if so many weights were packed since they could."""
        self._worked += numbers
        if self._worked >= TURN_NUMBERS:
            self._worked = 0
            self._yield_turn()

    def _work(self, function: Callable[[T], R], pieces: Iterable[T], numbers: Callable[[T], int]) -> Iterator[R]:
        """The results for all pieces, computed by all threads, with turns for others; `numbers`: weights of a piece."""
        left = iter(pieces)
        while some := list(islice(left, self.threads)):
            found = list(self.pool.map(function, some))  # waits for all threads
            self._count_work(sum(map(numbers, some)))
            yield from found

    def pack_norm(self, module: nn.Module | None) -> Norm:
        if not isinstance(module, nn.LayerNorm | nn.RMSNorm):
            return Norm()
        shape = module.normalized_shape
        weight = torch.ones(shape) if module.weight is None else module.weight
        bias = getattr(module, "bias", None)
        if bias is None and isinstance(module, nn.LayerNorm):
            bias = torch.zeros(shape)
        return Norm(self.pack_floats(weight), self.pack_floats(bias))

    def pack_head_norm(self, module: nn.Module) -> Norm:
        """The norm of queries or keys, whose weight has the shape that ModelConfig.query_key_norm says."""
        if not self.config.query_key_norm:
            return Norm()
        weight, bias = cast(Tensor, module.weight), cast("Tensor | None", getattr(module, "bias", None))
        if bias is None and self.config.norm == "layer":
            bias = torch.zeros(weight.shape)
        return Norm(self.pack_floats(weight), self.pack_floats(bias))

    def pack_table(self, weight: Tensor) -> Array:
        """Embeddings of tokens: bfloat16 if weights are narrow."""
        narrow, inputs = self.precision != "float32", input_count(weight)
        out = self.memory.zeros(len(weight) * inputs, np.int16 if narrow else np.float32)
        kept = torch.from_numpy(out)
        table = (kept.view(torch.bfloat16) if narrow else kept).view(-1, inputs)

        rows = min(max(PIECE_NUMBERS // max(inputs, 1), 1), TABLE_ROWS)

        @torch.inference_mode()
        def fill(first: int) -> None:
            table[first : first + rows].copy_(self._floats(weight, first, first + rows))

        list(self._work(fill, range(0, len(weight), rows), lambda _: rows * inputs))
        self._keep_array(out)
        return out

    def _floats(self, weight: Tensor, first: int, last: int) -> Tensor:
        """Rows [first, last) of a matrix, whatever it is stored as."""
        rows = weight.detach()[first:last]
        if not isinstance(weight, BlockWeights):
            return rows
        kind, out = BLOCK_KINDS[weight.kind], torch.empty(len(rows), weight.inputs)
        self.library.polyhead_decode(kind.code, rows.data_ptr(), rows.numel() // kind.size, out.data_ptr())
        return out

    def pack_linear(
        self, modules: list[nn.Linear], gated: bool = False, formats: tuple[int, ...] | None = None
    ) -> Linear:
        """Several linear layers packed as one; `gated`: two, whose outputs alternate by HALF. `formats`: None for those
        of the network's precision."""
        weights = [
            weight if isinstance(weight, BlockWeights) else weight.detach().float().cpu().contiguous()
            for weight in (module.weight for module in modules)
        ]
        rows = StoredRows.of(weights, gated)
        format, unit, out = self._choose_format(rows, weights, self.formats if formats is None else formats)
        return Linear(
            weights=self._keep_array(out),
            bias=self._pack_bias(modules, gated, len(rows.addresses)),
            inputs=rows.padded_inputs,
            outputs=len(rows.addresses),
            format=format,
            unit=unit,
        )

    def _largest_magnitude(self, weight: Tensor) -> float:
        """The largest magnitude, computed without a copy of the matrix; NaN if one of the weights is."""
        flat = weight.detach().reshape(-1)
        if isinstance(weight, BlockWeights):
            kind = BLOCK_KINDS[weight.kind]
            size = PIECE_NUMBERS // kind.numbers * kind.size

            def share(some: Tensor) -> float:
                return float(self.library.polyhead_largest(kind.code, some.data_ptr(), some.numel() // kind.size))

        else:
            size = PIECE_NUMBERS

            def share(some: Tensor) -> float:
                return max(map(abs, map(float, some.aminmax())))

        found = list(self._work(share, torch.split(flat, size) if len(flat) else (), lambda _: PIECE_NUMBERS))
        return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)

    def _choose_format(
        self, rows: "StoredRows", weights: Sequence[Tensor], formats: tuple[int, ...]
    ) -> tuple[int, float, Array]:
        """The format, the unit of its scales and the packed weights: the smallest of `formats` that stores them
        exactly, else the format that rounds them. FLOAT32 stores any weights."""
        if FLOAT32 in formats:
            return FLOAT32, 1.0, self._pack(rows, FLOAT32, 1.0, only_found=False)[0]
        unit = 1.0  # INT8 alone has another
        for format in sorted(
            formats, key=WEIGHT_BITS.__getitem__
        ):  # each overwrites the whole result of the one before
            if format == INT8:
                unit = scale_unit(max(map(self._largest_magnitude, weights)))
            out, found = self._pack(rows, format, unit, only_found=True)
            if found:
                return format, unit, out
            self.memory.release_last(out)
        format = rounded_format(self.config)
        return format, unit, self._pack(rows, format, unit, only_found=False)[0]

    def _pack(self, rows: "StoredRows", format: int, unit: float, *, only_found: bool) -> tuple[Array, bool]:
        """Packed weights, each thread packing a piece at a time, and whether they are stored exactly. With
        `only_found` they are invalid if they are not."""
        k, blocks = rows.padded_inputs, len(rows.addresses) // COLUMNS
        out = self.memory.zeros(int(len(rows.addresses) * k * WEIGHT_BITS[format] / 8), np.uint8)

        def pack(piece: PackPiece) -> bool:
            first, last = piece.inputs.start, piece.inputs.stop
            place = out[(len(out) * piece.blocks.start + len(out) * first // k) // blocks :].ctypes.data
            some = rows.select(slice(piece.blocks.start * COLUMNS, piece.blocks.stop * COLUMNS), first)
            source = SourceStruct(some.addresses.ctypes.data, some.kinds.ctypes.data)
            sizes = len(some.addresses), min(rows.inputs, last) - first, last - first
            return bool(self.library.polyhead_pack(ctypes.byref(source), *sizes, format, unit, only_found, place))

        found = True
        for is_exact in self._work(pack, cut_pieces(blocks, k, self.threads), PackPiece.weight_count):
            found &= is_exact
            if only_found and not found:
                break
        return out, found

    def _pack_bias(self, modules: list[nn.Linear], gated: bool, outputs: int) -> int:
        if all(module.bias is None for module in modules):
            return 0
        biases = [torch.zeros(module.out_features) if module.bias is None else module.bias for module in modules]
        values = [bias.detach().float().numpy(force=True) for bias in biases]
        ordered = interleave(values) if gated else np.concatenate(values)
        return self.pack_floats(torch.from_numpy(np.pad(ordered, (0, outputs - len(ordered)))), COLUMNS)

    def _keep_array(self, array: NDArray[np.generic]) -> int:
        self.arrays.append(array)
        self.weight_bytes += array.nbytes
        return array.ctypes.data


@dataclass(frozen=True)
class StoredRows:
    """The rows of matrices that are packed as one, padded to whole blocks of COLUMNS outputs: the address of each row's
    weights, 0 for padding, and how it is stored (BLOCK_KINDS, or FLOATS). The matrices must outlive it."""

    addresses: NDArray[np.uint64]
    kinds: NDArray[np.uint8]
    inputs: int

    @classmethod
    def of(cls, weights: Sequence[Tensor], gated: bool) -> "StoredRows":
        [inputs] = {input_count(weight) for weight in weights}
        addresses, kinds = [], []
        for weight in weights:
            stride = np.uint64(weight.stride(0) * weight.element_size())
            addresses.append(np.uint64(weight.data_ptr()) + np.arange(len(weight), dtype=np.uint64) * stride)
            code = BLOCK_KINDS[weight.kind].code if isinstance(weight, BlockWeights) else FLOATS
            kinds.append(np.full(len(weight), code, np.uint8))
        ordered, kind = (interleave(each) if gated else np.concatenate(each) for each in (addresses, kinds))
        padding = 0, -len(ordered) % COLUMNS
        return cls(np.pad(ordered, padding), np.pad(kind, padding), inputs)

    @property
    def padded_inputs(self) -> int:
        return -(-self.inputs // PADDING) * PADDING

    def select(self, rows: slice, first: int) -> "StoredRows":
        """Some of the rows, from input `first` on, which is a multiple of PIECE_INPUTS."""
        addresses, kinds = self.addresses[rows], self.kinds[rows]
        if first:
            skipped = np.zeros(len(BLOCK_KINDS) + 1, np.uint64)
            skipped[FLOATS] = first * np.dtype(np.float32).itemsize
            for kind in BLOCK_KINDS.values():
                skipped[kind.code] = first // kind.numbers * kind.size
            addresses = np.where(addresses == 0, addresses, addresses + skipped[kinds])
        return StoredRows(addresses, kinds, self.inputs - first)


class PackPiece(NamedTuple):
    """Weights that one thread packs: blocks of COLUMNS outputs, and of their inputs all, or a range of one block's."""

    blocks: range
    inputs: range

    def weight_count(self) -> int:
        return len(self.blocks) * COLUMNS * len(self.inputs)


def cut_pieces(blocks: int, inputs: int, threads: int) -> Iterator[PackPiece]:
    """Pieces of PIECE_NUMBERS weights at most, and so many that all threads have one."""
    longest = max(PIECE_NUMBERS // COLUMNS // PIECE_INPUTS, 1) * PIECE_INPUTS
    span = max(inputs if inputs * COLUMNS <= PIECE_NUMBERS else longest, 1)
    height = max(min(PIECE_NUMBERS // (COLUMNS * span), -(-blocks // threads)), 1)
    for block in range(0, blocks, height):
        for first in range(0, inputs, span):
            yield PackPiece(range(block, min(block + height, blocks)), range(first, min(first + span, inputs)))


def input_count(weight: Tensor) -> int:
    """K of a matrix [N, K], whatever it is stored as."""
    return weight.inputs if isinstance(weight, BlockWeights) else weight.size(1)


def scale_unit(most: float) -> float:
    """A power of two as the unit of group scales, so that scales fit half precision with full digits, unless they are
    smaller than the largest by 2^23.

    `most` is the largest magnitude of all weights. The inverse of a unit is a float32 too.
    """
    return 2.0 ** max(math.frexp(most)[1] - 17, -126) if math.isfinite(most) and most > 0 else 1.0


def interleave(two: list[Array]) -> Array:
    """HALF of the first, HALF of the second, and so on; the last block is padded with zeros."""
    halves = [np.pad(values, (0, -len(values) % HALF)).reshape(-1, HALF) for values in two]
    return np.concatenate(halves, 1).ravel()


def pack_network(
    pack: PackedNetwork, network: Transformer, head: LanguageHead | None, load_part: LoadPart
) -> PackedNetwork:
    """Pack the whole network, one part after the other, each inside `load_part(part)`."""
    plan = pack.plan
    fill_plan(plan, network.config, head is not None)
    plan.narrow = pack.precision != "float32"
    tied = head is not None and head.output.weight is network.tokens.weight
    with load_part(network.tokens), load_part(head) if head is not None and tied else nullcontext():
        if head is not None and tied:  # its matrix is loaded, a bias of its own is not
            plan.head = pack.pack_linear([head.output])
        if plan.head.format not in TABLE_FORMATS or not tied:
            pack.token_table = pack.pack_table(network.tokens.weight)
            plan.tokens = pack.token_table.ctypes.data
    if network.layer_embedding is not None:
        with load_part(network.layer_embedding):
            plan.layer_tokens = pack.pack_table(network.layer_embedding.table.weight).ctypes.data
            plan.layer_projection = pack.pack_linear([network.layer_embedding.projection])
            plan.layer_norm = pack.pack_norm(network.layer_embedding.norm)
    if head is not None and not tied:
        with load_part(head):
            plan.head = pack.pack_linear([head.output])
    layers: list[Layer] = []
    rotations = [pack_rotation(pack, cast(Rotary, rotary)) for rotary in network.rotaries]
    for block in network.blocks:
        same = layers[0] if layers and network.config.shared else None
        # Experts are loaded, packed and freed one after the other: together they may be larger than the packed network.
        experts = pack_experts(pack, cast(PreBlock, block), load_part) if same is None else []
        with load_part(block) if same is None else nullcontext():
            layers.append(pack_layer(pack, cast(PreBlock, block), rotations, same))
            if experts:
                layers[-1].mixture = pack_mixture(pack, cast(MixtureOfExperts, block.mlp), experts)
    array = (Layer * len(layers))(*layers)
    pack.arrays.append(array)
    plan.layers = array
    with load_part(network.outer_parts()):
        if isinstance(network.position, LearnedPositions):
            plan.positions = pack.pack_floats(network.position.table.weight)
        if isinstance(network.position, SinusoidalPositions):
            plan.positions = pack.pack_floats(network.position.table)
        if isinstance(network.distances, LinearBias):
            plan.rates = pack.pack_floats(network.distances.rates)
        if isinstance(network.projection, nn.Linear):
            plan.projection = pack.pack_linear([network.projection])
        if network.segments is not None:
            plan.segments = pack.pack_floats(network.segments.weight)
        plan.embedding_norm, plan.final_norm = (
            pack.pack_norm(network.embedding_norm),
            pack.pack_norm(network.final_norm),
        )
    pack.pool.shutdown()
    return pack


def fill_plan(plan: Plan, config: ModelConfig, generates: bool) -> None:
    """Set the fields of a Plan that are no addresses and follow from the configuration."""
    for name in ("width", "depth", "heads", "mlp_width", "causal", "layer_embedding"):
        setattr(plan, name, int(getattr(config, name)))
    for name in ("embedding_scale", "score_cap", "residual_scale", "logit_scale", "logit_cap"):
        setattr(plan, name, getattr(config, name))
    plan.norm, plan.activation = NORM_CODES[config.norm], ACTIVATION_CODES[config.activation]
    plan.gated, plan.generates, plan.vocab_size = config.gated_mlp, generates, config.vocab_size
    plan.position_count = config.max_positions if config.position in TABLE_POSITIONS else 0
    plan.position_offset = config.position_offset if config.position in TABLE_POSITIONS else 0
    plan.segment_count, plan.embedding_width = config.segments, config.embedding_width or config.width
    plan.rotary_width, plan.head_norms = rotary_width(config), HEAD_NORM_CODES[config.query_key_norm]
    plan.global_tokens, plan.separator = GLOBAL_CODES[config.global_tokens], config.separator
    plan.eps = config.norm_eps
    if config.experts is not None:
        fill_routing(plan.routing, config.experts)
    if config.recurrent is not None:
        fill_recurrence(plan.recurrence, config.recurrent)


def fill_recurrence(recurrence: Recurrence, config: MixerConfig) -> None:
    """Set the fields that all recurrent layers have in common."""
    for name in ("kernel", "heads", "head_width", "key_heads", "key_width", "norm_groups", "gate_first"):
        setattr(recurrence, name, int(getattr(config, name)))
    recurrence.norm_eps, recurrence.update_scale = config.norm_eps, config.update_scale
    recurrence.least_step, recurrence.most_step = config.step_limits


def fill_routing(routing: Routing, experts: ExpertConfig) -> None:
    """Set the fields of the choice of experts."""
    for name in ("count", "chosen", "groups", "chosen_groups", "normalised", "shared_gate"):
        setattr(routing, name, int(getattr(experts, name)))
    for name in ("normalised_eps", "scale", "clamp"):
        setattr(routing, name, getattr(experts, name))
    routing.logistic, routing.shared = experts.scoring == "sigmoid", bool(experts.shared_width)


def rotary_width(config: ModelConfig) -> int:
    """The number of features of a head that are rotated, in layers that rotate."""
    if config.position != "rotary":
        return 0
    width = config.rotary_width or config.head_width
    assert width <= config.head_width, "description.invalid_fields has refused it"
    return width


def free_weights(module: nn.Module, yield_turn: YieldTurn = keep_turn) -> None:
    """Free the weights of a module that are no longer read."""
    for parameter in iterate_by_parts(module.parameters(), yield_turn):
        parameter.data = torch.empty(0)


def pack_rotation(pack: PackedNetwork, rotary: Rotary) -> tuple[int, float]:
    """The address of a rotation's frequencies, and its magnitude."""
    magnitude = 1.0 if rotary.scaling is None else rotary.scaling.magnitude
    return pack.pack_floats(rotary.frequency), magnitude


def pack_layer(pack: PackedNetwork, block: PreBlock, rotations: list[tuple[int, float]], same: Layer | None) -> Layer:
    """`rotations` are those of full and of windowed layers, or one for all; `same` is a layer with the same weights."""
    config = pack.config
    windowed = config.is_windowed(block.layer)
    layer = pack_weights(pack, block) if same is None else Layer.from_buffer_copy(same)
    layer.order = NORM_ORDER_CODES["pre" if has_pre_norms(config, block.layer) else config.norm_order]
    layer.frequencies, layer.magnitude = None, 1.0
    if rotations and config.is_rotated(block.layer):
        layer.frequencies, layer.magnitude = rotations[-1] if windowed else rotations[0]
    layer.window = config.window if windowed else 0
    own = config.of_layer(block.layer)
    layer.kv_heads = own.kv_heads * (2 if config.global_tokens else 1)  # those of both projections
    layer.head_width, layer.rotary_width = own.head_width, rotary_width(own)
    layer.key_layer, layer.tied_values = config.key_layer(block.layer), config.has_tied_values(block.layer)
    layer.score_scale = config.score_scale or own.head_width**-0.5
    return layer


def pack_weights(pack: PackedNetwork, block: PreBlock) -> Layer:
    """The fields of a layer that depend on its weights."""
    parts = dict(block.named_children())  # a layer may have only a mixer or only an MLP
    mixer, mlp = parts.get("attention"), parts.get("mlp")
    layer = Layer(
        attention_norm=pack.pack_norm(parts.get("attention_norm")), mlp_norm=pack.pack_norm(parts.get("mlp_norm"))
    )
    layer.mixer = MIXER_CODES[pack.config.mixer(block.layer)]
    if isinstance(block, SandwichBlock):
        layer.attention_post_norm = pack.pack_norm(block.attention_post_norm)
        layer.mlp_post_norm = pack.pack_norm(block.mlp_post_norm)
    layer.output_scale = 1.0
    if isinstance(block, ScaledSandwichBlock):
        layer.output_scale = 1.0 if block.scale is None else float(block.scale.detach())
    if isinstance(block, ScaledSandwichBlock) and block.reads_inputs:
        layer.input_gate, layer.input_up = pack.pack_linear([block.input_gate]), pack.pack_linear([block.input_up])
        layer.input_norm = pack.pack_norm(block.input_norm)
    if isinstance(mixer, Attention):
        if pack.config.value_norm and mixer.key is not None:
            layer.value_norm = Norm(pack.pack_floats(torch.ones(mixer.config.head_width)), None)
        layer.query_norm = pack.pack_head_norm(mixer.query_norm)
        layer.key_norm = Norm() if mixer.key is None else pack.pack_head_norm(mixer.key_norm)
        layer.sinks = pack.pack_floats(getattr(mixer, "sinks", None))
        read = [getattr(mixer, name.removeprefix("attention."), None) for name in PACKED_ATTENTION]
        layer.input = pack.pack_linear([part for part in read if part is not None])
        layer.gated = int(mixer.gate is not None)
        layer.output = pack.pack_linear([mixer.output])
    if isinstance(mixer, RecurrentMixer):
        layer.input, layer.recurrent = pack_recurrent(pack, mixer)
        layer.output = pack.pack_linear([mixer.output])
    if isinstance(mlp, MLP):
        layer.up, layer.down = pack_mlp(pack, mlp)
    return layer


def has_pre_norms(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has a norm before each of its parts, whatever the others have."""
    recurrent = config.recurrent is not None and config.recurrent.is_pre_norm and config.mixer(layer) != "attention"
    return recurrent or config.mixer(layer) == "none" or not config.has_mlp(layer)


def pack_recurrent(pack: PackedNetwork, mixer: RecurrentMixer) -> tuple[Linear, RecurrentWeights]:
    """The input product of a recurrent mixer, and its parameters."""
    config, weights = mixer.config, RecurrentWeights()
    values, keys = [config.head_width] * config.heads, [config.key_width] * config.key_heads
    taps_bias: Tensor | None = None
    norm: Tensor | None = None
    if isinstance(mixer, DeltaNet):
        parts = [mixer.query, mixer.key, mixer.value, mixer.gate, mixer.rate, mixer.decay]
        taps = torch.cat((mixer.query_taps, mixer.key_taps, mixer.value_taps))
        widths, norm = keys + keys + values, mixer.norm_weight.repeat(config.heads)
    else:
        assert isinstance(mixer, ShortConvolution | StateSpace)
        parts, taps, taps_bias, norm = [mixer.input], mixer.taps, mixer.taps_bias, getattr(mixer, "norm_weight", None)
        widths = values + keys + keys if isinstance(mixer, StateSpace) else [mixer.output.in_features]
    weights.taps = pack.pack_floats(pad_channels(taps, widths).T)
    weights.taps_bias = pack.pack_floats(None if taps_bias is None else pad_channels(taps_bias, widths))
    if not isinstance(mixer, ShortConvolution):
        weights.rates = pack.pack_floats(-mixer.log_decay.detach().float().exp())
        weights.step_bias, weights.norm = pack.pack_floats(mixer.step_bias), pack.pack_floats(norm)
        weights.skip = pack.pack_floats(getattr(mixer, "skip", None))
    return pack.pack_linear(parts), weights


def pad_channels(values: Tensor, widths: list[int]) -> Tensor:
    """[C, ...] numbers of channels; each head's, of these widths, are padded with zeros to a multiple of TILE."""
    heads = torch.split(values.detach().float(), widths)
    return torch.cat([torch.cat((head, head.new_zeros(-len(head) % TILE, *head.shape[1:]))) for head in heads])


def pack_mlp(pack: PackedNetwork, mlp: MLP) -> tuple[Linear, Linear]:
    """The two products of an MLP."""
    up = pack.pack_linear([mlp.up]) if mlp.gate is None else pack.pack_linear([mlp.gate, mlp.up], gated=True)
    return up, pack.pack_linear([mlp.down])


def pack_experts(pack: PackedNetwork, block: PreBlock, load_part: LoadPart) -> list[Expert]:
    """The experts of a block, the shared one last; an empty list for a block without experts."""
    mixture = getattr(block, "mlp", None)
    if not isinstance(mixture, MixtureOfExperts):
        return []
    packed = []
    for expert in (*mixture.experts, *filter(None, [mixture.shared])):
        with load_part(expert):
            packed.append(Expert(*pack_mlp(pack, cast(MLP, expert))))
    return packed


def scale_inputs(pack: PackedNetwork, linear: nn.Linear, scales: Tensor) -> nn.Linear:
    """The layer with the scales [K] of its inputs in its matrix."""
    scaled = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    weight = pack._floats(linear.weight, 0, linear.out_features).float()
    scaled.weight, scaled.bias = nn.Parameter(weight * scales.detach().float(), requires_grad=False), linear.bias
    return scaled


def pack_mixture(pack: PackedNetwork, mixture: MixtureOfExperts, experts: list[Expert]) -> int:
    """The address of a mixture of packed experts. Its router is always FLOAT32: a rounded score may choose another
    expert. Weights of its input are in its matrix."""
    kept = (Expert * len(experts))(*experts)
    packed = Mixture(experts=kept)
    packed.choice_bias, packed.output_scales = map(pack.pack_floats, (mixture.choice_bias, mixture.output_scales))
    router = [mixture.router, *filter(None, [mixture.shared_gate])]
    if isinstance(mixture, MixtureWithOwnNorms):
        packed.chosen_input, packed.shared_input = map(pack.pack_floats, (mixture.chosen_input, mixture.shared_input))
        packed.chosen_norm, packed.shared_norm = map(pack.pack_norm, (mixture.chosen_norm, mixture.shared_norm))
        router = [scale_inputs(pack, part, mixture.router_input * pack.config.width**-0.5) for part in router]
    packed.router = pack.pack_linear(router, formats=(FLOAT32,))
    pack.arrays += [kept, packed]
    return ctypes.addressof(packed)
