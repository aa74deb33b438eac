"""What is asked of a network besides its answer, and what comes back: token ids in, arrays out.

Knows no text, no labels and no torch.  The one idea: whatever a head says is a table of raw scores, so that what is to
be explained is a few of its cells.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Method = Literal[
    "attention", "attention_rollout", "attention_flow", "gradient_x_input", "integrated_gradients", "occlusion"
]
AttentionPart = Literal["self", "encoder", "decoder", "cross"]  # of a network: where its attention is
Cell = tuple[int, int]  # (row, column) of the raw scores: see models.explain.instrumented_network.Watched.scores
Goal = tuple[Cell, ...]  # what is explained is the sum of these cells
PIECE_ROWS = 256  # token rows that are computed before others may compute


@dataclass(frozen=True, slots=True)
class InputTokens:
    """What a network reads.  An encoder-decoder reads `source`, and `tokens` is what it writes, its start first.

    Where rows of both are counted, as `Asked.kept` and `Attribution.values` do, those of the source come first.
    """

    tokens: tuple[int, ...]
    segments: tuple[int, ...] = ()  # empty: all zero
    source: tuple[int, ...] = ()

    @property
    def row_count(self) -> int:
        return len(self.source) + len(self.tokens)


@dataclass(frozen=True, slots=True)
class ExplanationRequest:
    """Who asks has checked that rows, columns, layers, heads and ids are there, and that the method is offered."""

    text: InputTokens
    method: Method
    goals: tuple[Goal, ...] = ()  # one Attribution each
    layers: tuple[int, ...] = ()  # of "attention"; empty: all
    heads: tuple[int, ...] = ()  # the same
    steps: int = 50  # of integrated gradients
    baseline: int = -1  # the token that stands for nothing; -1: zero vectors, but not for occlusion
    kept_rows: frozenset[int] = frozenset()  # rows that the baseline keeps and occlusion never hides
    window: int = 1  # neighbouring tokens that occlusion hides together
    compared_text: InputTokens | None = None  # of an embedder: what the text is compared with, held constant


@dataclass(frozen=True)
class AttentionWeights:
    """How much each row looks at each column: of a network's part, or of all its layers together."""

    kind: Literal["self", "encoder", "decoder", "cross", "rollout", "flow"]
    values: NDArray[np.float32]  # [L, H, Q, K]; of rollout and flow [1, 1, Q, K]
    layers: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Attribution:
    """What each row did for a goal."""

    values: NDArray[np.float32]  # [rows]
    score: float  # the goal's
    baseline: float  # the same for the baseline of integrated gradients; nan where there is none


@dataclass(frozen=True)
class Explanation:
    weights: tuple[AttentionWeights, ...] = ()
    attributions: tuple[Attribution, ...] = ()
