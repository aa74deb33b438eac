"""Why a network said what it said: `explain(watched, asked)`.

Knows token ids and raw scores, no text and no request.  The one idea: whatever takes long is a generator that yields
between pieces of work, so that whoever drives it can let others compute in between.
"""

from collections.abc import Callable, Generator

from .attention_weights import attention, attention_flow, attention_rollout
from .cost_estimate import estimate_bytes, estimate_operations
from .explain_types import (
    PIECE_ROWS,
    AttentionWeights,
    Attribution,
    Explanation,
    ExplanationRequest,
    Goal,
    InputTokens,
    Method,
)
from .gradients import gradient_x_input, integrated_gradients
from .instrumented_network import InstrumentedNetwork
from .occlusion import occlusion

__all__ = [
    "METHODS",
    "PIECE_ROWS",
    "AttentionWeights",
    "Attribution",
    "Explanation",
    "ExplanationRequest",
    "Goal",
    "InputTokens",
    "InstrumentedNetwork",
    "Method",
    "estimate_bytes",
    "estimate_operations",
    "explain",
]

Steps = Generator[None, None, Explanation]
METHODS: dict[Method, Callable[[InstrumentedNetwork, ExplanationRequest, int], Steps]] = {
    "attention": attention,
    "attention_rollout": attention_rollout,
    "attention_flow": attention_flow,
    "gradient_x_input": gradient_x_input,
    "integrated_gradients": integrated_gradients,
    "occlusion": occlusion,
}
ATTRIBUTING: frozenset[Method] = frozenset(("gradient_x_input", "integrated_gradients", "occlusion"))


def explain(watched: InstrumentedNetwork, asked: ExplanationRequest, *, piece: int = PIECE_ROWS) -> Steps:
    """Yields between pieces of about `piece` token rows, forward or backward.

    A longer text is cut between its layers, unless one sequence is read and another written.

    Where attributions are asked for and there are no goals (an answer of no tokens), nothing is computed.

    UnsupportedError where the network has nothing of that kind to show.
    """
    if asked.method in ATTRIBUTING and not asked.goals:
        return empty_explanation()
    return METHODS[asked.method](watched, asked, piece)


def empty_explanation() -> Steps:
    """No attributions."""
    yield from ()
    return Explanation()
