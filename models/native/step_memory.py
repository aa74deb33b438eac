"""The memory of the compiled step, computed from a configuration: weights, a cache block, a state slot, and a step's
intermediate results.

It counts what packed_network.py packs and src/step.cpp allocates; tests/service/runtime/test_memory_budget.py compares
it with measured memory. `bits` gives, by a matrix's name, the bits of a weight when int4 packs it; other matrices are
rounded (packed_network.rounded_format).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..executors.bounds import TABLE_POSITIONS
from ..executors.workspace import LargestStep
from ..network.model_config import ModelConfig
from .packed_network import (
    BLOCK_TOKENS,
    COLUMNS,
    FLOAT32,
    INT4,
    INT4_SHIFTED,
    INT8,
    INT8_SHIFTED,
    PADDING,
    TILE,
    WEIGHT_BITS,
    Precision,
    rounded_format,
)

PANEL_ROWS, SLAB_ROWS = 128, 512  # rows, as in src/step.cpp
SPAN, GROUP = 16, 32  # as in src/gemm.hpp
SCALE_FEATURES = 32  # of a key that share a scale, as in src/attention.hpp
GROWTH = 1.25  # memory is allocated this much larger than needed
FLOAT_BYTES = 4
# The linear layers that are packed as the input product of a mixer; of the others it is one.
INPUT_NAMES: dict[str, tuple[str, ...]] = {
    "attention": ("query", "key", "value", "global_query", "global_key", "global_value"),
    "delta": ("query", "key", "value", "gate", "rate", "decay"),
}
MatrixBits = Mapping[str, float]
TOKENS_WEIGHT, HEAD_WEIGHT = "tokens.weight", "head.output.weight"


def round_up(count: int, to: int = PADDING) -> int:
    return -(-count // to) * to


def weight_bytes(config: ModelConfig, precision: Precision, generates: bool, tied: bool, bits: MatrixBits) -> int:
    """Bytes of packed matrices, tables and norms.

    Token embeddings are read from a tied output matrix if that is FLOAT32 or INT8. If its format depends on its
    numbers, a separate table is assumed for int4, none for int8.
    """
    layers, head = _packed_bytes(config, precision, tied, bits)
    embedded = config.embedding_width or config.width
    table = config.vocab_size * embedded * (FLOAT_BYTES if precision == "float32" else 2)
    known = bits.get(TOKENS_WEIGHT, WEIGHT_BITS[INT4])
    if tied and (precision == "float32" or (int8_bits(known) if precision == "int8" else known) == WEIGHT_BITS[INT8]):
        table = 0
    places = (config.max_positions if config.position in TABLE_POSITIONS else 0) + config.segments
    numbers = 8 * round_up(config.width)
    if config.experts is not None:
        numbers += round_up(config.experts.count)  # biases for the choice
    if config.query_key_norm:
        numbers += 2 * round_up((config.heads + config.kv_heads) * config.head_width)
    if config.value_norm:
        numbers += round_up(config.head_width)
    norms = (config.depth * numbers + _recurrent_numbers(config)) * FLOAT_BYTES
    table += config.vocab_size * config.depth * config.layer_embedding * (FLOAT_BYTES if precision == "float32" else 2)
    return layers + (head if generates else 0) + table + places * embedded * FLOAT_BYTES + norms


def _recurrent_numbers(config: ModelConfig) -> int:
    """Numbers of the parameters of recurrent layers besides their products."""
    recurrent = config.recurrent
    if recurrent is None:
        return 0
    each = 3 * round_up(recurrent.heads) + round_up(recurrent.heads * recurrent.head_width)
    return sum((recurrent.kernel + 1) * _padded_channels(config, layer) + each for layer in config.recurrent_layers)


def loading_bytes(config: ModelConfig, precision: Precision, generates: bool, tied: bool, bits: MatrixBits) -> int:
    """Bytes of the part that is being packed, as read, beyond `weight_bytes`; parts that are packed later are not in
    memory yet.

    The order is that of `pack_network`: tokens, an untied output matrix, blocks. Experts are packed one after the
    other, but a file may store those of a layer as one tensor, which is read whole.
    """
    layers, last = _packed_bytes(config, precision, tied, bits)
    head = last if generates and not tied else 0
    own = max(config.embedding_width or config.width, config.depth * config.layer_embedding)
    vocabulary, block = (
        config.vocab_size * own * FLOAT_BYTES,
        FLOAT_BYTES
        * max(
            sum(each.inputs * each.outputs for each in _packed_shapes(config, layer)) for layer in range(config.depth)
        ),
    )
    return max(vocabulary - layers - head, vocabulary - layers if head else 0, block)


def native_block_bytes(config: ModelConfig, precision: Precision, windowed: bool = False) -> int:
    """Bytes of the keys and values of BLOCK_TOKENS tokens in all layers that have their own, or in the windowed ones
    only."""
    layers = map(config.of_layer, config.windowed_layers if windowed else config.cached_layers)
    return BLOCK_TOKENS * sum(each.kv_heads * _token_bytes(each, precision) for each in layers)


def native_state_bytes(config: ModelConfig) -> int:
    """Bytes of a state slot: the last inputs of each recurrent layer's convolution, and the tiles of its heads."""
    recurrent = config.recurrent
    if recurrent is None:
        return 0
    matrices = recurrent.heads * round_up(recurrent.head_width, TILE) * recurrent.key_width
    numbers = sum(
        (recurrent.kernel - 1) * _padded_channels(config, layer)
        + (0 if config.mixer(layer) == "convolution" else matrices)
        for layer in config.recurrent_layers
    )
    return numbers * FLOAT_BYTES


