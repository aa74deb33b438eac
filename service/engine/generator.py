"""The worker of decoder-only models: continuous batching, token by token.

Knows sequences, logits and tokens; no text, and of the cache only block numbers.  The one idea: a step is schedule,
compute, book, draw, answer, whatever mixture of prompts and talking sequences is in it.  Nothing is booked before all
of it is computed, so a step that raises is computed again in halves (`trials`), and fails whom it must.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from models.executor import Executor, Rows
from models.lora import Lora
from service.engine.blocks import Blocks
from service.engine.sampler import Scored, finite, sample, score
from service.engine.scheduler import Chunk, Plan, Scheduler, Sequence
from service.engine.trials import Trials
from service.engine.worker import Answer, Rehearsal, Step, StepReport, Ticket, too_late
from service.errors import BadRequest, StepFailed
from service.request import Done, Failed, Generate, Request, Sampling, Task, Token

NOTHING = Plan([], 0, 0)


@dataclass(eq=False, slots=True)
class Talk:
    """A request and how far it has come."""

    ticket: Ticket
    request: Generate
    sequence: Sequence
    random: Random
    uniform: float  # what its next token is drawn with: one number a token, however often a step is tried
    started: bool = False
    spoke: float = 0.0  # when its last token was drawn

    @property
    def completed(self) -> int:
        return len(self.sequence.tokens) - len(self.request.tokens)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, collected over one step."""

    queue: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    inter_token: list[float] = field(default_factory=list)


