"""The worker of decoder-only models: continuous batching, token by token.

Knows sequences, logits and tokens; no text, and of the cache only block numbers.  The one idea: a step is schedule,
compute, book, draw, answer, whatever mixture of prompts and talking sequences is in it.
"""

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from models.executor import Executor, Rows
from service.engine.blocks import Blocks
from service.engine.sampler import Scored, finite, sample, score
from service.engine.scheduler import Chunk, Plan, Scheduler, Sequence
from service.engine.worker import Answer, Rehearsal, Step, StepReport, Ticket
from service.errors import BadRequest, StepFailed
from service.request import Done, Failed, Generate, Request, Sampling, Task, Token

NOTHING = Plan([], 0, 0)


@dataclass(eq=False, slots=True)
class Talk:
    """A request and how far it has come."""

    ticket: Ticket
    request: Generate
    sequence: Sequence
    random: Random  # one number a token
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

    @property
    def busy(self) -> bool:
        return bool(self._talks)

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

    def submit(self, ticket: Ticket) -> None:
        request = ticket.request
        assert isinstance(request, Generate)
        sequence = Sequence(list(request.tokens))
        talk = Talk(ticket, request, sequence, Random(request.sampling.seed))
        self._talks[sequence] = self._by_ticket[ticket] = talk
        self._scheduler.add(sequence)

    def abort(self, ticket: Ticket) -> None:
        talk = self._by_ticket.get(ticket)
        if talk is not None:
            self._remove(talk)

    def step(self) -> Step:
        times = Times()
        plan = self._schedule(times)
        rows = lay_out(plan.chunks, self._blocks.size)
        talks = [self._talks[chunk.sequence] for chunk in plan.chunks if chunk.last]
        began = perf_counter()
        with torch.inference_mode():
            logits = self._executor.step(rows)  # [M, V], of those that have caught up
            whole = finite(logits)
            computed = perf_counter()
            good = [talk for talk, is_whole in zip(talks, whole, strict=True) if is_whole]
            drawn = draw(logits if len(good) == len(talks) else logits[torch.tensor(whole)], good)
        ended = perf_counter()
        padding = self._executor.padding(rows)
        # Nothing above has changed what anybody holds: whatever raises there, `fail` ends all these requests.
        answers = self._book([talk for talk, is_whole in zip(talks, whole, strict=True) if not is_whole])
        for talk, token, scored in drawn:
            answers += self._speak(talk, token, scored, times)
        return Step(answers, self._report(plan, padding, (computed - began, ended - computed), times))

    def fail(self) -> list[Answer]:
        """Ends the requests of the step; all there are, if it failed before it was known whose it was."""
        blamed = [self._talks[chunk.sequence] for chunk in self._plan.chunks] or list(self._talks.values())
        error = StepFailed("the step that computed this request failed")
        for talk in blamed:
            self._remove(talk)
        return [(talk.ticket, Failed(error)) for talk in blamed]

    def check(self) -> None:
        self._scheduler.check()

    def warm_up(self) -> None:
        """Lets four sequences catch up and talk, each drawn in another way, and forgets them."""
        for sampling in (Sampling(temperature=0), Sampling(), Sampling(top_p=0.9), Sampling(top_k=5, min_p=0.1)):
            length = max(1, min(32, self.capacity // 4))
            request = Generate("warm-up", (0,) * length, max_tokens=min(3, self.capacity - length), sampling=sampling)
            self.refuse(request)
            self.submit(Rehearsal(request))
        while self.busy:
            self.step()
        self._blocks.forget(range(self._blocks.count))

    def _schedule(self, times: Times) -> Plan:
        self._plan = NOTHING
        self._plan = plan = self._scheduler.schedule()
        now = perf_counter()
        for chunk in plan.chunks:
            talk = self._talks[chunk.sequence]
            if not talk.started:
                talk.started = True
                times.queue.append(now - talk.ticket.submitted)
        return plan

    def _book(self, broken: list[Talk]) -> list[Answer]:
        """What was computed counts.  Whose logits are no numbers end, and what they stored is found no more."""
        for talk in broken:
            self._blocks.forget(talk.sequence.blocks)
            self._remove(talk)
        chunks = self._plan.chunks
        self._scheduler.commit([chunk for chunk in chunks if chunk.sequence in self._talks] if broken else chunks)
        error = StepFailed(f"model {self.model!r} computed numbers that are not finite for this request")
        return [(talk.ticket, Failed(error)) for talk in broken]

    def _speak(self, talk: Talk, token: int, scored: Scored, times: Times) -> list[Answer]:
        if token in talk.request.stop_tokens:
            return [self._finish(talk, "stop", talk.completed + 1)]
        now = perf_counter()
        if talk.completed:
            times.inter_token.append(now - talk.spoke)
        else:
            times.first_token.append(now - talk.ticket.submitted)
        talk.spoke = now
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
    return Rows(tokens, positions, starts, tables, wanted)


def draw(logits: Tensor, talks: Listing[Talk]) -> list[tuple[Talk, int, Scored]]:
    """The next token of each row of `logits` [N, V], and its log-probability where that was asked for."""
    if not talks:
        return []
    tokens = sample(logits, [talk.request.sampling for talk in talks], [talk.random.random() for talk in talks])
    scores = score(logits, tokens, [talk.request.logprobs for talk in talks])
    return list(zip(talks, tokens, scores, strict=True))