def workspace_bytes(config: ModelConfig, largest: LargestStep, threads: int, generates: bool) -> int:
    """Bytes of the activations of the largest step, each thread's panel, and the output."""
    shapes = [_mixer_shape(config, layer) for layer in range(config.depth)]
    attended = round_up(max(inner for _, inner in shapes))
    projected = round_up(max(columns + _copied_columns(config, layer) for layer, (columns, _) in enumerate(shapes)))
    width, hidden = round_up(config.width), round_up(max(config.mlp_width, config.layer_embedding))
    computed = largest.rows  # together; without a cache a portion of whole sequences at a time
    if not largest.cached:
        computed = min(computed, PANEL_ROWS * threads + largest.context)
    output_rows = largest.sequences if generates else largest.rows
    embedded = round_up(config.embedding_width)
    convolved = max((_padded_channels(config, layer) for layer in config.recurrent_layers), default=0)
    steps = 0 if config.recurrent is None else 2 * round_up(config.recurrent.heads)
    rows = computed * (width + embedded + attended + projected + convolved + steps + 2 * config.head_width)
    rows += computed * round_up(config.depth * config.layer_embedding, COLUMNS)
    answers = output_rows * (round_up(config.vocab_size, COLUMNS) if generates else config.width)
    answers += min(output_rows, computed) * (width + attended)
    own = 0 if largest.cached else 2 * _local_key_numbers(config) * (computed + BLOCK_TOKENS)
    experts = _expert_numbers(config, computed)
    expert = 0 if config.experts is None else round_up(max(config.experts.width, config.experts.shared_width))
    panel = PANEL_ROWS * (2 * max(width, embedded, attended, hidden, expert) + hidden + width)
    return int((rows + answers + own + experts) * GROWTH + threads * panel) * FLOAT_BYTES


def _local_key_numbers(config: ModelConfig) -> int:
    """Numbers of a token's keys without a cache: of the layers that others read, and of the widest one."""
    again = 2 if config.global_tokens else 1
    sizes = {
        layer: again * each.kv_heads * round_up(each.head_width, SCALE_FEATURES)
        for layer, each in ((layer, config.of_layer(layer)) for layer in config.attention_layers)
    }
    return sum(sizes[layer] for layer in config.read_layers) + max(sizes.values(), default=0)


def _expert_numbers(config: ModelConfig, rows: int) -> int:
    """Numbers of FLOAT_BYTES for the rows of layers with experts: their inputs, scores and choices; and of those that
    are computed together, inner features, their codes and scales, and sums."""
    experts = config.experts
    if experts is None:
        return 0
    width, together = round_up(config.width), min(rows, SLAB_ROWS)
    inner = experts.chosen * round_up(experts.width) + round_up(experts.shared_width)
    choices = 2 * (experts.chosen + bool(experts.shared_width))
    scored = round_up(experts.count + experts.shared_gate, COLUMNS)
    features = inner + inner // FLOAT_BYTES + inner // SPAN + inner // GROUP
    return rows * (width + scored + choices) + together * (features + (2 if experts.own_norms else 1) * width)


def int8_bits(bits: float) -> float:
    """Bits of a weight in int8, from its bits in int4."""
    return {WEIGHT_BITS[INT4]: WEIGHT_BITS[INT8], WEIGHT_BITS[INT4_SHIFTED]: WEIGHT_BITS[INT8_SHIFTED]}.get(bits, bits)


