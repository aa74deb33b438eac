"""Fake networks that make mistakes of the engine visible, and an observer that records all calls."""

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from polyhead.models.executors.contract import StepInput
from polyhead.service.core.request import Done, Event, Failed, Generate, GeneratedToken, Request, Sampling
from polyhead.service.engine.worker import RequestEnd, RequestTiming, StepReport, Worker

WORDS = 23
GREEDY = Sampling(temperature=0)


def logits_after(tokens: Sequence[int], words: int = WORDS) -> list[float]:
    """The logits of a fake network: a pure function of all tokens so far."""
    choice = random.Random(repr(tuple(tokens)))
    return [choice.uniform(-4, 4) for _ in range(words)]


def greedy(prompt: Sequence[int], count: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """The greedy answer of the fake network to `prompt`, without the stop token."""
    tokens = list(prompt)
    for _ in range(count):
        logits = logits_after(tokens)
        token = logits.index(max(logits))
        if token in stop:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


class FakeGenerator:
    """Stores tokens in place of keys and values, and computes its answers from what it reads back out of the blocks.

    `poison` are tokens: rows that end in one of them get NaN. `poisoned` are blocks that are reported to contain
    NaN. A step raises an error while `raises` returns True."""

    argmax = None
    state_count = window_blocks = window = 0

    def __init__(self, block_count: int = 64, block_size: int = 4) -> None:
        self.block_count, self.block_size = block_count, block_size
        self.cache: dict[int, tuple[int, int]] = {}
        self.poison: set[int] = set()
        self.nonfinite_blocks: set[int] = set()
        self.raises: Callable[[StepInput], bool] = lambda rows: False
        self.seen: list[StepInput] = []

    def step(self, rows: StepInput) -> Tensor:
        assert rows.block_tables, "a step without sequences"
        self.seen.append(rows)
        if self.raises(rows):
            raise RuntimeError("the device is on fire")
        wanted = []
        for number, table in enumerate(rows.block_tables):
            start, end = rows.starts[number], rows.starts[number + 1]
            assert len(table) == -(-(rows.positions[end - 1] + 1) // self.block_size)
            for row in range(start, end):
                self.cache[self.slot(table, rows.positions[row])] = rows.positions[row], rows.tokens[row]
            asked = [row for row in rows.output_rows if start <= row < end]
            wanted += [self.answer(table, rows.positions[row] + 1) for row in asked]
        return torch.tensor(wanted).view(len(wanted), WORDS)

    def answer(self, table: list[int], length: int) -> list[float]:
        entries = [self.cache[self.slot(table, position)] for position in range(length)]
        assert [position for position, _ in entries] == list(range(length)), "foreign block"
        tokens = [token for _, token in entries]
        return [float("nan")] * WORDS if tokens[-1] in self.poison else logits_after(tokens)

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        size = self.block_size
        for source, target in blocks:
            for offset in range(size):
                self.cache.pop(target * size + offset, None)
                if source * size + offset in self.cache:
                    self.cache[target * size + offset] = self.cache[source * size + offset]

    def slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def padding(self, rows: StepInput) -> int:
        return len(rows.block_tables)


class FakeRecurrentGenerator(FakeGenerator):
    """A generator that also stores the tokens of a sequence in a slot of state, and compares them with its blocks.

    A step that raises has written its slots before."""

    def __init__(self, block_count: int = 64, block_size: int = 4, state_count: int = 130) -> None:
        super().__init__(block_count, block_size)
        self.state_count = state_count
        self.states: dict[int, list[int]] = {}

    def step(self, rows: StepInput) -> Tensor:
        assert rows.states is not None
        assert len(rows.states) == len(rows.block_tables)
        written = [slot for use in rows.states for slot in (use.write, use.border) if slot != -1]
        assert len(set(written)) == len(written), "a slot is written twice"
        assert not {use.read for use in rows.states} & set(written), "a slot is read and written"
        for use, start, end in zip(rows.states, rows.starts, rows.starts[1:], strict=False):
            before = [] if use.read == -1 else self.states[use.read]
            assert len(before) == rows.positions[start], "the state is not that of the token before"
            assert (use.border == -1) == (use.border_rows == 0)
            assert 0 <= use.border_rows <= end - start
            self.states[use.write] = before + rows.tokens[start:end]
            if use.border != -1:
                self.states[use.border] = before + rows.tokens[start : start + use.border_rows]
        logits = super().step(rows)
        for use, table in zip(rows.states, rows.block_tables, strict=True):
            tokens = self.states[use.write]
            kept = [self.cache[self.slot(table, position)][1] for position in range(len(tokens))]
            assert kept == tokens, "the state of another sequence"
        return logits


class FakeEncoder:
    """States of three features: the token, its position and its segment. A step with one of `failing_tokens` raises an
    error."""

    block_count = block_size = state_count = window_blocks = window = 0
    argmax = None

    def __init__(self) -> None:
        self.raises = False
        self.failing_tokens: set[int] = set()
        self.nonfinite_blocks: set[int] = set()
        self.seen: list[StepInput] = []

    def step(self, rows: StepInput) -> Tensor:
        self.seen.append(rows)
        if self.raises or self.failing_tokens & set(rows.tokens):
            raise RuntimeError("the device is on fire")
        segments = rows.segments or [0] * len(rows.tokens)
        return torch.tensor([rows.tokens, rows.positions, segments], dtype=torch.float32).T[rows.output_rows]

    def padding(self, rows: StepInput) -> int:
        return 0


class FakeHead:
    """Sums of a text's tokens, positions and segments; postprocessing divides by their length, as an embedding head
    does.

    A text with the token 13 gets an infinite value."""

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        return list(range(starts[-1])), starts

    def __call__(self, states: Tensor, starts: list[int]) -> Tensor:
        rows = [states[start:end].sum(dim=0) for start, end in itertools.pairwise(starts)]
        failing_tokens = [bool((states[start:end, 0] == 13).any()) for start, end in itertools.pairwise(starts)]
        return torch.stack([row * float("inf") if bad else row for row, bad in zip(rows, failing_tokens, strict=True)])

    def postprocess(self, raw: Tensor) -> Tensor:
        return raw / raw.norm(dim=-1, keepdim=True)


@dataclass(eq=False)
class RecordingTicket:
    """A ticket for tests of workers: it records what it receives."""

    request: Request
    submitted: float = 0.0
    events: list[Event] = field(default_factory=list)
    timing: RequestTiming = field(default_factory=RequestTiming)

    def receive(self, event: Event) -> None:
        assert not self.ended, "an event after the end"
        self.events.append(event)

    @property
    def ended(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Done | Failed)

    @property
    def tokens(self) -> list[int]:
        return [event.id for event in self.events if isinstance(event, GeneratedToken)]


def ask(worker: Worker, *requests: Request) -> list[RecordingTicket]:
    tickets = [RecordingTicket(request) for request in requests]
    for ticket in tickets:
        worker.validate(ticket.request)
        worker.submit(ticket)
    return tickets


def turn(worker: Worker) -> StepReport:
    step = worker.step()
    for ticket, event in step.events:
        ticket.receive(event)
    return step.report


def finish(worker: Worker) -> list[StepReport]:
    reports = []
    while worker.has_work:
        reports.append(turn(worker))
    worker.check_invariants()
    return reports


def finish_with_failures(worker: Worker) -> None:
    """Steps until no request is left; those that are blamed for a failed step end with its error."""
    while worker.has_work:
        try:
            turn(worker)
        except RuntimeError:
            for ticket, event in worker.blame_failed_step():
                ticket.receive(event)
    worker.check_invariants()


def generate(prompt: Sequence[int], max_tokens: int = 8, **options: object) -> Generate:
    options.setdefault("sampling", GREEDY)
    return Generate("test", tuple(prompt), max_tokens, **options)  # type: ignore[arg-type]


@dataclass
class RecordingObserver:
    """An observer that records its calls."""

    steps: list[StepReport] = field(default_factory=list)
    ends: list[RequestEnd] = field(default_factory=list)
    rests: list[str] = field(default_factory=list)

    def record_step(self, report: StepReport) -> None:
        asyncio.get_running_loop()  # raises on any thread but that of the event loop
        self.steps.append(report)

    def record_end(self, ended: RequestEnd) -> None:
        asyncio.get_running_loop()
        self.ends.append(ended)

    def record_idle(self, model: str, task: str) -> None:
        asyncio.get_running_loop()
        self.rests.append(model)

    @property
    def outcomes(self) -> list[str]:
        return [end.outcome for end in self.ends]


def scores(events: Sequence[Event]) -> list[object]:
    """What must be equal: tokens and their probabilities, not how many prompt tokens were cached."""
    return [replace(event, cached_tokens=0) for event in events if isinstance(event, GeneratedToken)]


def answer_scores(worker: Worker, *requests: Generate) -> list[list[object]]:
    """`scores` of the answers to requests that run together."""
    tickets = ask(worker, *requests)
    finish(worker)
    assert all(isinstance(ticket.events[-1], Done) for ticket in tickets)
    return [scores(ticket.events) for ticket in tickets]
