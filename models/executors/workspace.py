"""Memory that a step takes in addition to the weights, computed from a configuration: cache blocks and intermediate
results.

It counts what is alive at once at the widest point of a forward pass, for the largest step of a worker.
tests/service/runtime/test_memory_budget.py compares it with what the torch executor allocates.
"""

from dataclasses import dataclass, replace

import torch

from ..network.attention import GROUP_KEYS
from ..network.model_config import ModelConfig

GROWTH = 1.25  # memory to gather into is this much larger than needed
SELF_TEST_ROWS = 192  # rows of a product that are kept to be compared
GRAPH_BYTES = 16 << 20  # of a recorded step, with the libraries' memory for it; an estimate, not measured on a GPU
MASK_BYTES = 3  # bytes a score while a mask is computed: existing keys, visible keys, both


@dataclass(frozen=True, kw_only=True)
class LargestStep:
    """The largest step: `rows` tokens of at most `sequences` sequences, each with up to `context` tokens.

    `cached`: keys and values are read from a cache. `invariant`: computed as models.invariant does. `in_place`: one
    kernel attends for all (models.network.varlen), without masks and copies. `beside`: rows of each step that may be
    computed while the largest one is interrupted, by an executor that can.
    """

    rows: int
    sequences: int
    context: int
    cached: bool
    invariant: bool = False
    in_place: bool = False
    beside: int = 0


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype, windowed: bool = False) -> int:
    """Bytes of a cache block: keys and values of `block_size` tokens in all layers that have their own, or in the
    windowed ones only. For states see models.network.recurrent_state.state_bytes."""
    layers = config.windowed_layers if windowed else config.cached_layers
    numbers = sum(each.kv_heads * each.head_width for each in map(config.of_layer, layers))
    return 2 * numbers * block_size * dtype.itemsize


def most_kept_numbers(config: ModelConfig) -> int:
    """Numbers of the keys of a token in the layer where they are the most."""
    layers = map(config.of_layer, range(config.depth) if config.layer_shapes else (0,))
    return max(each.kv_heads * each.head_width for each in layers)


def layer_input_numbers(config: ModelConfig) -> int:
    """Numbers of a row that later layers read: embeddings of each layer, of which four copies exist while they are
    computed, and keys and values."""
    kept = sum(2 * each.kv_heads * each.head_width for each in map(config.of_layer, config.read_layers))
    return 4 * config.depth * config.layer_embedding + kept


def forward_bytes(config: ModelConfig, dtype: torch.dtype, largest: LargestStep) -> int:
    """Bytes of a forward pass: activations and masks."""
    if config.two_streams:
        largest = replace(largest, rows=2 * largest.rows)
    return _activations(config, dtype, largest) + _masks(config, dtype, largest)


def self_test_bytes(config: ModelConfig, dtype: torch.dtype, generates: bool) -> int:
    """Bytes while a network is made invariant: a transposed copy of its widest matrix, and the compared rows."""
    width = config.vocab_size if generates else config.active_mlp_width
    return width * (config.width * dtype.itemsize + SELF_TEST_ROWS * torch.float32.itemsize)


def _activations(config: ModelConfig, dtype: torch.dtype, largest: LargestStep) -> int:
    """The residual stream, as the caller and the block hold it, and the wider of attention and MLP."""
    if config.static:  # the states, and a copy that is weighted or pooled
        return 2 * largest.rows * config.width * dtype.itemsize
    heads, kept = config.heads * config.head_width, most_kept_numbers(config)
    attention = 5 * heads + (2 if largest.cached else 4) * kept
    if config.latent is not None:  # narrow vectors, rotated and padded copies
        attention += 4 * heads + 2 * (config.latent.rank + config.latent.query_rank)
    if config.attention_gate:
        attention += 2 * heads
    if config.global_tokens:  # the second projections, and the values of all tokens with those of the global ones
        attention += 3 * heads + 2 * kept
    mlp = (3 if config.gated_mlp else 2) * config.active_mlp_width
    if largest.invariant:
        attention, mlp = (
            attention + heads,
            3 * config.active_mlp_width,
        )  # padded inputs, and outputs assembled from pieces
    if config.has_cross_attention and not largest.cached:  # keys and values of a text for all layers, and a copy
        attention += 4 * config.depth * kept + config.width
    if config.position == "distance":
        attention += config.heads * config.distances
    if config.two_streams:  # biases of a row, copied beside its queries, keys and values, and gathered
        attention += 6 * heads + 3 * config.heads * config.distances
    if config.position == "relative":  # products of queries and key vectors, and weight sums for value vectors
        attention += 2 * config.heads * (2 * config.farthest + 1)
    parts = largest.rows * (3 * config.width + max(attention, mlp) + layer_input_numbers(config)) * dtype.itemsize
    return max(parts, largest.rows * 3 * config.width * dtype.itemsize + recurrent_bytes(config, dtype, largest))


