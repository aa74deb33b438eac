"""The worker of decoder-only models: continuous batching, token by token.

Knows sequences, logits and tokens; no text, and of the cache only block numbers.  The one idea: a step is schedule,
compute, book, draw, answer, whatever mixture of prompts and talking sequences is in it.  Nothing is booked before all
of it is computed, so a step that raises is computed again in halves (`trials`), and fails whom it must.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from polyhead.models.executors.contract import Executor, Rows
from polyhead.models.network.lora import Lora

from ..core.errors import BadRequest, PolyheadError, StepFailed
from ..core.request import Done, Failed, Generate, Prompted, Request, Sampling, Task, Token
from .batch_sampling import Masking, Slice, drawn, guided, lay_out, prompt_scores, slices_of, spoiled_of, turns
from .beam_groups import Turn
from .block_allocator import Blocks, Copy
from .fault_bisection import Trials
from .request_groups import Company
from .request_state import Talk, Times
from .sampler import UNSCORED, Sampler, Scored, Sorted, finite
from .scheduler import Chunk, Plan, Scheduler, Sequence
from .speculation import Speculation, Wish
from .worker import Answer, Rehearsal, Step, StepReport, Ticket, too_late

NOTHING = Plan([], 0, 0, [])
NONE_LEFT = "no token is left that may come next: what must, and what must not, leaves none"


class Generator:
    """Shares an executor with a cache among requests to continue tokens.

    A step computes at most `token_budget` tokens, at most `prefill_chunk` of one sequence, for at most
    `sequence_budget` sequences.  What `speculation` foretells of answers is tried with them.
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
        self._company = Company(self._scheduler)
        self._plan = NOTHING  # of the step in progress
        self._copies: list[Copy] = []  # to be made before anything is computed
        self.speculation = Speculation(0, token_budget)  # nothing is foretold, unless another one is put here
        self.sampler: Sampler = Sorted()  # torch draws, unless another one is put here
        self._masking = Masking()
        self._words = 0  # of the vocabulary, once logits were seen
        self._trials: Trials[Chunk] = Trials()
        self._adapters: set[int] = set()

    patient = False

    @property
    def busy(self) -> bool:
        return len(self._company.talks) > len(self._scheduler.held)

    @property
    def capacity(self) -> int:
        """Tokens that fit in the whole cache."""
        return self._blocks.count * self._blocks.size

    def refuse(self, request: Request) -> None:
        assert isinstance(request, Generate)
        prompt, most = len(request.tokens) + len(request.source), request.max_tokens
        width = request.beams.width if request.beams is not None else 1
        if not request.tokens:
            raise BadRequest("the prompt has no tokens", param="prompt")
        if most < (request.prompt_logprobs < 0):
            raise BadRequest(f"max_tokens must be at least 1, not {most}", param="max_tokens")
        if min(request.named, default=0) < 0:  # the sampler indexes rows of logits with them
            raise BadRequest("a token has a number below 0; numbers of tokens begin at 0", param="logit_bias")
        if width * (prompt + most) > self.capacity:
            times = f"{width} times " if width > 1 else ""
            raise BadRequest(
                f"{prompt} prompt tokens and max_tokens {most} make {times}{prompt + most}, "
                f"more than the {self.capacity} tokens the cache of {self.model!r} holds",
                param="max_tokens",
            )
        if width > self._scheduler.sequence_budget:
            most = self._scheduler.sequence_budget
            raise BadRequest(f"best_of: {self.model!r} searches at most {most} wide, got {width}", param="best_of")

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
        self._company.enter(ticket)

    def abort(self, ticket: Ticket) -> None:
        self._company.leave(ticket)

    def hold(self, ticket: Ticket) -> None:
        if talk := self._company.talk_of(ticket):
            self._scheduler.hold(talk.sequence)

    def resume(self, ticket: Ticket) -> None:
        if talk := self._company.talk_of(ticket):
            self._scheduler.resume(talk.sequence)

    def expire(self, now: float) -> list[Answer]:
        answers: list[Answer] = []
        for sequence in self._scheduler.expired(now):
            if sequence in self._company.talks:  # and not ended with another of its talk's
                talk = self._company.talks[sequence]
                late = [(ticket, Failed(too_late(ticket, now))) for ticket in talk.tickets if ticket]
                self._company.remove(talk)
                answers += late
        return answers

    def step(self) -> Step:
        plan = self._next_plan()
        slices = slices_of(plan.chunks, self._company.talks)
        rows = lay_out(slices, self._blocks.size)
        began = perf_counter()
        with torch.inference_mode():
            if self._copies:
                self._executor.copy(self._copies)
                self._copies = []
            self._masking.start(guided(slices), self._words)
            logits = self._executor.step(rows)  # [M, V]
            self._words = logits.size(1)
            likeliest = self._executor.likeliest
            whole = finite(logits) if likeliest is None else [token >= 0 for token in likeliest]
            spoiled = spoiled_of(slices, whole, rows.tables, self._executor.poisoned)
            good = [each for each in slices if each.talk not in spoiled]
            computed = perf_counter()
            masks = self._masking.ready(self._words)
            said = drawn(logits, good, likeliest, masks, self.sampler)
            scores = [prompt_scores(each, logits) for each in good]
            turned = turns(good, logits)
        ended = perf_counter()
        padding = self._executor.padding(rows)
        # Nothing above has changed what anybody holds: whatever raises there, the step can be tried again.
        times = self._started(began)
        if len(rows.wanted) == len(rows.tokens):  # without prompts
            self.speculation.learn(len(rows.tokens), computed - began)
        answers = self._book(spoiled)
        for each, scored in zip(good, scores, strict=True):
            answers += self._caught_up(each, scored)
        for talk, tokens in said.items():
            answers += self._say(talk, tokens, times)
        for talk, known, turn in turned:
            answers += self._search(talk, known, turn, times)
        for talk, error in masks.failed.items():
            answers += self._end(talk, Failed(error))
        return Step(answers, self._report(plan, padding, (computed - began, ended - computed), times))

    def fail(self) -> list[Answer]:
        """Ends the request that spoiled the step, once it stands alone; all, if it is not known whose step it was."""
        chunks = self._plan.chunks
        guilty = self._trials.failed(chunks)
        sequences = [chunk.sequence for chunk in guilty] if chunks else list(self._company.talks)
        blamed = dict.fromkeys(self._company.talks[sequence] for sequence in sequences)
        error = StepFailed("the step that computed this request failed")
        return [answer for talk in blamed for answer in self._end(talk, Failed(error))]

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
        self._company.check()

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
                self._plan = replace(NOTHING, chunks=chunks)
                return self._plan
        self._foretell()
        self._plan = self._scheduler.schedule()
        self._copies += self._plan.copies
        return self._plan

    def _foretell(self) -> None:
        """What may be the next tokens of those who talk."""
        talking = [sequence for sequence in self._scheduler.running if sequence.behind == 1 and sequence.computed]
        talks = [talk for talk in map(self._company.talks.__getitem__, talking) if talk.may_draft and talk.completed]
        for talk in talks:
            talk.trail = talk.trail or self.speculation.follow(talk.sequence.tokens)
        wishes = [Wish(talk.trail, talk.left - 1, talk.sequence.blocks) for talk in talks if talk.trail]
        drafts = self.speculation.draft(wishes, len(talking))
        for talk, draft in zip(talks, drafts, strict=True):
            talk.sequence.draft = draft

    def _started(self, now: float) -> Times:
        """How long those waited who took part in a step for the first time."""
        times = Times()
        for chunk in self._plan.chunks:
            talk = self._company.talks[chunk.sequence]
            if not talk.started:
                talk.started = True
                times.queue.append(now - talk.submitted)
                for ticket in filter(None, talk.tickets):
                    ticket.course.begun = now
        return times

    def _book(self, spoiled: set[Talk]) -> list[Answer]:
        """What was computed counts.  Who is spoiled ends, and what it stored is found no more."""
        answers: list[Answer] = []
        chunks = self._plan.chunks
        error = StepFailed(f"model {self.model!r} computed numbers that are not finite for this request")
        for talk in spoiled:
            for sequence in talk.sequences:
                self._blocks.forget(sequence.blocks)
            answers += self._end(talk, Failed(error))
        self._scheduler.commit(
            [chunk for chunk in chunks if chunk.sequence in self._company.talks] if spoiled else chunks
        )
        return answers

    def _caught_up(self, each: Slice, scores: Listing[Scored]) -> list[Answer]:
        """The prompt is computed: it is scored, if that was asked for, and whoever waited for it goes on from there."""
        talk, request = each.talk, each.talk.request
        talk.scores += scores
        if not each.chunk.last or talk.completed:
            return []
        answers: list[Answer] = []
        if request.prompt_logprobs >= 0:
            answers += [(ticket, Prompted(tuple(talk.scores))) for ticket in talk.tickets if ticket]
        together = self._company.join(talk)
        if not request.max_tokens:
            for one in together:
                answers += self._end(one, talk.done("length"))
        return answers

    def _say(self, talk: Talk, drawn: Listing[tuple[int, Scored]], times: Times) -> list[Answer]:
        """A token, and more of them as far as the draft before each was right, and what must follow."""
        sequence, answers, right = talk.sequence, list[Answer](), 0
        draft, sequence.draft = sequence.draft, []
        for place, (token, scored) in enumerate(drawn):
            answers += self._speak(talk, token, scored, times)
            if sequence not in self._company.talks:
                return answers
            if place == len(drawn) - 1 or token != draft[place]:
                break
            right += 1
        times.accepted += right
        self._scheduler.advance(sequence, right)
        return answers + self._leap(talk, times)

    def _leap(self, talk: Talk, times: Times) -> list[Answer]:
        """Where there is no choice nothing is drawn."""
        answers: list[Answer] = []
        if talk.walk is None or talk.request.logprobs >= 0:  # nobody computes what these would score
            return answers
        try:
            forced = talk.walk.forced()
        except PolyheadError as error:
            return self._end(talk, Failed(error))
        for token in forced:
            answers += self._speak(talk, token, UNSCORED, times)
            if talk.sequence not in self._company.talks:
                break
        return answers

    def _speak(self, talk: Talk, token: int, scored: Scored, times: Times) -> list[Answer]:
        request = talk.request
        if token < 0:
            return self._end(talk, Failed(BadRequest(NONE_LEFT)))
        if token in request.stop_tokens:
            return self._end(talk, talk.done("stop", token))
        now = perf_counter()
        if talk.completed:
            times.inter_token.append(now - talk.spoke)
        else:
            times.first_token.append((now - talk.submitted, request.terms.trace))
        talk.spoke = now
        try:
            talk.say(token)
        except PolyheadError as error:
            return self._end(talk, Failed(error))
        event = Token(token, *scored, talk.sequence.cached)
        answers: list[Answer] = [(ticket, event) for ticket in talk.tickets if ticket]
        if talk.walk is not None and talk.walk.ended:
            answers += self._end(talk, talk.done("stop"))
        elif talk.completed == request.max_tokens:
            answers += self._end(talk, talk.done("length"))
        return answers

    def _search(self, talk: Talk, known: Mapping[Sequence, Tensor], turn: Turn | None, times: Times) -> list[Answer]:
        search = talk.search
        assert search is not None
        for beam in search.beams:
            beam.logits = known.get(beam.sequence, beam.logits)
        if turn is None:
            return []
        search.answers = turn.answers
        if turn.going:
            self._company.fan(talk, turn)
            return []
        times.first_token.append((perf_counter() - talk.submitted, talk.request.terms.trace))
        answers: list[Answer] = []
        for place, ticket in enumerate(talk.tickets):
            told = search.events(place) or [Failed(BadRequest(NONE_LEFT))]
            answers += [(ticket, event) for event in told if ticket]
        self._company.remove(talk)
        return answers

    def _end(self, talk: Talk, event: Done | Failed) -> list[Answer]:
        tickets = talk.tickets
        self._company.remove(talk)
        return [(ticket, event) for ticket in tickets if ticket]

    def _report(self, plan: Plan, padding: int, seconds: tuple[float, float], times: Times) -> StepReport:
        return StepReport(
            model=self.model,
            task=self.task,
            sequences=len(plan.chunks),
            tokens=sum(chunk.count + chunk.draft for chunk in plan.chunks),
            padding=padding,
            forward_s=seconds[0],
            sample_s=seconds[1],
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            drafted=sum(chunk.draft for chunk in plan.chunks),
            accepted=times.accepted,
            adapters=Counter(each.adapter for each in self._scheduler.running if each.adapter)
            if self._adapters
            else {},
            blocks_total=self._blocks.count,
            blocks_used=self._blocks.used,
            preemptions=plan.preemptions,
            cached_tokens=plan.cached_tokens,
            queue_s=times.queue,
            first_token_s=times.first_token,
            inter_token_s=times.inter_token,
        )
