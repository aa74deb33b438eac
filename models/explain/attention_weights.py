"""Attention as it is, of each layer and head that is asked for; and that of all layers together.

Knows nothing of gradients.
"""

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
    """Of every part that the network has; layers and heads that a part doesn't have are left out of it."""
    if not watched.layout:
        raise UnsupportedError(
            "it has no attention to be seen; ask for gradient_x_input, integrated_gradients or occlusion"
        )
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
    """See models.explain.attention_flow.  Of an encoder-decoder that of its encoder."""
    weights = yield from mean_weights(watched, asked, piece)
    return build_explanation("rollout", max_flow.rollout(weights))


def attention_flow(
    watched: InstrumentedNetwork, asked: ExplanationRequest, piece: int
) -> Generator[None, None, Explanation]:
    """The same."""
    weights = yield from mean_weights(watched, asked, piece)
    return build_explanation("flow", (yield from max_flow.maximum_flows(weights)))


def mean_weights(watched: InstrumentedNetwork, asked: ExplanationRequest, piece: int) -> Generator[None, None, Floats]:
    """[L, Q, Q] of all layers, each the mean of its heads: what models.explain.attention_flow takes."""
    part: AttentionPart = "encoder" if "encoder" in watched.layout else "self"
    if part not in watched.layout:
        raise UnsupportedError("nothing in it looks at its own text; ask for attention, which is its alignment")
    layers, heads = watched.layout[part]
    plate = WeightBuffer.allocate(tuple(range(layers)), tuple(range(heads)), weight_shape(asked, part), mean=True)
    yield from record_weights(watched, asked, {part: plate}, piece)
    return plate.values[:, 0]


def record_weights(
    watched: InstrumentedNetwork, asked: ExplanationRequest, plates: Mapping[AttentionPart, WeightBuffer], piece: int
) -> Generator[None, None, None]:
    """Yields when so many rows have gone through a layer as make a piece going through all of them."""
    yield from run_in_pieces(
        watched.record_attention(asked.text, plates), piece * max(layers for layers, _ in watched.layout.values())
    )


def build_explanation(kind: Literal["rollout", "flow"], values: Floats) -> Explanation:
    return Explanation((AttentionWeights(kind, values[None, None], (0,), (0,)),))


def allocate_buffer(asked: ExplanationRequest, part: AttentionPart, shape: LayersAndHeads) -> WeightBuffer:
    """Room for what is asked of a part, and for nothing else."""
    layers, heads = (
        tuple(number for number in wanted or range(count) if number < count)
        for wanted, count in zip((asked.layers, asked.heads), shape, strict=True)
    )
    return WeightBuffer.allocate(layers, heads, weight_shape(asked, part), mean=False)


def weight_shape(asked: ExplanationRequest, part: AttentionPart) -> tuple[int, int]:
    """How many rows look at how many."""
    read, written = len(asked.text.source), len(asked.text.tokens)
    rows = read if part == "encoder" else written
    return rows, read if part in ("encoder", "cross") else written
