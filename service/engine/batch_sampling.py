"""Samples the next tokens of all requests of a step in one batch: token masks, logits processors, sampling, scores.

A token is sampled from one row of logits and from the state of its own request alone, so its neighbours in the batch
change nothing.  One row may serve several requests (answers that start from one prompt), and one request may have
several rows (a draft).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Condition
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyhead.models.executors.contract import StateUse, StepInput

from ..concurrency.fair_queue import FairQueue
from ..concurrency.outcome import RETRY_S, Failure, attempt, submit
from ..core.errors import PolyheadError, Unavailable
from ..core.guide import GuideBusy, GuideFinished
from .logits_processors import process_logits
from .request_beams import SearchStep
from .request_state import RequestState
from .sampler import NO_SCORE, Sampler, SampleRow, TokenScore, score_targets, score_tokens
from .scheduler import Chunk, TokenSequence
from .state_slots import NO_SLOT, HeldSlots
from .window_blocks import WindowBlocks

States = Mapping[TokenSequence, RequestState]  # the request of each scheduled sequence


def build_step_input(chunks: Sequence[Chunk], block_size: int, windows: WindowBlocks) -> StepInput:
    """Concatenate the chunks to the input of an executor's step."""
    window_tables: list[list[int]] = []
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
        if windows.count:
            window_tables.append(windows.table(sequence.window, end + chunk.draft))
        output_rows += range(len(tokens) - chunk.row_count, len(tokens))
    adapters = [chunk.sequence.adapter for chunk in chunks]
    sources = [chunk.sequence.source for chunk in chunks]
    held = [chunk.sequence.slots for chunk in chunks]
    return StepInput(
        tokens,
        positions,
        starts,
        tables,
        output_rows,
        adapters=adapters if any(adapters) else None,
        sources=sources if any(sources) else None,
        states=[use_slots(slots) for slots in held] if any(slots.write != NO_SLOT for slots in held) else None,
        window_tables=window_tables or None,
    )


def use_slots(held: HeldSlots) -> StateUse:
    return StateUse(held.current, held.write, held.border_rows, held.border)


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
    """Which tokens may come next: a row of bits for each request with a guide, the requests whose guide failed, those
    whose answer is complete, and those whose mask takes longer than the step waits.
    """

    row_of: dict[RequestState, int] = field(default_factory=dict)
    bits: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
    failed: dict[RequestState, PolyheadError] = field(default_factory=dict)
    finished: set[RequestState] = field(default_factory=set)
    late: set[RequestState] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class MaskJob:
    """The next mask of a request.  `outcome`: whether there are forbidden tokens, or an error; set when it is done."""

    state: RequestState
    bits: NDArray[np.int32]
    outcome: bool | Failure | None = None

    @property
    def owner(self) -> str:
        return self.state.request.terms.owner


