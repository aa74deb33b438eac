"""The request and the result of an explanation: token ids in, arrays out. What every head returns is a table of raw
scores, and an explained goal is the sum of some of its cells."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..core.decision_prompt import PromptKind

Method = Literal[
    "attention", "attention_rollout", "attention_flow", "gradient_x_input", "integrated_gradients", "occlusion"
]
AttentionPart = Literal["self", "encoder", "decoder", "cross"]  # the part of a network with the attention
Cell = tuple[int, int]  # (row, column) of the raw scores; see InstrumentedNetwork.scores
Goal = tuple[Cell, ...]  # the sum of these cells is explained
PIECE_ROWS = 256  # token rows computed between two yields
Share = float | None  # of an explanation's work that is done, from 0 to 1; None: not known


@dataclass(frozen=True, slots=True)
class InputTokens:
    """The input of a network. An encoder-decoder reads `source`, and `tokens` is its target, beginning with the start
    token.

    Where rows of both are counted, as in `kept_rows` and `Attribution.values`, those of the source come first.

    A head that compares a text with labels reads these at `label_rows` and the text at `text_rows`. A head that answers
    questions of the kind `question` reads their options at `label_rows`.
    """

    tokens: tuple[int, ...]
    segments: tuple[int, ...] = ()  # empty: all zero
    source: tuple[int, ...] = ()
    label_rows: tuple[int, ...] = ()
    text_rows: tuple[int, ...] = ()
    question: PromptKind = "choice"

    @property
    def row_count(self) -> int:
        return len(self.source) + len(self.tokens)


@dataclass(frozen=True, slots=True)
class ExplanationRequest:
    """A request. The caller has checked that rows, columns, layers, heads and ids exist, and that the method is
    supported."""

    text: InputTokens
    method: Method
    goals: tuple[Goal, ...] = ()  # one Attribution each
    layers: tuple[int, ...] = ()  # of "attention"; empty: all
    heads: tuple[int, ...] = ()  # the same
    steps: int = 50  # of integrated gradients
    baseline: int = -1  # the baseline's token; -1: zero vectors (not for occlusion)
    kept_rows: frozenset[int] = frozenset()  # rows that the baseline keeps and occlusion never hides
    window: int = 1  # neighbouring tokens that occlusion hides together
    compared_text: InputTokens | None = None  # of an embedder: the text that the input is compared with; it is constant


@dataclass(frozen=True)
class AttentionWeights:
    """Attention weights of each row for each column: of one part of the network, or over all its layers."""

    kind: Literal["self", "encoder", "decoder", "cross", "rollout", "flow"]
    values: NDArray[np.float32]  # [L, H, Q, K]; of rollout and flow [1, 1, Q, K]
    layers: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Attribution:
    """The contribution of each row to a goal."""

    values: NDArray[np.float32]  # [rows]
    score: float  # the goal's
    baseline: float  # the goal's value for the baseline of integrated gradients; NaN for other methods


@dataclass(frozen=True)
class Explanation:
    weights: tuple[AttentionWeights, ...] = ()
    attributions: tuple[Attribution, ...] = ()