class Generator:
    """Shares an executor with a cache among requests to continue tokens.

    A step computes at most `token_budget` tokens, at most `prefill_chunk` of one sequence, for at most
    `sequence_budget` sequences.
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
        self._blocks = Blocks(executor.block_count, executor.block_size)
        self._scheduler = Scheduler(
            self._blocks, token_budget=token_budget, sequence_budget=sequence_budget, chunk=prefill_chunk
        )
        self._talks: dict[Sequence, Talk] = {}
        self._by_ticket: dict[Ticket, Talk] = {}
        self._plan = NOTHING  # of the step in progress
        self._trials: Trials[Chunk] = Trials()
        self._adapters: set[int] = set()

    @property
    def busy(self) -> bool:
        return len(self._talks) > len(self._scheduler.held)

    @property
    def capacity(self) -> int:
        """Tokens that fit in the whole cache."""
        return self._blocks.count * self._blocks.size

    def refuse(self, request: Request) -> None:
        assert isinstance(request, Generate)
        prompt, most = len(request.tokens), request.max_tokens
        if not prompt:
            raise BadRequest("the prompt has no tokens", param="prompt")
        if most < 1:
            raise BadRequest(f"max_tokens must be at least 1, not {most}", param="max_tokens")
        if prompt + most > self.capacity:
            raise BadRequest(
                f"{prompt} prompt tokens and max_tokens {most} make {prompt + most}, "
                f"more than the {self.capacity} tokens the cache of {self.model!r} holds",
                param="max_tokens",
            )

    def attach(self, lora: Lora) -> int:
        """Lay an adapter beside the network: requests name it by this number, never given again.

        Raises StepFailed where what it computes is no number, and what the executor raises.
        """
        number = self._executor.attach(lora)
        try:
            self._prove(number)
        except StepFailed:
            self._executor.detach(number)
            raise
        self._adapters.add(number)
        return number

    def detach(self, number: int) -> None:
        """Nothing of it is here any more."""
        self._adapters.discard(number)
        self._executor.detach(number)

    def submit(self, ticket: Ticket) -> None:
        request = ticket.request
        assert isinstance(request, Generate)
        terms = request.terms
        sequence = Sequence(list(request.tokens), terms.owner, terms.priority, terms.deadline, request.adapter)
        numbers = Random(request.sampling.seed)
        talk = Talk(ticket, request, sequence, numbers, numbers.random())
        self._talks[sequence] = self._by_ticket[ticket] = talk
        self._scheduler.add(sequence)

    def abort(self, ticket: Ticket) -> None:
        talk = self._by_ticket.get(ticket)
        if talk is not None:
            self._remove(talk)

    def hold(self, ticket: Ticket) -> None:
        talk = self._by_ticket.get(ticket)
        if talk is not None:
            self._scheduler.hold(talk.sequence)

    def resume(self, ticket: Ticket) -> None:
        talk = self._by_ticket.get(ticket)
        if talk is not None:
            self._scheduler.resume(talk.sequence)

    def expire(self, now: float) -> list[Answer]:
        late = [self._talks[sequence] for sequence in self._scheduler.expired(now)]
        for talk in late:
            self._remove(talk)
        return [(talk.ticket, Failed(too_late(talk.ticket, now))) for talk in late]

    def step(self) -> Step:
        plan = self._next_plan()
        rows = lay_out(plan.chunks, self._blocks.size)
        caught_up = [self._talks[chunk.sequence] for chunk in plan.chunks if chunk.last]
        began = perf_counter()
        with torch.inference_mode():
            logits = self._executor.step(rows)  # [M, V], of those that have caught up
            likeliest = self._executor.likeliest
            whole = finite(logits) if likeliest is None else [token >= 0 for token in likeliest]
            spoiled = self._spoiled(rows, caught_up, whole)
            computed = perf_counter()
            good = [talk for talk in caught_up if talk not in spoiled]
            if len(good) < len(caught_up):
                logits, likeliest = logits[[talk not in spoiled for talk in caught_up]], None
            drawn = draw(logits, good, likeliest)
        ended = perf_counter()
        padding = self._executor.padding(rows)
        # Nothing above has changed what anybody holds: whatever raises there, the step can be tried again.
        times = self._started(began)
        answers = self._book(spoiled)
        for talk, token, scored in drawn:
            answers += self._speak(talk, token, scored, times)
        return Step(answers, self._report(plan, padding, (computed - began, ended - computed), times))

    def fail(self) -> list[Answer]:
        """Ends the request that spoiled the step, once it stands alone; all, if it is not known whose step it was."""
        chunks = self._plan.chunks
        guilty = self._trials.failed(chunks)
        blamed = [self._talks[chunk.sequence] for chunk in guilty] if chunks else list(self._talks.values())
        error = StepFailed("the step that computed this request failed")
        for talk in blamed:
            self._remove(talk)
        return [(talk.ticket, Failed(error)) for talk in blamed]

    def prove(self) -> None:
        self._prove(0)

    def _prove(self, adapter: int) -> None:
        block: list[int] = []
        if not self._blocks.grow(block, 1):
            return  # those who hold the cache are the proof
        try:
            proof = Rows([0], [0], [0, 1], [block], [0], adapters=[adapter] if adapter else None)
            if not all(finite(self._executor.step(proof))):
                raise StepFailed("the logits after token 0 are not finite")
        finally:
            self._blocks.release(block)

    def check(self) -> None:
        self._scheduler.check()

    def warm_up(self, breathe: Callable[[], None] = lambda: None) -> None:
        """Lets four sequences catch up and talk, each drawn in another way, and forgets them."""
        for sampling in (Sampling(temperature=0), Sampling(), Sampling(top_p=0.9), Sampling(top_k=5, min_p=0.1)):
            length = max(1, min(8, self.capacity // 4))
            request = Generate("warm-up", (0,) * length, max_tokens=min(3, self.capacity - length), sampling=sampling)
            self.refuse(request)
            self.submit(Rehearsal(request))
        while self.busy:
            self.step()
            breathe()
        self._blocks.forget(range(self._blocks.count))

    def _next_plan(self) -> Plan:
        """What is left of a step that failed, or else the next."""
        self._plan = NOTHING
        while self._trials:
            chunks = [chunk for chunk in self._trials.next() if chunk.sequence in self._scheduler.running]
            if chunks:
                self._plan = Plan(chunks, 0, 0)
                return self._plan
        self._plan = self._scheduler.schedule()
        return self._plan

    def _started(self, now: float) -> Times:
        """How long those waited who took part in a step for the first time."""
        times = Times()
        for chunk in self._plan.chunks:
            talk = self._talks[chunk.sequence]
            if not talk.started:
                talk.started = True
                times.queue.append(now - talk.ticket.submitted)
        return times

    def _spoiled(self, rows: Rows, caught_up: Listing[Talk], whole: Listing[bool]) -> set[Talk]:
        """Those of whom logits, keys or values are no numbers."""
        spoiled = {talk for talk, is_whole in zip(caught_up, whole, strict=True) if not is_whole}
        if poisoned := self._executor.poisoned:
            for chunk, table in zip(self._plan.chunks, rows.tables, strict=True):
                if not poisoned.isdisjoint(table):
                    spoiled.add(self._talks[chunk.sequence])
        return spoiled

    def _book(self, spoiled: set[Talk]) -> list[Answer]:
        """What was computed counts.  Who is spoiled ends, and what it stored is found no more."""
        for talk in spoiled:
            self._blocks.forget(talk.sequence.blocks)
            self._remove(talk)
        chunks = self._plan.chunks
        self._scheduler.commit([chunk for chunk in chunks if chunk.sequence in self._talks] if spoiled else chunks)
        error = StepFailed(f"model {self.model!r} computed numbers that are not finite for this request")
        return [(talk.ticket, Failed(error)) for talk in spoiled]

    def _speak(self, talk: Talk, token: int, scored: Scored, times: Times) -> list[Answer]:
        if token in talk.request.stop_tokens:
            return [self._finish(talk, "stop", talk.completed + 1)]
        now = perf_counter()
        if talk.completed:
            times.inter_token.append(now - talk.spoke)
        else:
            times.first_token.append(now - talk.ticket.submitted)
        talk.spoke, talk.uniform = now, talk.random.random()
        talk.sequence.tokens.append(token)
        answers: list[Answer] = [(talk.ticket, Token(token, *scored, talk.sequence.cached))]
        if talk.completed == talk.request.max_tokens:
            answers.append(self._finish(talk, "length", talk.completed))
        return answers

    def _finish(self, talk: Talk, reason: Literal["stop", "length"], completed: int) -> Answer:
        self._remove(talk)
        return talk.ticket, Done(reason, len(talk.request.tokens), completed, talk.sequence.cached)

    def _remove(self, talk: Talk) -> None:
        self._scheduler.remove(talk.sequence)
        del self._talks[talk.sequence], self._by_ticket[talk.ticket]

    def _running_of(self) -> Counter[int]:
        """How many run with each adapter."""
        return Counter(sequence.adapter for sequence in self._scheduler.running if sequence.adapter)

    def _report(self, plan: Plan, padding: int, seconds: tuple[float, float], times: Times) -> StepReport:
        return StepReport(
            model=self.model,
            task=self.task,
            sequences=len(plan.chunks),
            tokens=sum(chunk.count for chunk in plan.chunks),
            padding=padding,
            forward_s=seconds[0],
            sample_s=seconds[1],
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            adapters=self._running_of() if self._adapters else {},
            blocks_total=self._blocks.count,
            blocks_used=self._blocks.used,
            preemptions=plan.preemptions,
            cached_tokens=plan.cached_tokens,
            queue_s=times.queue,
            first_token_s=times.first_token,
            inter_token_s=times.inter_token,
        )


def lay_out(chunks: Listing[Chunk], block_size: int) -> Rows:
    """The chunks end to end, as an executor wants them: logits are wanted where a sequence catches up."""
    tokens: list[int] = []
    positions: list[int] = []
    starts, tables, wanted = [0], [], []
    for chunk in chunks:
        sequence = chunk.sequence
        end = sequence.computed + chunk.count
        tokens += sequence.tokens[sequence.computed : end]
        positions += range(sequence.computed, end)
        starts.append(end - sequence.computed + starts[-1])
        tables.append(sequence.blocks[: -(-end // block_size)])
        if chunk.last:
            wanted.append(starts[-1] - 1)
    adapters = [chunk.sequence.adapter for chunk in chunks]
    return Rows(tokens, positions, starts, tables, wanted, adapters=adapters if any(adapters) else None)


def draw(logits: Tensor, talks: Listing[Talk], likeliest: Listing[int] | None) -> list[tuple[Talk, int, Scored]]:
    """The next token of each row of `logits` [N, V], and its log-probability where that was asked for."""
    if not talks:
        return []
    samplings = [talk.request.sampling for talk in talks]
    tokens = sample(logits, samplings, [talk.uniform for talk in talks], likeliest)
    scores = score(logits, tokens, [talk.request.logprobs for talk in talks])
    return list(zip(talks, tokens, scores, strict=True))
