"""Attention weights of each requested layer and head, and attention rollout and flow over all layers."""

from collections.abc import Generator, Mapping
from typing import Literal

from ..core.errors import UnsupportedError
from . import max_flow
from .attention_probe import WeightBuffer
from .explain_types import AttentionPart, AttentionWeights, Explanation, ExplanationRequest
from .instrumented_network import InstrumentedNetwork, LayersAndHeads, run_in_pieces
from .max_flow import Floats


def attention(
    watched: InstrumentedNetwork, asked: ExplanationRequest, piece: int
) -> Generator[None, None, Explanation]:
    """The weights of every part of the network that has attention. Layers and heads that a part does not have are left
    out."""
    if not watched.layout:
        raise UnsupportedError("it has no attention; ask for gradient_x_input, integrated_gradients or occlusion")
    if not watched.probes:
        values = watched.alignments(asked.text)[None, None]
        return Explanation((AttentionWeights("cross", values, (0,), (0,)),))
    plates = {part: allocate_buffer(asked, part, shape) for part, shape in watched.layout.items()}
    yield from record_weights(watched, asked, plates, piece)
    return Explanation(
        tuple(AttentionWeights(part, plate.values, plate.layers, plate.heads) for part, plate in plates.items())
    )


def attention_rollout(
    watched: InstrumentedNetwork, asked: ExplanationRequest, piece: int
) -> Generator[None, None, Explanation]:
    """See models.explain.max_flow. For an encoder-decoder it is that of the encoder."""
    weights = yield from mean_weights(watched, asked, piece)
    return build_explanation("rollout", max_flow.rollout(weights))


def attention_flow(
    watched: InstrumentedNetwork, asked: ExplanationRequest, piece: int
) -> Generator[None, None, Explanation]:
    """See models.explain.max_flow. For an encoder-decoder it is that of the encoder."""
    weights = yield from mean_weights(watched, asked, piece)
    return build_explanation("flow", (yield from max_flow.maximum_flows(weights)))


def mean_weights(watched: InstrumentedNetwork, asked: ExplanationRequest, piece: int) -> Generator[None, None, Floats]:
    """[L, Q, Q] the weights of all layers, each the mean over heads: the input of models.explain.max_flow."""
    part: AttentionPart = "encoder" if "encoder" in watched.layout else "self"
    if part not in watched.layout:
        raise UnsupportedError("it has no self-attention; ask for attention, which is its alignment")
    layers, heads = watched.layout[part]
    plate = WeightBuffer.allocate(tuple(range(layers)), tuple(range(heads)), weight_shape(asked, part), mean=True)
    yield from record_weights(watched, asked, {part: plate}, piece)
    return plate.values[:, 0]


def record_weights(
    watched: InstrumentedNetwork, asked: ExplanationRequest, plates: Mapping[AttentionPart, WeightBuffer], piece: int
) -> Generator[None, None, None]:
    """Record attention weights. Yields after as many rows times layers as a piece has in the whole network."""
    yield from run_in_pieces(
        watched.record_attention(asked.text, plates), piece * max(layers for layers, _ in watched.layout.values())
    )


def build_explanation(kind: Literal["rollout", "flow"], values: Floats) -> Explanation:
    return Explanation((AttentionWeights(kind, values[None, None], (0,), (0,)),))


def allocate_buffer(asked: ExplanationRequest, part: AttentionPart, shape: LayersAndHeads) -> WeightBuffer:
    """A buffer for the requested layers and heads of a part."""
    layers, heads = (
        tuple(number for number in wanted or range(count) if number < count)
        for wanted, count in zip((asked.layers, asked.heads), shape, strict=True)
    )
    return WeightBuffer.allocate(layers, heads, weight_shape(asked, part), mean=False)


def weight_shape(asked: ExplanationRequest, part: AttentionPart) -> tuple[int, int]:
    """The numbers of query rows and key columns."""
    read, written = len(asked.text.source), len(asked.text.tokens)
    rows = read if part == "encoder" else written
    return rows, read if part in ("encoder", "cross") else written