def recurrent_bytes(config: ModelConfig, dtype: torch.dtype, largest: LargestStep) -> int:
    """Bytes of one recurrent layer: its inputs, in the scan's order and as float32, its outputs, and the states of all
    sequences before and after a token."""
    recurrent = config.recurrent
    if recurrent is None or not config.is_recurrent:
        return 0
    mixer = config.mixers[config.recurrent_layers[0]]
    channels = recurrent.convolved(mixer, config.width)
    inner = recurrent.heads * recurrent.head_width or config.width
    row = (channels + inner + 2 * recurrent.heads) * (dtype.itemsize + 4 * torch.float32.itemsize)
    states = 4 * recurrent.state_numbers(mixer, config.width) * torch.float32.itemsize
    past = channels * (recurrent.kernel - 1) * torch.float32.itemsize
    return largest.rows * row + largest.sequences * (states + past)


def _masks(config: ModelConfig, dtype: torch.dtype, largest: LargestStep) -> int:
    """The masks of all groups, and in attention one more copy for each query head that shares a key head."""
    if largest.in_place or config.static or not config.attention_layers:
        return 0
    shared = max(config.heads // config.of_layer(layer).kv_heads for layer in config.attention_layers)
    kept = (2 if config.window else 1) * dtype.itemsize
    if (
        config.has_distance_scores
    ):  # distances, and for each head their bias, alone and with a mask; or the terms of its scores
        terms = 3 if config.window or config.position == "relative" else 2
        terms += 3 if config.two_streams else 0  # scores with that of the row itself, weights, and a copy of them
        kept += torch.int64.itemsize + terms * config.heads * dtype.itemsize
    if not config.has_plain_scores:  # scores, capped scores and weights
        kept += 3 * config.heads * torch.float32.itemsize
    copied = shared * dtype.itemsize if shared > 1 else 0
    if largest.invariant:
        copied += 2 * shared * torch.float32.itemsize
    return largest.rows * largest.context * (kept + max(copied, MASK_BYTES))


def gather_bytes(config: ModelConfig, dtype: torch.dtype, largest: LargestStep) -> int:
    """Keys and values gathered from the cache, of one layer and one group of sequences; reused in every step."""
    if not largest.cached or largest.in_place or not config.attention_layers:
        return 0
    keys = min(largest.sequences * largest.context, max(GROUP_KEYS, largest.context))
    numbers = 2 * keys * most_kept_numbers(config)
    padded = torch.float32.itemsize if largest.invariant else 0
    return int(numbers * (GROWTH * dtype.itemsize + padded))


def graph_bytes(config: ModelConfig, dtype: torch.dtype, decode_sequences: int) -> int:
    """Bytes of recorded steps of up to `decode_sequences` sequences: their logits, in all twice the largest, and shared
    memory."""
    logits = 2 * decode_sequences * config.vocab_size * (torch.float32.itemsize + dtype.itemsize)
    step = LargestStep(rows=decode_sequences, sequences=decode_sequences, context=0, cached=True, in_place=True)
    return logits + _activations(config, dtype, step) + GRAPH_BYTES * (decode_sequences.bit_length() + 1)
