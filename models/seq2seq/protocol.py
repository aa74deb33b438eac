"""The protocol of encoder-decoders, recurrent networks and transformers alike (Sutskever et al. 2014, arXiv:1409.3215;
Cho et al. 2014, arXiv:1406.1078).

The decoding state of N sequences is one object whose rows can be selected, repeated and joined. So a step of beam
search is a selection, and a new sequence enters a batch by a join.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ..network.ragged import RaggedBatch
from ..network.work_pieces import Pieces

Seq2SeqState = Any  # of N sequences; its structure depends on the network


class Seq2Seq(Protocol):
    """An encoder-decoder over one vocabulary of V tokens; generated tokens come after `start_token`."""

    @property
    def start_token(self) -> int:
        """The token before the first generated one."""

    def __call__(self, sources: RaggedBatch, targets: RaggedBatch) -> Tensor:
        """[T, V] logits of the next token for each of T rows of N targets, each of which begins with `start_token`,
        given the tokens before it (teacher forcing, Williams and Zipser 1989)."""

    def readout(self, sources: RaggedBatch, targets: RaggedBatch) -> Tensor:
        """[T, W] the input of the output layer."""

    @property
    def output_layer(self) -> tuple[Tensor, Tensor | None]:
        """The output matrix [V, W], and a bias [V] or None."""

    def initial_state(self, sources: RaggedBatch) -> Seq2SeqState:
        """The state of N targets after their sources are encoded, before the first token."""

    def initial_state_in_pieces(self, sources: RaggedBatch) -> Pieces[Seq2SeqState]:
        """As `initial_state`, in pieces of work between which the thread can do other work."""

    def step(self, tokens: Tensor, state: Seq2SeqState) -> tuple[Tensor, Seq2SeqState]:
        """[N, V] logits after the last [N] tokens (`start_token` at first), and the new state."""

    def select_rows(self, state: Seq2SeqState, rows: Tensor) -> Seq2SeqState:
        """The state of the sequences at [M] rows, in this order; a row may occur more than once."""

    def join_states(self, states: Sequence[Seq2SeqState]) -> Seq2SeqState:
        """The state of all their sequences, one state after the other."""

    def attention_weights(self, state: Seq2SeqState) -> list[Tensor]:
        """For each of N sequences the weights [K] of its source tokens in the last step; empty without attention."""
