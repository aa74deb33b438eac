"""What reads one sequence and writes another: the shape that recurrent networks and transformers have in common.

Sutskever et al. 2014 (arXiv:1409.3215), Cho et al. 2014 (arXiv:1406.1078).  Whoever trains, decodes or serves one knows
this and nothing of what is inside.  The one idea: what a network knows of N sequences that are being written is one
state, whose rows can be picked, repeated and joined; so that beams are a pick and a batch that others enter is a join.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ..network.ragged import RaggedBatch

Seq2SeqState = Any  # of N sequences: known to its network alone


class Seq2Seq(Protocol):
    """A module over one vocabulary of V tokens; what it writes stands behind `start`."""

    @property
    def start_token(self) -> int:
        """The token that stands before the first that is written."""

    def __call__(self, sources: RaggedBatch, targets: RaggedBatch) -> Tensor:
        """[T, V] logits: for each of T rows of N targets, each of which begins with `start`, those of the token behind
        it, where what stands before it is given (teacher forcing, Williams and Zipser 1989)."""

    def readout(self, sources: RaggedBatch, targets: RaggedBatch) -> Tensor:
        """[T, W]: what `last` makes those logits of."""

    @property
    def output_layer(self) -> tuple[Tensor, Tensor | None]:
        """A matrix [V, W], and a bias [V] or none."""

    def initial_state(self, sources: RaggedBatch) -> Seq2SeqState:
        """What is known of N targets when their sources have been read and nothing is written."""

    def step(self, tokens: Tensor, state: Seq2SeqState) -> tuple[Tensor, Seq2SeqState]:
        """[N, V] logits behind the [N] tokens that were written last, `start` at first; and what is known then."""

    def select_rows(self, state: Seq2SeqState, rows: Tensor) -> Seq2SeqState:
        """Of the sequences at [M] rows, in this order; one may come more than once."""

    def join_states(self, states: Sequence[Seq2SeqState]) -> Seq2SeqState:
        """Of all of their sequences, one state behind the other."""

    def attention_weights(self, state: Seq2SeqState) -> list[Tensor]:
        """For each of N sequences the weights [K] of its source's tokens in the last step; empty without attention."""