class MaskBuilder:
    """Fills token masks on a thread of its own while the network computes.

    Owners take turns, by seconds.  The thread fills no mask while tokens are sampled and appended: from the end of
    `wait` until `start` or `resume`.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guides")
        self._changed = Condition()
        self._jobs: dict[RequestState, MaskJob] = {}  # one for each request, until its token is sampled
        self._queue: FairQueue[MaskJob] = FairQueue()
        self._may_fill = self._is_filling = False

    def start(self, states: Iterable[RequestState], vocab_size: int) -> None:
        """Fill the masks of `states` that were not started yet, with `vocab_size` bits, and go on with all others."""
        with self._changed:
            for state in states:
                if state not in self._jobs:
                    job = self._jobs[state] = MaskJob(state, np.zeros(-(-vocab_size // 32), np.int32))
                    self._enqueue(job)
            self.resume()

    def resume(self) -> None:
        with self._changed:
            self._may_fill = True
            if self._queue and not self._is_filling:
                try:
                    submit(self._thread, self._fill_masks)
                    self._is_filling = True
                except Unavailable as error:
                    self._fail_queued(error.message)

    def _fail_queued(self, why: str) -> None:
        """Fail the requests whose masks wait: there is no thread.  The caller has the lock."""
        while (job := self._queue.peek()) is not None:
            self._queue.remove(job)
            job.outcome = Failure(Unavailable(why, retry_after=RETRY_S))
        self._changed.notify_all()

    def is_late(self, state: RequestState) -> bool:
        """Whether the mask was started and is not filled yet."""
        job = self._jobs.get(state)
        return job is not None and job.outcome is None

    def wait_for_any(self, states: Collection[RequestState], seconds: float) -> None:
        """Wait until the mask of one of `states` is filled."""
        with self._changed:
            self.resume()
            self._changed.wait_for(lambda: not all(map(self.is_late, states)), seconds)

    def wait(self, states: Sequence[RequestState], seconds: float) -> TokenMasks:
        """The masks of `states`, which were all started, as far as they are filled within `seconds`.

        A PolyheadError fails its request alone; any other error is raised, and fails the step.
        """
        with self._changed:
            self._changed.wait_for(lambda: not any(map(self.is_late, states)), seconds)
            self._may_fill = False
        jobs = [self._jobs[state] for state in states]
        masks = TokenMasks(bits=np.zeros((len(jobs), jobs[0].bits.size if jobs else 0), np.int32))
        for job in jobs:
            if job.outcome is None:
                masks.late.add(job.state)
            elif not isinstance(job.outcome, Failure):
                if job.outcome:
                    row = masks.row_of[job.state] = len(masks.row_of)
                    masks.bits[row] = job.bits
            elif isinstance(job.outcome.error, GuideFinished):
                masks.finished.add(job.state)
            elif isinstance(job.outcome.error, PolyheadError):
                masks.failed[job.state] = job.outcome.error
            else:  # a fault of the server: the step fails, and may be tried again
                self.forget([job.state])
                raise job.outcome.error
        return masks

    def forget(self, states: Iterable[RequestState]) -> None:
        """The next token of `states` was sampled."""
        with self._changed:
            for state in states:
                self._drop(state)

    def keep(self, states: Callable[[], Collection[RequestState]]) -> None:
        """Forget all but `states`: the others have ended."""
        if self._jobs:
            present = states()
            self.forget([state for state in self._jobs if state not in present])

    def _drop(self, state: RequestState) -> None:
        job = self._jobs.pop(state, None)
        if job is not None and job in self._queue:
            self._queue.remove(job)

    def _enqueue(self, job: MaskJob) -> None:
        self._queue.add(job, job.owner, job.state.request.terms.priority)

    def _fill_masks(self) -> None:
        """Fill masks until there is none left, or none may be filled."""
        while True:
            with self._changed:
                job = self._queue.peek() if self._may_fill else None
                if job is None:
                    self._is_filling = False
                    return
                self._queue.remove(job)
            guide_state = job.state.guide_state
            assert guide_state is not None
            began = perf_counter()
            outcome = attempt(partial(guide_state.fill_mask, job.bits))
            with self._changed:
                self._queue.charge(job.owner, perf_counter() - began)
                if isinstance(outcome, Failure) and isinstance(outcome.error, GuideBusy):
                    outcome.error.ready.add_done_callback(partial(self._try_again, job))
                else:
                    job.outcome = outcome
                    self._changed.notify_all()

    def _try_again(self, job: MaskJob, _: "Future[object]") -> None:
        with self._changed:
            if self._jobs.get(job.state) is job:
                self._enqueue(job)
                if self._may_fill:
                    self.resume()


def guided_states(chunks: Sequence[Chunk], states: States) -> list[RequestState]:
    """The requests that sample a token in this step and have a guide."""
    return [state for chunk in chunks for state in chunk_samples(chunk, states) if state.guide_state is not None]


def chunk_samples(chunk: Chunk, states: States) -> list[RequestState]:
    """The requests that sample a token from the chunk."""
    return sampling_states(states[chunk.sequence]) if chunk.is_last else []


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
        if state not in masks.failed and state not in masks.finished
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
            found = (token, NO_SCORE) if token >= 0 else next(others)
            if targets := sample.state.request.targets:
                found = found[0], score_targets(logits[sample.row], found[0], targets)
            sampled.setdefault(sample.state, []).append(found)
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
