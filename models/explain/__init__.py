"""Explains a network's output from token ids and raw scores: `explain(watched, request)`.

Every long computation is a generator that yields between pieces of work, so the caller can stop it, or run it between
the steps of a busy thread. What repeats the same work, such as the points of integrated gradients, yields the share of
it that is done. Attention rollout and flow: max_flow.py; gradients: gradients.py; occlusion: occlusion.py.
"""

from collections.abc import Callable, Generator

from .attention_weights import attention, attention_flow, attention_rollout
from .cost_estimate import FEW_CELLS, HeadSize, estimate_bytes, estimate_operations, measure_head
from .explain_types import (
    PIECE_ROWS,
    AttentionWeights,
    Attribution,
    Explanation,
    ExplanationRequest,
    Goal,
    InputTokens,
    Method,
    Share,
)
from .gradients import gradient_x_input, integrated_gradients
from .instrumented_network import InstrumentedNetwork
from .occlusion import occlusion

__all__ = [
    "FEW_CELLS",
    "METHODS",
    "PIECE_ROWS",
    "AttentionWeights",
    "Attribution",
    "Explanation",
    "ExplanationRequest",
    "Goal",
    "HeadSize",
    "InputTokens",
    "InstrumentedNetwork",
    "Method",
    "Share",
    "estimate_bytes",
    "estimate_operations",
    "explain",
    "measure_head",
]

Steps = Generator[Share, None, Explanation]
METHODS: dict[Method, Callable[[InstrumentedNetwork, ExplanationRequest, int], Steps]] = {
    "attention": attention,
    "attention_rollout": attention_rollout,
    "attention_flow": attention_flow,
    "gradient_x_input": gradient_x_input,
    "integrated_gradients": integrated_gradients,
    "occlusion": occlusion,
}
ATTRIBUTING: frozenset[Method] = frozenset(("gradient_x_input", "integrated_gradients", "occlusion"))


def explain(network: InstrumentedNetwork, request: ExplanationRequest, *, piece: int = PIECE_ROWS) -> Steps:
    """The explanation of one request. Yields between pieces of about `piece` token rows, forward or backward: the share
    of the work that is done, where the method knows it."""
    if request.method in ATTRIBUTING and not request.goals:
        return empty_explanation()
    return METHODS[request.method](network, request, piece)


def empty_explanation() -> Steps:
    """An explanation without attributions."""
    yield from ()
    return Explanation()
