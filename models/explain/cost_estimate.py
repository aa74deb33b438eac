"""Upper bounds of the memory and the time of an explanation, from the configuration and the request.

A backward pass needs what every layer kept of its rows; a forward pass only what one layer holds at a time. What grows
with pairs of rows is counted separately. What a head computes is small beside a network, except for heads that score
labels or options beside the text: they have matrices for all rows.
"""

from dataclasses import dataclass
from math import ceil

from torch import nn

from ..network.model_config import ModelConfig
from .attention_probe import SCORE_ROWS
from .explain_types import PIECE_ROWS, ExplanationRequest, InputTokens
from .head_scores import RowReadingHead
from .occlusion import windows

FLOAT32_BYTES = 4
FLOAT64_BYTES = 8
GRADIENT_METHODS = ("gradient_x_input", "integrated_gradients")
ALL_LAYER_METHODS = ("attention_rollout", "attention_flow")
EDGE_NUMBERS = 12  # numbers of 8 bytes for each edge, while flows are computed
SLACK_BYTES = 1 << 20  # for small things: indices, scores, vectors of a text
MIN_ROWS = 8  # a pass takes as long for one row as for this many, since all weights are read
LAYER_OVERHEAD = 20_000_000  # operations in the time that launching the calls of one layer takes
SCAN_OVERHEAD = 1_000_000  # operations in the time that launching the calls of a row of a scan takes
EDGE_OPERATIONS = 2000  # operations in the time that one flow takes for one edge, on one core


@dataclass(frozen=True)
class HeadSize:
    """What a head computes for a row, at most: all products of its matrices, which have so many `numbers`, and their
    inputs and outputs, which are so many `features`."""

    numbers: int = 0
    features: int = 0


FEW_CELLS = HeadSize()  # of heads that compute some cells of the scores


def measure_head(head: nn.Module) -> HeadSize:
    """The size of a head, which may be on the meta device."""
    if not isinstance(head, RowReadingHead):
        return FEW_CELLS
    matrices = [matrix for matrix in head.parameters() if matrix.dim() > 1]
    return HeadSize(sum(matrix.numel() for matrix in matrices), sum(sum(matrix.shape) for matrix in matrices))


