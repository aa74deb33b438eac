"""What the compiled step takes, told from a configuration alone: weights, a block of the cache, and a step's numbers.

Knows no tensors.  It counts what plan.py packs and src/step.cpp allocates; tests/test_budget.py compares it with what
is seen to be taken.
"""

from models.config import ModelConfig
from models.native.plan import BLOCK, COLUMNS, GROUP, Precision
from models.workspace import Largest

PANEL = 128  # rows, as in src/step.cpp
FINE = 32  # features with a scale of their own, as in src/gemm.hpp
GROWTH = 1.25  # room is made so much larger than what is wanted
FLOAT = 4


def padded(count: int, to: int = GROUP) -> int:
    return -(-count // to) * to


def weight_bytes(config: ModelConfig, precision: Precision, generates: bool, tied: bool) -> int:
    """Packed matrices, tables and norms.  Tokens are looked up in a tied output matrix unless that has 4 bits."""
    layers = config.depth * sum(_linear_bytes(*pair, precision) for pair in _matrices(config))
    head = _linear_bytes(config.width, config.vocab_size, precision) if generates else 0
    table = config.vocab_size * config.width * (FLOAT if precision == "float32" else 2)
    if tied and precision != "int4":
        table = 0
    places = (config.max_positions if config.position == "learned" else 0) + config.segments
    norms = 8 * config.depth * padded(config.width) * FLOAT
    return layers + head + table + places * config.width * FLOAT + norms


def loading_bytes(config: ModelConfig, precision: Precision, generates: bool, tied: bool) -> int:
    """Of the part that is being packed, as read: beyond `weight_bytes`, of which what is packed later is not there yet.

    The order is that of plan.fill: tokens, an output matrix of its own, blocks.
    """
    layers = config.depth * sum(_linear_bytes(*pair, precision) for pair in _matrices(config))
    head = _linear_bytes(config.width, config.vocab_size, precision) if generates and not tied else 0
    vocabulary, block = config.vocab_size * config.width * FLOAT, FLOAT * sum(a * b for a, b in _matrices(config))
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


def _matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """Inputs and outputs of the products of a layer."""
    inner, kept = config.heads * config.head_width, config.kv_heads * config.head_width
    up = (2 if config.gated_mlp else 1) * config.mlp_width
    return [
        (config.width, inner + 2 * kept),
        (inner, config.width),
        (config.width, up),
        (config.mlp_width, config.width),
    ]


def _linear_bytes(inputs: int, outputs: int, precision: Precision) -> int:
    rows = padded(outputs, COLUMNS)
    return rows * padded(inputs) * (FLOAT if precision == "float32" else 1) + 2 * rows * FLOAT
