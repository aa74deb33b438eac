"""The worker of encoder-only models: whole texts, batched by tokens.

Knows tokens, states and what a head makes of them; no labels, no text.  The one idea: texts lie end to end, so the
dense layers compute no padding, and a step is filled by tokens, first come first served; sorted by length within the
step, so that neighbours in attention are alike.
"""

from collections import OrderedDict, defaultdict
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from models.executor import Executor, Rows
from service.engine.worker import Answer, Rehearsal, Step, StepReport, Ticket
from service.errors import BadRequest, StepFailed
from service.request import Done, Encode, Encoded, Failed, Request, Task


class Head(Protocol):
    """What is made of the states: see models.heads."""

    def wanted(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """The rows it reads of N texts, `starts` [N + 1], and where each text starts among those rows."""

    def __call__(self, states: Tensor, starts: list[int]) -> Tensor:
        """[M, W] states of those rows to [N, C]."""

    def close(self, raw: Tensor) -> Tensor:
        """[N, C] to probabilities, or to unit length."""


class Encoder:
    """Runs texts through an executor and a head, at most `token_budget` tokens a step, or one longer text."""

    def __init__(self, executor: Executor, head: Head, *, model: str, task: Task, token_budget: int = 4096) -> None:
        self.model, self.task = model, task
        self._executor, self._head = executor, head
        self._token_budget = token_budget
        self._waiting: OrderedDict[Ticket, Encode] = OrderedDict()
        self._batch: list[tuple[Ticket, Encode]] = []  # of the step in progress

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def refuse(self, request: Request) -> None:
        assert isinstance(request, Encode)
        if not request.tokens:
            raise BadRequest("the text has no tokens", param="input")
        if request.segments and len(request.segments) != len(request.tokens):
            raise BadRequest(f"{len(request.segments)} segments for {len(request.tokens)} tokens", param="input")

    def submit(self, ticket: Ticket) -> None:
        assert isinstance(ticket.request, Encode)
        self._waiting[ticket] = ticket.request

    def abort(self, ticket: Ticket) -> None:
        self._waiting.pop(ticket, None)

    def step(self) -> Step:
        self._batch = batch = self._take()
        rows = lay_out([request for _, request in batch])
        wanted, starts = self._head.wanted(rows.starts)
        rows.wanted.extend(wanted)
        began = perf_counter()
        with torch.inference_mode():
            states = self._executor.step(rows)  # [M, W]
            computed = perf_counter()
            values = self._read(states, starts)
        ended = perf_counter()
        report = StepReport(
            model=self.model,
            task=self.task,
            sequences=len(batch),
            tokens=len(rows.tokens),
            padding=self._executor.padding(rows),
            forward_s=computed - began,
            sample_s=ended - computed,
            running=0,
            waiting=len(self._waiting),
            queue_s=[began - ticket.submitted for ticket, _ in batch],
        )
        return Step(self._answers(values), report)

    def fail(self) -> list[Answer]:
        error = StepFailed("the step that computed this request failed")
        return [(ticket, Failed(error)) for ticket, _ in self._batch]

    def check(self) -> None:
        """A text holds nothing between steps."""

    def warm_up(self) -> None:
        """Runs four texts of different lengths, closed and raw."""
        for length, raw in ((8, False), (16, True), (24, False), (32, True)):
            self.submit(Rehearsal(Encode("warm-up", (0,) * length, raw=raw)))
        while self.busy:
            self.step()

    def _take(self) -> list[tuple[Ticket, Encode]]:
        """The next batch, first come first served, shortest first."""
        batch: list[tuple[Ticket, Encode]] = []
        room = self._token_budget
        while self._waiting:
            ticket, request = self._waiting.popitem(last=False)
            if batch and len(request.tokens) > room:
                self._waiting[ticket] = request
                self._waiting.move_to_end(ticket, last=False)
                break
            room -= len(request.tokens)
            batch.append((ticket, request))
        batch.sort(key=lambda entry: len(entry[1].tokens))
        return batch

    def _read(self, states: Tensor, starts: list[int]) -> list[list[float]]:
        """What each text of the batch is answered; empty where it would not be finite."""
        scores = self._head(states, starts)  # [N, C]
        whole = scores.isfinite().all(dim=1).tolist()
        groups: defaultdict[tuple[bool, bool, int], list[int]] = defaultdict(list)
        for index, (_, request) in enumerate(self._batch):
            if whole[index]:
                groups[request.raw, request.unit, request.dimensions].append(index)
        values: list[list[float]] = [[]] * len(whole)
        for (raw, unit, dimensions), members in groups.items():
            some = scores if len(members) == len(whole) else scores[torch.tensor(members, device=scores.device)]
            some = some[:, :dimensions] if dimensions else some
            closed = some if raw else self._head.close(some)
            closed = normalize(closed, dim=-1) if unit else closed
            for index, value in zip(members, closed.tolist(), strict=True):
                values[index] = value
        return values

    def _answers(self, values: list[list[float]]) -> list[Answer]:
        answers: list[Answer] = []
        for (ticket, request), value in zip(self._batch, values, strict=True):
            if value:
                answers.append((ticket, Encoded(value)))
                answers.append((ticket, Done("encoded", len(request.tokens))))
            else:
                error = StepFailed(f"model {self.model!r} computed numbers that are not finite for this request")
                answers.append((ticket, Failed(error)))
        return answers


def lay_out(requests: list[Encode]) -> Rows:
    """The texts end to end; which states are wanted is the head's to say."""
    tokens: list[int] = []
    positions: list[int] = []
    starts = [0]
    for request in requests:
        tokens += request.tokens
        positions += range(len(request.tokens))
        starts.append(len(tokens))
    segments = None
    if any(request.segments for request in requests):
        segments = [segment for request in requests for segment in request.segments or (0,) * len(request.tokens)]
    return Rows(tokens, positions, starts, [[]] * len(requests), [], segments)
