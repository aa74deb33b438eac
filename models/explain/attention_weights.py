"""Attention weights of each requested layer and head, and attention rollout and flow over all layers."""

from collections.abc import Generator, Mapping
from typing import Literal

from ..core.errors import UnsupportedError
from . import max_flow
from .attention_probe import WeightBuffer
from .explain_types import AttentionPart, AttentionWeights, Explanation, ExplanationRequest, Share
from .instrumented_network import InstrumentedNetwork, LayersAndHeads, run_in_pieces
from .max_flow import Floats


def attention(
    network: InstrumentedNetwork, request: ExplanationRequest, piece: int
) -> Generator[None, None, Explanation]:
    """The weights of every part of the network that has attention. Layers and heads that a part does not have are left
    out."""
    if not network.layout:
        message = "it has layers without attention; ask for gradient_x_input, integrated_gradients or occlusion"
        raise UnsupportedError(message)
    if not network.probes:
        values = network.alignments(request.text)[None, None]
        return Explanation((AttentionWeights("cross", values, (0,), (0,)),))
    buffers = {part: allocate_buffer(request, part, shape) for part, shape in network.layout.items()}
    yield from record_weights(network, request, buffers, piece)
    return Explanation(
        tuple(AttentionWeights(part, buffer.values, buffer.layers, buffer.heads) for part, buffer in buffers.items())
    )


def attention_rollout(
    network: InstrumentedNetwork, request: ExplanationRequest, piece: int
) -> Generator[None, None, Explanation]:
    """See models.explain.max_flow. For an encoder-decoder it is that of the encoder."""
    weights = yield from mean_weights(network, request, piece)
    return build_explanation("rollout", max_flow.rollout(weights))


def attention_flow(
    network: InstrumentedNetwork, request: ExplanationRequest, piece: int
) -> Generator[Share, None, Explanation]:
    """See models.explain.max_flow. For an encoder-decoder it is that of the encoder."""
    weights = yield from mean_weights(network, request, piece)
    return build_explanation("flow", (yield from max_flow.maximum_flows(weights)))


def mean_weights(
    network: InstrumentedNetwork, request: ExplanationRequest, piece: int
) -> Generator[None, None, Floats]:
    """[L, Q, Q] the weights of all layers, each the mean over heads: the input of models.explain.max_flow."""
    part: AttentionPart = "encoder" if "encoder" in network.layout else "self"
    if part not in network.layout:
        raise UnsupportedError("it has no self-attention; ask for attention, which is its alignment")
    layers, heads = network.layout[part]
    buffer = WeightBuffer.allocate(tuple(range(layers)), tuple(range(heads)), weight_shape(request, part), mean=True)
    yield from record_weights(network, request, {part: buffer}, piece)
    return buffer.values[:, 0]


def record_weights(
    network: InstrumentedNetwork, request: ExplanationRequest, buffers: Mapping[AttentionPart, WeightBuffer], piece: int
) -> Generator[None, None, None]:
    """Record attention weights. Yields after as many rows times layers as a piece has in the whole network."""
    yield from run_in_pieces(
        network.record_attention(request.text, buffers), piece * max(layers for layers, _ in network.layout.values())
    )


def build_explanation(kind: Literal["rollout", "flow"], values: Floats) -> Explanation:
    return Explanation((AttentionWeights(kind, values[None, None], (0,), (0,)),))


def allocate_buffer(request: ExplanationRequest, part: AttentionPart, shape: LayersAndHeads) -> WeightBuffer:
    """A buffer for the requested layers and heads of a part."""
    layers, heads = (
        tuple(number for number in requested or range(count) if number < count)
        for requested, count in zip((request.layers, request.heads), shape, strict=True)
    )
    return WeightBuffer.allocate(layers, heads, weight_shape(request, part), mean=False)


def weight_shape(request: ExplanationRequest, part: AttentionPart) -> tuple[int, int]:
    """The numbers of query rows and key columns."""
    read, written = len(request.text.source), len(request.text.tokens)
    rows = read if part == "encoder" else written
    return rows, read if part in ("encoder", "cross") else written
