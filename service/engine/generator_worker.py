"""The worker of models that generate: continuous batching, token by token.

A step schedules chunks, computes them, commits what was computed, samples, and returns the events, whatever mixture of
prefilling and decoding sequences it has.  No state changes before all of it is computed, so a step that raises can be
computed again in halves (service.engine.fault_bisection).

An encoder-decoder may need much longer for a source than for a step.  A step prepares its sequences for
PREPARING_TURN_S at most and computes those that are prepared; the others wait for later ones.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from operator import attrgetter
from time import perf_counter

import torch
from torch import Tensor

from polyhead.models.core.turns import YieldTurn, keep_turn
from polyhead.models.executors.contract import Executor, PreparingExecutor, StepInput
from polyhead.models.network.lora import Lora

from ..core.errors import BadRequest, PolyheadError, StepFailed
from ..core.request import Done, Failed, Generate, GeneratedToken, PromptScores, Request, Sampling, Task
from .batch_sampling import (
    MaskBuilder,
    advance_searches,
    build_step_input,
    chunk_samples,
    find_nonfinite,
    guided_states,
    pending_samples,
    sample_tokens,
    score_prompt,
    use_slots,
)
from .block_allocator import BlockAllocator, BlockCopy
from .fault_bisection import FaultBisector
from .request_beams import SearchStep
from .request_groups import RequestGroups
from .request_state import RequestState, StepTimes
from .sampler import NO_SCORE, Sampler, TokenScore, TorchSampler, finite_rows
from .scheduler import Chunk, LayerCaches, Scheduler, StepPlan, TokenSequence, number_rows
from .speculation import DraftRequest, Speculation
from .state_slots import HeldSlots
from .window_blocks import HeldWindow
from .worker import HandleEvent, RequestHandle, StepReport, StepResult, WarmupRequest, deadline_error

EMPTY_PLAN = StepPlan([], 0, 0, [])
PREPARING_TURN_S = 0.1  # how long a step prepares sequences, but for the piece of work that ends it
MASK_WAIT_S = 0.02  # seconds that a step waits for masks after its network is computed
FORCED_TURN_S = 0.005  # seconds of a step after which it computes no more forced tokens: masks do
ALL_BANNED = "no token is allowed next: the constraints of the request exclude all of them"


def wants_prompt_scores(request: Request) -> bool:
    return isinstance(request, Generate) and request.prompt_logprobs >= 0


class GeneratorWorker:
    """Shares an executor and its cache among generation requests.

    A step computes at most `token_budget` tokens, at most `prefill_chunk` of one sequence, for at most
    `sequence_budget` sequences.  Tokens drafted by `speculation` are computed with them.
    """

    task: Task = "generate"

    def __init__(
        self,
        executor: Executor,
        *,
        model: str,
        token_budget: int = 512,
        sequence_budget: int = 64,
        prefill_chunk: int = 256,
    ) -> None:
        self.model = model
        self._executor = executor
        self._blocks = BlockAllocator(executor.block_count, executor.block_size)
        budgets = {"token_budget": token_budget, "sequence_budget": sequence_budget, "chunk": prefill_chunk}
        caches = LayerCaches(executor.state_count, executor.window_blocks, executor.window)
        self._groups = RequestGroups(Scheduler(self._blocks, **budgets, caches=caches))
        self._plan = EMPTY_PLAN  # of the current step
        self._copies: list[BlockCopy] = []  # to be made before the next step is computed
        self.speculation = Speculation(0, token_budget)  # drafts nothing, unless the loader replaces it
        self.sampler: Sampler = TorchSampler()  # replaced by the loader where there is a native one
        self._mask_builder = MaskBuilder()
        self._vocab_size = 0  # 0 until the first step
        self._bisector: FaultBisector[Chunk] = FaultBisector()
        self._forced_s = 0.0  # that the current step has computed forced tokens
        self._is_retry = False  # whether the current step is part of one that failed
        self._adapters: set[int] = set()

    is_background = False

    @property
    def has_work(self) -> bool:
        return len(self._groups.states) > len(self._groups.scheduler.paused)

    @property
    def capacity(self) -> int:
        """Tokens that fit in the whole cache."""
        return self._blocks.count * self._blocks.size

    def set_context_cost(self, cost: float) -> None:
        """Let chunks get smaller with their context, by the time of a token's attention to a token before it, in times
        of the token's other products."""
        self._groups.scheduler.context_cost = cost

    def validate(self, request: Request) -> None:
        assert isinstance(request, Generate)
        prompt, most = len(request.tokens) + len(request.source), request.max_tokens
        width = request.beams.width if request.beams is not None else 1
        if not request.tokens:
            raise BadRequest("the prompt has no tokens", param="prompt")
        if most < (request.prompt_logprobs < 0):
            raise BadRequest(f"max_tokens must be at least 1, not {most}", param="max_tokens")
        if width * (prompt + most) > self.capacity:
            times = f"{width} times " if width > 1 else ""
            raise BadRequest(
                f"{prompt} prompt tokens and max_tokens {most} make {times}{prompt + most}, "
                f"more than the {self.capacity} tokens the cache of {self.model!r} holds",
                param="max_tokens",
            )
        if width > (most := self._groups.scheduler.sequence_budget):
            raise BadRequest(f"best_of: {self.model!r} searches at most {most} wide, got {width}", param="best_of")

    def attach(self, lora: Lora, yield_turn: YieldTurn = keep_turn) -> int:
        """Add an adapter to the network.  Returns its number, which requests name it by and which is never reused.

        `yield_turn`: see models.executors.contract.Executor.attach.  Raises StepFailed where its logits are not
        finite, and what the executor raises.
        """
        number = self._executor.attach(lora, yield_turn)
        try:
            self._self_test(number)
        except StepFailed:
            self._executor.detach(number)
            raise
        self._adapters.add(number)
        return number

    def detach(self, number: int) -> None:
        """Remove an adapter."""
        self._adapters.discard(number)
        self._executor.detach(number)

    def submit(self, handle: RequestHandle) -> None:
        self._groups.add(handle)

    def abort(self, handle: RequestHandle) -> None:
        self._groups.abort(handle)
        if not self.has_work:
            self._mask_builder.keep(self._groups.requests)

    def pause(self, handle: RequestHandle) -> None:
        self._groups.pause(handle)

    def resume(self, handle: RequestHandle) -> None:
        self._groups.resume(handle)

    def expire(self, now: float) -> list[HandleEvent]:
        events: list[HandleEvent] = []
        for state in self._groups.expired(now):
            events += [(handle, Failed(deadline_error(handle, now))) for handle in state.handles if handle]
            self._groups.remove(state)
        if events:
            self._mask_builder.keep(self._groups.requests)
        return events

    def step(self) -> StepResult:
        planned, states = self._next_plan(), self._groups.states
        self._groups.begin(planned.chunks)
        self._mask_builder.keep(self._groups.requests)
        began = perf_counter()
        with torch.inference_mode():
            if self._copies:
                self._executor.copy(self._copies)
                self._copies = []
            # What waits for its mask is not prepared: it would be again, each time that its state is dropped meanwhile.
            chunks, preparing = self._without_late(planned.chunks), perf_counter()
            prepared, rows = self._prepare(chunks)
            plan = self._plan = replace(planned, chunks=prepared)
            if planned.chunks and not plan.chunks:
                seconds = perf_counter() - preparing if chunks else 0.0  # otherwise all answers wait for their masks
                return StepResult([], self._report(plan, 0, (seconds, 0.0), StepTimes()), [], began)
            if self._vocab_size:
                self._mask_builder.start(guided_states(plan.chunks, states), self._vocab_size)
            logits = self._executor.step(rows)  # [M, V]
            self._vocab_size = logits.size(1)
            argmax = self._executor.argmax
            finite = finite_rows(logits) if argmax is None else [token >= 0 for token in argmax]
            failed = find_nonfinite(plan.chunks, finite, rows.block_tables, self._executor.nonfinite_blocks)
            nonfinite = {states[sequence] for sequence in failed}
            computed = perf_counter()
            self._groups.scheduler.record_time(plan.chunks, computed - preparing)
            guided = guided_states(plan.chunks, states)
            self._mask_builder.start(guided, self._vocab_size)
            masks = self._mask_builder.wait(guided, MASK_WAIT_S)
            # A chunk whose masks are late takes no part: it is computed again, to the same bits, when they are filled.
            done = [chunk for chunk in plan.chunks if masks.late.isdisjoint(chunk_samples(chunk, states))]
            valid = [chunk for chunk in done if states[chunk.sequence] not in nonfinite]
            sampled = sample_tokens(logits, pending_samples(valid, states, masks), argmax, masks, self.sampler)
            scores = [score_prompt(chunk, states[chunk.sequence], logits) for chunk in valid]
            search_steps = advance_searches(valid, states, logits)
        ended = perf_counter()
        padding = self._executor.padding(rows)
        # Nothing above has changed any state: where it raises, the step can be tried again.
        without_mask = [state for state in guided_states(valid, states) if state in masks.failed]
        complete = [state for state in guided_states(valid, states) if state in masks.finished]
        self._mask_builder.forget(guided_states(done, states))
        started = self._take_started()
        times = StepTimes(queue=[began - state.submitted for state in started])
        if len(rows.output_rows) == len(rows.tokens):  # a step without prompts
            self.speculation.record_step(len(rows.tokens), computed - began)
        self._plan, self._forced_s = replace(plan, chunks=done), 0.0
        events = self._commit(nonfinite, plan.chunks)
        for chunk, scored in zip(valid, scores, strict=True):
            events += self._finish_prompt(chunk, scored)
        for state, tokens in sampled.items():
            events += self._append_tokens(state, tokens, times)
        for state, new_logits, search_step in search_steps:
            events += self._advance_search(state, new_logits, search_step, times)
        for state in without_mask:
            events += self._end_request(state, Failed(masks.failed[state]))
        for state in complete:
            events += self._end_request(state, state.done_event("stop"))
        self._mask_builder.resume()
        report = self._report(plan, padding, (computed - began, ended - computed), times)
        return StepResult(events, report, [handle for state in started for handle in state.handles if handle], began)

    def _prepare(self, chunks: list[Chunk]) -> tuple[list[Chunk], StepInput]:
        """Prepare chunks for a turn; return those that are prepared, and their rows.  The parts of a failed step have
        no turn's end, so that each is known to fail or not."""
        rows = self._build_rows(chunks)
        if not chunks or not isinstance(self._executor, PreparingExecutor):
            return chunks, rows
        preparation = self._executor.prepare(rows, inf if self._is_retry else PREPARING_TURN_S)
        self._groups.scheduler.charge_sources(chunks[n].sequence for n in preparation.begun)
        if not preparation.unfinished:
            return chunks, rows
        prepared = [chunk for n, chunk in enumerate(chunks) if n not in preparation.unfinished]
        return prepared, self._build_rows(prepared)

    def _build_rows(self, chunks: list[Chunk]) -> StepInput:
        number_rows(chunks)
        return build_step_input(chunks, self._blocks.size, self._groups.scheduler.windows)

    def _without_late(self, chunks: list[Chunk]) -> list[Chunk]:
        """The chunks that are computed: none whose masks a step before has waited for, and which are not filled yet.

        Where there is no other, wait for one of them, as long as any step waits.
        """
        builder, states = self._mask_builder, self._groups.states
        late = [state for state in guided_states(chunks, states) if builder.is_late(state)]
        if late and not any(set(late).isdisjoint(chunk_samples(chunk, states)) for chunk in chunks):
            builder.wait_for_any(late, MASK_WAIT_S)
        return [chunk for chunk in chunks if not any(map(builder.is_late, chunk_samples(chunk, states)))]

    def blame_failed_step(self) -> list[HandleEvent]:
        """End the request that makes the step fail, once it is alone.

        Where no chunk was planned: the last request in rank, or all requests if the scheduler raised.
        """
        if self._plan.chunks:
            sequences = [chunk.sequence for chunk in self._bisector.split(self._plan.chunks)]
        else:
            sequences = list(self._groups.states)
            sequences = sequences if self._plan is EMPTY_PLAN else [max(sequences, key=attrgetter("rank"))]
        blamed = dict.fromkeys(self._groups.states[sequence] for sequence in sequences)
        error = StepFailed("the step that computed this request failed")
        return [answer for state in blamed for answer in self._end_request(state, Failed(error))]

    def self_test(self) -> None:
        self._self_test(0)

    def _self_test(self, adapter: int) -> None:
        block, held, slots = list[int](), HeldSlots(), self._groups.scheduler.states
        window, windows = HeldWindow(), self._groups.scheduler.windows
        try:
            if not (self._blocks.allocate(block, 1) and windows.extend(window, 1)):
                return  # no block is free: the running sequences show whether the model computes
            slots.take_write(held)
            proof = StepInput(
                [0],
                [0],
                [0, 1],
                [block],
                [0],
                adapters=[adapter] if adapter else None,
                states=[use_slots(held)] if slots.count else None,
                window_tables=[windows.table(window, 1)] if windows.count else None,
            )
            if not all(finite_rows(self._executor.step(proof))):
                raise StepFailed("the logits after token 0 are not finite")
        finally:
            self._blocks.release(block)
            windows.release(window)
            slots.release(held)

    def check_invariants(self) -> None:
        self._groups.check()

    def warm_up(self, breathe: Callable[[], None] = lambda: None) -> None:
        """Run four requests, each sampled in another way, and clear the cache's keys."""
        for sampling in (Sampling(temperature=0), Sampling(), Sampling(top_p=0.9), Sampling(top_k=5, min_p=0.1)):
            length = max(1, min(8, self.capacity // 4))
            request = Generate("warm-up", (0,) * length, max_tokens=min(3, self.capacity - length), sampling=sampling)
            self.validate(request)
            self.submit(WarmupRequest(request))
        while self.has_work:
            self.step()
            breathe()
        self._groups.scheduler.unpublish_all()

    def _next_plan(self) -> StepPlan:
        """The next part of a failed step, or else a new plan."""
        self._plan, self._is_retry = EMPTY_PLAN, True
        while self._bisector:
            running = self._groups.scheduler.running
            chunks = [chunk for chunk in self._bisector.next_batch() if chunk.sequence in running]
            if chunks:
                self._plan = replace(EMPTY_PLAN, chunks=chunks)
                return self._plan
        self._is_retry = False
        self._speculate()
        self._plan = self._groups.schedule()
        self._copies += self._plan.copies
        assert self._plan.chunks, "the scheduler has planned no chunk although there is work"
        return self._plan

    def _speculate(self) -> None:
        """Set the drafts of decoding sequences."""
        running = self._groups.scheduler.running
        decoding = [sequence for sequence in running if sequence.uncomputed == 1 and sequence.computed]
        states = [
            state
            for state in map(self._groups.states.__getitem__, decoding)
            if state.may_draft and state.generated_count
        ]
        for state in states:
            state.draft_state = state.draft_state or self.speculation.track(state.sequence.tokens)
        requests = [
            DraftRequest(state.draft_state, state.remaining_tokens - 1, state.sequence.blocks)
            for state in states
            if state.draft_state
        ]
        drafts = self.speculation.draft(requests, len(decoding))
        for state, draft in zip(states, drafts, strict=True):
            state.sequence.draft = draft

    def _take_started(self) -> list[RequestState]:
        """The requests that take part in a step for the first time."""
        states = dict.fromkeys(self._groups.states[chunk.sequence] for chunk in self._plan.chunks)
        started = [state for state in states if not state.started]
        for state in started:
            state.started = True
        return started

    def _commit(self, nonfinite: set[RequestState], computed: Sequence[Chunk]) -> list[HandleEvent]:
        """Commit the plan's part of what was `computed`.  Requests with non-finite values end, and their blocks are not
        reused."""
        events: list[HandleEvent] = []
        error = StepFailed("the model computed numbers that are not finite for this request")
        for state in nonfinite:
            for sequence in state.sequences:
                self._groups.scheduler.unpublish(sequence)
            events += self._end_request(state, Failed(error))
        self._groups.commit(computed, self._plan.chunks)
        return events

    def _finish_prompt(self, chunk: Chunk, scores: Sequence[TokenScore]) -> list[HandleEvent]:
        """After a chunk of a prompt: keep its scores; after the last, start the requests that waited for the prompt."""
        state = self._groups.states[chunk.sequence]
        request = state.request
        state.prompt_scores += scores
        if not chunk.is_last or state.generated_count:
            return []
        events: list[HandleEvent] = []
        if request.prompt_logprobs >= 0:
            scored = PromptScores(tuple(state.prompt_scores))
            events += [(handle, scored) for handle in state.handles if handle and wants_prompt_scores(handle.request)]
        group = self._groups.start_followers(state)
        if not request.max_tokens:
            for one in group:
                events += self._end_request(one, state.done_event("length"))
        return events

    def _append_tokens(
        self, state: RequestState, sampled: Sequence[tuple[int, TokenScore]], times: StepTimes
    ) -> list[HandleEvent]:
        """Append the sampled tokens: one, and those after each draft token that was right, and then the forced ones."""
        sequence, events, accepted = state.sequence, list[HandleEvent](), 0
        draft, sequence.draft = sequence.draft, []
        for index, (token, score) in enumerate(sampled):
            events += self._append_token(state, token, score, times)
            if sequence not in self._groups.states:
                return events
            if index == len(sampled) - 1 or token != draft[index]:
                break
            accepted += 1
        times.accepted += accepted
        self._groups.accept_draft(state, accepted)
        return events + self._append_forced(state, times)

    def _append_forced(self, state: RequestState, times: StepTimes) -> list[HandleEvent]:
        """Append the tokens that the guide forces.  They have no logits yet, so not where scores are asked for."""
        events: list[HandleEvent] = []
        if state.guide_state is None or state.request.logprobs >= 0:  # forced tokens have no logits to be scored by
            return events
        began = perf_counter()
        try:
            forced = state.guide_state.forced_tokens(computes=self._forced_s < FORCED_TURN_S)
        except PolyheadError as error:
            return self._end_request(state, Failed(error))
        self._forced_s += perf_counter() - began
        for token in forced:
            events += self._append_token(state, token, NO_SCORE, times)
            if state.sequence not in self._groups.states:
                break
        return events

    def _append_token(self, state: RequestState, token: int, score: TokenScore, times: StepTimes) -> list[HandleEvent]:
        request = state.request
        if token < 0:
            return self._end_request(state, Failed(BadRequest(ALL_BANNED)))
        if token in request.stop_tokens:
            return self._end_request(state, state.done_event("stop", token))
        now = perf_counter()
        if state.generated_count:
            times.inter_token.append(now - state.last_token_at)
        else:
            times.first_token.append((now - state.submitted, request.terms.trace))
        state.last_token_at = now
        try:
            state.append_token(token)
        except PolyheadError as error:
            return self._end_request(state, Failed(error))
        event = GeneratedToken(token, *score, state.sequence.cached_tokens)
        events: list[HandleEvent] = [(handle, event) for handle in state.handles if handle]
        if state.guide_state is not None and state.guide_state.is_finished:
            events += self._end_request(state, state.done_event("stop"))
        elif state.generated_count == request.max_tokens:
            events += self._end_request(state, state.done_event("length"))
        return events

    def _advance_search(
        self,
        state: RequestState,
        new_logits: Mapping[TokenSequence, Tensor],
        search_step: SearchStep | None,
        times: StepTimes,
    ) -> list[HandleEvent]:
        search = state.search
        assert search is not None
        for beam in search.beams:
            beam.logits = new_logits.get(beam.sequence, beam.logits)
        if search_step is None:
            return []
        search.answers = search_step.answers
        if search_step.continuations:
            self._groups.replace_beams(state, search_step)
            return []
        times.first_token.append((perf_counter() - state.submitted, state.request.terms.trace))
        events: list[HandleEvent] = []
        for index, handle in enumerate(state.handles):
            ranked_events = search.answer_events(index) or [Failed(BadRequest(ALL_BANNED))]
            events += [(handle, event) for event in ranked_events if handle]
        self._groups.remove(state)
        return events

    def _end_request(self, state: RequestState, event: Done | Failed) -> list[HandleEvent]:
        handles = state.handles
        self._groups.remove(state)
        return [(handle, event) for handle in handles if handle]

    def _report(self, plan: StepPlan, padding: int, seconds: tuple[float, float], times: StepTimes) -> StepReport:
        scheduler = self._groups.scheduler
        return StepReport(
            model=self.model,
            task=self.task,
            sequences=len(plan.chunks),
            tokens=sum(chunk.count + chunk.draft for chunk in plan.chunks),
            padding=padding,
            forward_s=seconds[0],
            sample_s=seconds[1],
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            drafted=sum(chunk.draft for chunk in plan.chunks),
            accepted=times.accepted,
            adapters=Counter(each.adapter for each in scheduler.running if each.adapter) if self._adapters else {},
            blocks_total=self._blocks.count,
            blocks_used=self._blocks.used_count,
            window_blocks_total=scheduler.windows.count,
            window_blocks_used=scheduler.windows.used_count if scheduler.windows.count else 0,
            states_total=scheduler.states.count,
            states_used=scheduler.states.used_count,
            states_cached=scheduler.states.cached_count,
            preemptions=plan.preemptions,
            cached_tokens=plan.cached_tokens,
            queue_s=times.queue,
            first_token_s=times.first_token,
            inter_token_s=times.inter_token,
        )