def estimate_bytes(
    config: ModelConfig,
    body: ModelConfig,
    request: ExplanationRequest,
    piece: int = PIECE_ROWS,
    head: HeadSize = FEW_CELLS,
) -> int:
    """Bytes of an explanation, without the weights and the answer's JSON.

    `config` and `body` are as in models.checkpoint.Checkpoint: two for an encoder-decoder. `head`: see `measure_head`.
    """
    text = request.text
    count = max(1, piece // max(1, text.row_count)) if request.method in ("integrated_gradients", "occlusion") else 1
    needs_gradients = request.method in GRADIENT_METHODS
    total = _stack_bytes(body, len(text.tokens), count, needs_gradients)
    if request.goals:
        kept = 2 if needs_gradients else 1  # features, and their gradients
        total += FLOAT32_BYTES * count * len(text.tokens) * kept * head.features
    if text.source:
        total += _stack_bytes(config, len(text.source), count, needs_gradients) + _cross_attention_bytes(
            body, request, count, needs_gradients
        )
    if request.method in (*ALL_LAYER_METHODS, "attention"):
        total += _weight_buffer_bytes(config, body, request)
    if needs_gradients:
        embeddings = text.row_count * (config.embedding_width or config.width)
        total += embeddings * (count * 4 * FLOAT32_BYTES + (len(request.goals) + 4) * 2 * FLOAT64_BYTES)
    return total + SLACK_BYTES


def _stack_bytes(config: ModelConfig, rows: int, count: int, needs_gradients: bool) -> int:
    """Bytes of `count` texts of so many rows that go through a stack together."""
    inner, kv_inner = config.heads * config.head_width, config.kv_heads * config.head_width
    attention = 2 * (inner + kv_inner) + (inner + kv_inner if config.query_key_norm else 0)
    if config.latent is not None:
        attention += 4 * inner + 2 * (config.latent.rank + config.latent.query_rank)
    if config.attention_gate:
        attention += 3 * inner
    if config.global_tokens:
        attention += 3 * inner + 2 * kv_inner
    mlp, sums = (3 if config.gated_mlp else 1) * config.active_mlp_width, 6 if config.norm_order == "sandwich" else 4
    layers = config.depth if needs_gradients else 0
    # Kept for the backward pass; the layer in progress takes this much again, and more.
    layer = sums * config.width + max(attention, _count_recurrent_numbers(config)) + mlp
    a_row = layers * layer + layer + 2 * (config.width + inner + config.active_mlp_width)
    shared = max(config.heads // config.of_layer(layer).kv_heads for layer in range(config.depth))
    masked = config.causal or bool(config.window)
    each = shared if masked and shared > 1 else 0  # masks, copied for the heads that share keys
    if config.position in ("distance", "relative"):
        each += 4 * config.heads  # their scores are stored, not fused
    a_pair = layers * each + 2 * each + (6 if masked else 0)
    if config.has_distance_scores:
        a_pair += 3 * config.heads + 4
    return FLOAT32_BYTES * count * rows * (a_row + rows * a_pair)


def _count_recurrent_numbers(config: ModelConfig) -> int:
    """Numbers that a recurrent layer keeps of a row: those of its parts, and its state after the row, of which the
    scan makes up to four more of the same size."""
    recurrent = config.recurrent
    if recurrent is None or not config.is_recurrent:
        return 0
    mixer = config.mixers[config.recurrent_layers[0]]
    channels = recurrent.convolved(mixer, config.width)
    inner = recurrent.heads * recurrent.head_width or config.width
    return (channels + inner) * (6 + 2 * recurrent.kernel) + 5 * recurrent.state_numbers(mixer, config.width)


def _cross_attention_bytes(config: ModelConfig, request: ExplanationRequest, count: int, needs_gradients: bool) -> int:
    """Bytes of cross-attention: keys and values of all layers, and scores, which may be additive if there is one
    head."""
    read, written = len(request.text.source), len(request.text.tokens)
    inner, kv_inner = config.heads * config.head_width, config.kv_heads * config.head_width
    layers = config.depth if needs_gradients else 1
    pairs = 4 * config.head_width if config.heads == 1 else 1
    a_row = 4 * kv_inner * config.depth * read + (2 * inner + config.width) * layers * written
    return FLOAT32_BYTES * count * (a_row + pairs * read * written)


def _weight_buffer_bytes(config: ModelConfig, body: ModelConfig, request: ExplanationRequest) -> int:
    """Bytes of the recorded weights, and of the scores that exist at a time."""
    read, written = len(request.text.source), len(request.text.tokens)
    sides = [(config, read, read), (body, written, written), (body, written, read)]
    total = most = 0
    for part, rows, columns in sides if read else sides[1:2]:
        layers = len([layer for layer in request.layers if layer < part.depth]) or part.depth
        heads = len([head for head in request.heads if head < part.heads]) or part.heads
        if request.method in ALL_LAYER_METHODS:
            layers, heads = part.depth, part.heads
        answer = layers * rows * columns * (1 if request.method in ALL_LAYER_METHODS else heads)
        each = {"attention": 0, "attention_rollout": 3 * FLOAT64_BYTES}.get(
            request.method, (3 + EDGE_NUMBERS) * FLOAT64_BYTES
        )
        total += answer * (FLOAT32_BYTES + each)
        most = max(most, 3 * FLOAT32_BYTES * heads * min(SCORE_ROWS, rows) * columns)
    return total + most


def estimate_operations(
    config: ModelConfig,
    body: ModelConfig,
    request: ExplanationRequest,
    piece: int = PIECE_ROWS,
    head: HeadSize = FEW_CELLS,
) -> int:
    """Floating-point operations of all passes, forward and backward; a product that is added counts as two.

    What takes time without being such an operation (reading weights for few rows, launching calls, flows) counts as the
    operations that fit in that time, on a core with about 50 GFLOP a second. `config`, `body` and `head`: see
    `estimate_bytes`.
    """
    operations = _network_operations(config, body, request, piece)
    if request.goals:
        operations += 2 * head.numbers * request.text.row_count * _count_passes(request)
    return operations


def _count_passes(request: ExplanationRequest) -> int:
    """Passes of one text through the head, forward and backward."""
    match request.method:
        case "gradient_x_input":
            return 1 + len(request.goals)
        case "integrated_gradients":
            return (1 + len(request.goals)) * request.steps + 2
        case "occlusion":
            return 1 + sum(1 for _ in windows(request))
        case _:
            return 0


def _network_operations(config: ModelConfig, body: ModelConfig, request: ExplanationRequest, piece: int) -> int:
    """As `estimate_operations`, without the head."""
    text, goals = request.text, max(len(request.goals), 1)
    together = max(1, piece // max(1, text.row_count))
    total = (
        _pass_operations(config, body, request.compared_text, 1)
        if request.compared_text is not None and request.goals
        else 0
    )
    match request.method:
        case "attention" | "attention_rollout":
            return total + _pass_operations(config, body, text, 1)
        case "attention_flow":
            return (
                total
                + _pass_operations(config, body, text, 1)
                + EDGE_OPERATIONS * _count_flow_edges(config, body, text)
            )
        case "gradient_x_input":
            return total + (1 + goals) * _pass_operations(config, body, text, 1)
        case "integrated_gradients":
            return (
                total
                + (1 + goals) * _batched_pass_operations(config, body, text, request.steps, together)
                + 2 * _pass_operations(config, body, text, 1)
            )
        case "occlusion":
            hidden = sum(1 for _ in windows(request))
            return (
                total
                + _pass_operations(config, body, text, 1)
                + _batched_pass_operations(config, body, text, hidden, together)
            )


def _batched_pass_operations(
    config: ModelConfig, body: ModelConfig, text: InputTokens, count: int, together: int
) -> int:
    """Operations of so many texts, `together` at a time."""
    whole, left = divmod(count, together)
    total = whole * _pass_operations(config, body, text, together)
    return total + (_pass_operations(config, body, text, left) if left else 0)


def _pass_operations(config: ModelConfig, body: ModelConfig, text: InputTokens, count: int) -> int:
    """Operations of a forward or backward pass of `count` texts together."""
    read, written = len(text.source), len(text.tokens)
    total = _stack_operations(body, written, count)
    if read:
        total += _stack_operations(config, read, count) + _cross_attention_operations(body, read, written, count)
    return total


def _stack_operations(config: ModelConfig, rows: int, count: int) -> int:
    inner, kv_inner = config.heads * config.head_width, config.kv_heads * config.head_width
    mlp = (3 if config.gated_mlp else 2) * config.width * config.active_mlp_width
    projections = config.width * ((3 if config.attention_gate else 2) * inner + 2 * kv_inner)
    if config.global_tokens:
        projections += config.width * (inner + 2 * kv_inner)
    if (latent := config.latent) is not None:
        narrow = config.width * (latent.rank + latent.query_rank + config.rotary_width)
        wide = (latent.rank * 2 + (latent.query_rank or config.width) + config.width) * inner
        projections = narrow + wide
    if (recurrent := config.recurrent) is not None and config.is_recurrent:
        mixer = config.mixers[config.recurrent_layers[0]]
        channels = recurrent.convolved(mixer, config.width)
        inputs = channels + 2 * (recurrent.heads * recurrent.head_width or config.width)
        scanned = 4 * recurrent.state_numbers(mixer, config.width) + channels * recurrent.kernel
        # A scan launches the calls of a layer for each row.
        projections = max(projections, config.width * inputs + scanned + SCAN_OVERHEAD)
    matrices = projections + mlp + 3 * config.width * config.layer_embedding
    # Products of queries, keys, values and distances; all tokens may be global.
    products = 4 if config.position in ("distance", "relative") or config.global_tokens else 2
    pairs = products * inner * count * rows * rows
    before = config.embedding_width * config.width
    used = max(count * rows, MIN_ROWS)
    return 2 * (config.depth * (used * matrices + pairs) + used * before) + config.depth * LAYER_OVERHEAD


def _cross_attention_operations(config: ModelConfig, read: int, written: int, count: int) -> int:
    """Operations of cross-attention."""
    inner, kv_inner = config.heads * config.head_width, config.kv_heads * config.head_width
    own, theirs = max(count * written, MIN_ROWS), max(count * read, MIN_ROWS)
    matrices = config.width * (own * 2 * inner + theirs * 2 * kv_inner)
    return 2 * config.depth * (matrices + 2 * inner * count * written * read)


def _count_flow_edges(config: ModelConfig, body: ModelConfig, text: InputTokens) -> int:
    """Edges of all flows: one flow for each row and each of the `n` tokens it sees, through `n` times `n` edges a
    layer."""
    part, rows = (config, len(text.source)) if text.source else (body, len(text.tokens))
    return part.depth * (ceil(rows**4 / 4) if part.causal else rows**4)