def _token_bytes(config: ModelConfig, precision: Precision) -> int:
    """Bytes of a token's key and value of one head: floats, or codes of 16 and of 8 bits, with a scale for every
    SCALE_FEATURES of a key and one for a value."""
    width = round_up(config.head_width, SCALE_FEATURES)
    return (
        2 * width * FLOAT_BYTES if precision == "float32" else 3 * width + FLOAT_BYTES * (width // SCALE_FEATURES + 1)
    )


@dataclass(frozen=True)
class PackedShape:
    """Matrices of a layer that are packed as one: their names, inputs and outputs. `exact`: always FLOAT32."""

    names: tuple[str, ...]
    inputs: int
    outputs: int
    exact: bool = False


def _mixer_shape(config: ModelConfig, layer: int) -> tuple[int, int]:
    """Outputs of the input product of a layer's mixer, and inputs of its output product."""
    mixer, recurrent, config = config.mixer(layer), config.recurrent, config.of_layer(layer)
    inner, kept = config.heads * config.head_width, config.kv_heads * config.head_width
    if mixer == "attention":
        own = 0 if config.key_layer(layer) != layer else 1 if config.has_tied_values(layer) else 2
        again = 2 if config.global_tokens else 1
        return again * (inner + own * kept) + (inner if config.attention_gate else 0), inner
    if mixer == "none" or recurrent is None:
        return 0, 0
    if mixer == "convolution":
        return 3 * config.width, config.width
    inner = recurrent.heads * recurrent.head_width
    steps = (2 if mixer == "delta" else 1) * recurrent.heads
    return 2 * (inner + recurrent.key_heads * recurrent.key_width) + steps, inner


def _copied_columns(config: ModelConfig, layer: int) -> int:
    """Columns beside the outputs of the input product: values that are copies of a layer's own keys."""
    if config.mixer(layer) != "attention" or config.key_layer(layer) != layer or not config.has_tied_values(layer):
        return 0
    sizes = config.of_layer(layer)
    return sizes.kv_heads * sizes.head_width


def _padded_channels(config: ModelConfig, layer: int) -> int:
    """Channels of the convolution of a recurrent layer, each head's padded."""
    recurrent = config.recurrent
    assert recurrent is not None
    if config.mixer(layer) == "convolution":
        return round_up(config.width, TILE)
    keys = 2 * recurrent.key_heads * round_up(recurrent.key_width, TILE)
    return keys + recurrent.heads * round_up(recurrent.head_width, TILE)


def _packed_shapes(config: ModelConfig, layer: int) -> list[PackedShape]:
    """The packed matrices of a layer."""
    outputs, inner = _mixer_shape(config, layer)
    parts = INPUT_NAMES.get(config.mixer(layer), ("input",))
    if config.mixer(layer) == "attention":
        own = 1 if config.key_layer(layer) != layer else 2 if config.has_tied_values(layer) else 3
        parts = parts if config.global_tokens else parts[:own]
    parts += ("gate",) if config.attention_gate and config.mixer(layer) == "attention" else ()
    mixer = [
        PackedShape(tuple(f"attention.{part}" for part in parts), config.width, outputs),
        PackedShape(("attention.output",), inner, config.width),
    ]
    shapes = [] if config.mixer(layer) == "none" else mixer
    if not config.has_mlp(layer):
        return shapes
    if not config.has_experts(layer):
        return shapes + _mlp_shapes(config, "mlp", config.of_layer(layer).mlp_width) + _layer_input_shapes(config)
    experts = config.experts
    assert experts is not None
    shapes = [*shapes, PackedShape(("mlp.router",), config.width, experts.count + experts.shared_gate, exact=True)]
    for number in range(experts.count):
        shapes += _mlp_shapes(config, f"mlp.experts.{number}", experts.width)
    shapes += _mlp_shapes(config, "mlp.shared", experts.shared_width) if experts.shared_width else []
    return shapes + _layer_input_shapes(config)


def _layer_input_shapes(config: ModelConfig) -> list[PackedShape]:
    inner = config.layer_embedding
    if not inner:
        return []
    return [PackedShape(("input_gate",), config.width, inner), PackedShape(("input_up",), inner, config.width)]


def _mlp_shapes(config: ModelConfig, name: str, width: int) -> list[PackedShape]:
    up = (f"{name}.gate", f"{name}.up") if config.gated_mlp else (f"{name}.up",)
    return [PackedShape(up, config.width, len(up) * width), PackedShape((f"{name}.down",), width, config.width)]


def _packed_bytes(config: ModelConfig, precision: Precision, tied: bool, bits: MatrixBits) -> tuple[int, int]:
    """Bytes of the packed products of all layers and of embeddings, and of the output matrix."""

    def linear(names: Iterable[str], inputs: int, outputs: int, exact: bool = False) -> int:
        rounded = WEIGHT_BITS[rounded_format(config)]
        kinds = {bits.get(name, rounded) for name in names}
        # A shifted format stores weights of fewer bits too; the rounded one takes any.
        each = rounded if rounded in kinds else max(kinds)
        each = (
            WEIGHT_BITS[FLOAT32]
            if exact or precision == "float32"
            else int8_bits(each)
            if precision == "int8"
            else each
        )
        rows = round_up(outputs, COLUMNS)
        return int(rows * round_up(inputs) * each / 8) + rows * FLOAT_BYTES

    layers = sum(
        linear([f"blocks.{layer}.{name}.weight" for name in each.names], each.inputs, each.outputs, each.exact)
        for layer in range(1 if config.shared else config.depth)
        for each in _packed_shapes(config, layer)
    )
    if config.layer_embedding:
        layers += linear(["layer_embedding.projection.weight"], config.width, config.depth * config.layer_embedding)
    if config.embedding_width:
        layers += linear(["projection.weight"], config.embedding_width, config.width)
    return layers, linear([TOKENS_WEIGHT if tied else HEAD_WEIGHT], config.width, config.vocab_size)
