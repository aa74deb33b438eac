"""What the compiled step takes, told from a configuration alone: weights, a block of the cache, and a step's numbers.

Knows no tensors.  It counts what plan.py packs and src/step.cpp allocates; tests/test_budget.py compares it with what
is seen to be taken.  `bits` says of matrices, by their names, in how many int4 packs a weight of theirs; of what is not
named it is not known, 8 at most.
"""

from collections.abc import Iterable, Mapping

from models.config import ModelConfig
from models.native.plan import BITS, BLOCK, COLUMNS, FORMATS, GROUP, Precision
from models.workspace import Largest

PANEL = 128  # rows, as in src/step.cpp
FINE = 32  # features with a scale of their own, as in src/gemm.hpp
GROWTH = 1.25  # room is made so much larger than what is wanted
FLOAT = 4
EIGHT = BITS[FORMATS["int8"]]
Bits = Mapping[str, float]
TOKENS, HEAD = "tokens.weight", "head.output.weight"


def padded(count: int, to: int = GROUP) -> int:
    return -(-count // to) * to


def weight_bytes(config: ModelConfig, precision: Precision, generates: bool, tied: bool, bits: Bits) -> int:
    """Packed matrices, tables and norms.  Tokens are looked up in a tied output matrix unless that has 4 bits."""
    layers, head = _packed_bytes(config, precision, tied, bits)
    table = config.vocab_size * config.width * (FLOAT if precision == "float32" else 2)
    if tied and (precision != "int4" or bits.get(TOKENS) == EIGHT):
        table = 0
    places = (config.max_positions if config.position == "learned" else 0) + config.segments
    norms = 8 * config.depth * padded(config.width) * FLOAT
    return layers + (head if generates else 0) + table + places * config.width * FLOAT + norms


def loading_bytes(config: ModelConfig, precision: Precision, generates: bool, tied: bool, bits: Bits) -> int:
    """Of the part that is being packed, as read: beyond `weight_bytes`, of which what is packed later is not there yet.

    The order is that of plan.fill: tokens, an output matrix of its own, blocks.
    """
    layers, last = _packed_bytes(config, precision, tied, bits)
    head = last if generates and not tied else 0
    vocabulary, block = config.vocab_size * config.width * FLOAT, FLOAT * sum(a * b for _, a, b in _products(config))
    return max(vocabulary - layers - head, vocabulary - layers if head else 0, block)


def block_bytes(config: ModelConfig, precision: Precision) -> int:
    """Keys and values of BLOCK tokens in all layers."""
    return config.depth * config.kv_heads * BLOCK * _token_bytes(config, precision)


def workspace_bytes(config: ModelConfig, largest: Largest, threads: int, generates: bool) -> int:
    """Activations of the largest step, each thread's panel, and what is answered."""
    heads, kept = config.heads * config.head_width, config.kv_heads * config.head_width
    width, attended, hidden = padded(config.width), padded(heads), padded(config.mlp_width)
    wanted = largest.sequences if generates else largest.rows
    rows = largest.rows * (width + attended + padded(heads + 2 * kept) + 2 * config.head_width)
    answers = wanted * (width + attended + (padded(config.vocab_size, COLUMNS) if generates else config.width))
    own = 0 if largest.cached else 2 * config.kv_heads * padded(config.head_width, FINE) * (largest.rows + BLOCK)
    panel = PANEL * (2 * max(width, attended, hidden) + hidden + width)
    return int((rows + answers + own) * GROWTH + threads * panel) * FLOAT


def _token_bytes(config: ModelConfig, precision: Precision) -> int:
    """A token's key and value of one head: floats, or codes with a scale for every FINE of a key and one of a value."""
    width = padded(config.head_width, FINE)
    return 2 * width * FLOAT if precision == "float32" else 2 * width + FLOAT * (width // FINE + 1)


def _products(config: ModelConfig) -> list[tuple[tuple[str, ...], int, int]]:
    """Of a layer: the matrices that are packed as one, its inputs and outputs."""
    inner, kept = config.heads * config.head_width, config.kv_heads * config.head_width
    up = ("mlp.gate", "mlp.up") if config.gated_mlp else ("mlp.up",)
    return [
        (("attention.query", "attention.key", "attention.value"), config.width, inner + 2 * kept),
        (("attention.output",), inner, config.width),
        (up, config.width, len(up) * config.mlp_width),
        (("mlp.down",), config.mlp_width, config.width),
    ]


def _packed_bytes(config: ModelConfig, precision: Precision, tied: bool, bits: Bits) -> tuple[int, int]:
    """Of the products of all layers, and of the output matrix."""

    def linear(names: Iterable[str], inputs: int, outputs: int) -> int:
        alike = {bits.get(name, EIGHT) for name in names}  # what differs has no format of four bits in common
        each = BITS[FORMATS[precision]] if precision != "int4" else alike.pop() if len(alike) == 1 else EIGHT
        rows = padded(outputs, COLUMNS)
        return int(rows * padded(inputs) * each / 8) + 2 * rows * FLOAT

    layers = sum(
        linear([f"blocks.{layer}.{name}.weight" for name in names], inputs, outputs)
        for layer in range(config.depth)
        for names, inputs, outputs in _products(config)
    )
    return layers, linear([TOKENS if tied else HEAD], config.width, config.vocab_size)
