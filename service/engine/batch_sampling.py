"""Samples the next tokens of all requests of a step in one batch: token masks, logits processors, sampling, scores.

A token is sampled from one row of logits and from the state of its own request alone, so its neighbours in the batch
change nothing.  One row may serve several requests (answers that start from one prompt), and one request may have
several rows (a draft).
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyhead.models.executors.contract import StepInput

from ..concurrency.outcome import Failure, attempt
from ..core.errors import PolyheadError
from .beam_groups import SearchStep
from .logits_processors import process_logits
from .request_state import RequestState
from .sampler import NO_SCORE, Sampler, SampleRow, TokenScore, score_tokens
from .scheduler import Chunk, TokenSequence

States = Mapping[TokenSequence, RequestState]  # the request of each scheduled sequence


def build_step_input(chunks: Sequence[Chunk], block_size: int) -> StepInput:
    """Concatenate the chunks to the input of an executor's step."""
    tokens: list[int] = []
    positions: list[int] = []
    output_rows: list[int] = []
    starts, tables = [0], []
    for chunk in chunks:
        sequence = chunk.sequence
        end = sequence.computed + chunk.count
        tokens += sequence.tokens[sequence.computed : end] + sequence.draft[: chunk.draft]
        positions += range(sequence.computed, end + chunk.draft)
        starts.append(len(tokens))
        tables.append(sequence.blocks[: -(-(end + chunk.draft) // block_size)])
        output_rows += range(len(tokens) - chunk.row_count, len(tokens))
    adapters = [chunk.sequence.adapter for chunk in chunks]
    sources = [chunk.sequence.source for chunk in chunks]
    return StepInput(
        tokens,
        positions,
        starts,
        tables,
        output_rows,
        adapters=adapters if any(adapters) else None,
        sources=sources if any(sources) else None,
    )


@dataclass(frozen=True, slots=True)
class PendingSample:
    """A token of `state` to be sampled from the logits in `row`.  It follows the tokens `accepted` in this step.

    Where the sampled token is the first of `draft`, the next row gives the token after it.
    """

    state: RequestState
    row: int
    draft: tuple[int, ...]
    accepted: tuple[int, ...] = ()

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is the argmax of the row: temperature 0, no processor, no mask, no scores."""
        request = self.state.request
        return (
            not request.sampling.temperature
            and request.logprobs < 0
            and not (self.state.processor or self.state.guide_state)
        )

    def to_sample_row(self, masks: "TokenMasks") -> SampleRow:
        state, request = self.state, self.state.request
        processor = None if state.processor is None else state.processor.after_drafts(self.accepted)
        mask = masks.bits[masks.row_of[state]] if state in masks.row_of else None
        return SampleRow(
            self.row, request.sampling, state.uniform_at(len(self.accepted)), processor, mask, request.logprobs
        )

    def next_position(self, token: int) -> "PendingSample":
        """The sample after the first token of the draft was accepted."""
        return PendingSample(self.state, self.row + 1, self.draft[1:], (*self.accepted, token))


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens may come next: a row of bits for each request with a guide, and the requests whose guide failed."""

    row_of: dict[RequestState, int] = field(default_factory=dict)
    bits: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
    failed: dict[RequestState, PolyheadError] = field(default_factory=dict)


class MaskBuilder:
    """Fills token masks on a thread of its own while the network computes."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guides")
        self._future: Future[TokenMasks] | None = None
        self._states: list[RequestState] = []

    def start(self, states: list[RequestState], vocab_size: int) -> None:
        """Start to fill masks of `vocab_size` bits; 0: the size is not known yet, and `wait` fills them."""
        self._states = states
        self._future = self._thread.submit(build_masks, states, vocab_size) if states and vocab_size else None

    def wait(self, vocab_size: int) -> TokenMasks:
        """The masks of the requests given to `start`."""
        return build_masks(self._states, vocab_size) if self._future is None else self._future.result()


def build_masks(states: Sequence[RequestState], vocab_size: int) -> TokenMasks:
    """Masks of `vocab_size` bits for `states`, each of which has a guide.

    A PolyheadError fails its request alone; any other error fails the step.
    """
    masks = TokenMasks(bits=np.zeros((len(states), -(-vocab_size // 32)), np.int32))
    for state in states:
        assert state.guide_state is not None
        row = len(masks.row_of)
        filled = attempt(partial(state.guide_state.fill_mask, masks.bits[row]))
        if isinstance(filled, Failure):
            if not isinstance(filled.error, PolyheadError):  # a fault of the server: the step fails
                raise filled.error
            masks.bits[row] = 0
            masks.failed[state] = filled.error
        elif filled:
            masks.row_of[state] = row
    return masks


def guided_states(chunks: Sequence[Chunk], states: States) -> list[RequestState]:
    """The requests that sample a token in this step and have a guide."""
    return [
        state
        for chunk in chunks
        if chunk.is_last
        for state in sampling_states(states[chunk.sequence])
        if state.guide_state is not None
    ]


def sampling_states(state: RequestState) -> list[RequestState]:
    """The requests that continue from `state`: itself and its followers; none for a beam search or where nothing is
    generated.
    """
    return [state, *state.followers] if state.search is None and state.request.max_tokens else []


def pending_samples(chunks: Sequence[Chunk], states: States, masks: TokenMasks) -> list[PendingSample]:
    return [
        PendingSample(state, chunk.next_token_row, tuple(chunk.sequence.draft[: chunk.draft]))
        for chunk in chunks
        if chunk.is_last
        for state in sampling_states(states[chunk.sequence])
        if state not in masks.failed
    ]


def sample_tokens(
    logits: Tensor, pending: list[PendingSample], argmax: Sequence[int] | None, masks: TokenMasks, sampler: Sampler
) -> dict[RequestState, list[tuple[int, TokenScore]]]:
    """The sampled tokens and scores of each request: one, and one more for each token of the draft that was accepted.

    `argmax` is that of each row of `logits` [M, V], -1 where the row is not finite; None where it is not
    known.
    """
    sampled: dict[RequestState, list[tuple[int, TokenScore]]] = {}
    while pending:
        greedy = [-1 if argmax is None or not sample.is_plain_greedy else argmax[sample.row] for sample in pending]
        rows = [sample.to_sample_row(masks) for sample, token in zip(pending, greedy, strict=True) if token < 0]
        others = iter(sampler.sample(logits, rows) if rows else ())
        for sample, token in zip(pending, greedy, strict=True):
            sampled.setdefault(sample.state, []).append((token, NO_SCORE) if token >= 0 else next(others))
        pending = [
            sample.next_position(token)
            for sample in pending
            if (token := sampled[sample.state][-1][0]) in sample.draft[:1]
        ]
    return sampled


def find_nonfinite(
    chunks: Sequence[Chunk],
    finite: Sequence[bool],
    tables: Sequence[Sequence[int]],
    nonfinite_blocks: AbstractSet[int],
) -> set[TokenSequence]:
    """The sequences whose logits, keys or values contain NaN or infinity.

    `finite` says of each row of logits whether it is finite, `nonfinite_blocks` are the cache blocks with such values.
    """
    return {
        chunk.sequence
        for chunk, table in zip(chunks, tables, strict=True)
        if not all(finite[chunk.first_row : chunk.first_row + chunk.row_count])
        or not nonfinite_blocks.isdisjoint(table)
    }


def score_prompt(chunk: Chunk, state: RequestState, logits: Tensor) -> list[TokenScore]:
    """The scores of those prompt tokens that follow the tokens of the chunk and have none yet."""
    sequence = chunk.sequence
    if sequence.computed >= sequence.scored_prefix:
        return []
    begin = max(sequence.computed, len(state.prompt_scores))
    rows = range(begin, min(sequence.computed + chunk.count, sequence.scored_prefix - 1))
    first = chunk.first_row - sequence.computed
    scored = logits[first + rows.start : first + rows.stop]
    tokens = [sequence.tokens[row + 1] for row in rows]
    return score_tokens(scored, tokens, [state.request.prompt_logprobs] * len(rows)) if rows else []


def advance_searches(
    chunks: Sequence[Chunk], states: States, logits: Tensor
) -> list[tuple[RequestState, dict[TokenSequence, Tensor], SearchStep | None]]:
    """For each beam search in the step: the logits [V] after some of its beams, and its next step once all beams have
    logits.
    """
    rows: dict[RequestState, dict[TokenSequence, Tensor]] = {}
    for chunk in chunks:
        state = states[chunk.sequence]
        if state.search is not None and chunk.is_last and state.request.max_tokens:
            rows.setdefault(state, {})[chunk.sequence] = logits[chunk.next_token_row].clone()
    return [(state, new_logits, advance_search(state, new_logits)) for state, new_logits in rows.items()]


def advance_search(state: RequestState, new_logits: Mapping[TokenSequence, Tensor]) -> SearchStep | None:
    """The next step of a beam search; None until the logits after all its beams are known."""
    search = state.search
    assert search is not None
    rows = [new_logits.get(beam.sequence, beam.logits) for beam in search.beams]
    found = [row for row in rows if row is not None]
    if len(found) < len(rows):
        return None
    logits = torch.stack(found)
    processors = [beam.processor and beam.processor.after_drafts(()) for beam in search.beams]
    return search.advance(logits, process_logits(logits.log_softmax(dim=-1), processors))
