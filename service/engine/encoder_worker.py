"""The worker of encoder-only models: whole texts, batched by tokens.

Texts are concatenated without padding, so the dense layers compute no padding.  A step takes texts in the order of the
queue (priority, fair shares, arrival) up to a number of tokens, and sorts them by length, so that attention pads
little.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from operator import attrgetter
from time import perf_counter

import torch
from torch import Tensor

from polyhead.models.core.label_prompt import MAX_LABELS
from polyhead.models.executors.contract import Executor, StepInput
from polyhead.models.network.embedding_head import TokenVectorHead
from polyhead.models.network.lora import Lora

from ..core.errors import BadRequest, StepFailed
from ..core.request import Done, Encode, Failed, OutputForm, Request, Task
from .fault_bisection import FaultBisector
from .head_outputs import STATE_HEAD, HeadEvents, OutputHead, read_outputs
from .pending_requests import PendingRequests
from .worker import HandleEvent, RequestHandle, StepReport, StepResult, WarmupRequest

TaskHead = tuple[Task, OutputHead]  # the task of an adapter, and its head
LABEL_TASKS: tuple[Task, ...] = ("label_spans", "label_texts")
FORM_TASKS: dict[OutputForm, Task] = {"tokens": "embed", "words": "fill"}


@dataclass(frozen=True)
class HeadGroup:
    """Texts of one step that one head reads in the same way; their output rows begin at `first_row`."""

    output: Task | OutputForm
    head: OutputHead
    requests: list[Encode]
    starts: list[int]
    first_row: int

    def read(self, states: Tensor) -> HeadEvents:
        """The answers to its requests, from the step's states [M, W]."""
        return read_outputs(
            self.output, self.head, states[self.first_row :][: self.starts[-1]], self.starts, self.requests
        )


class EncoderWorker:
    """Runs texts through an executor and a head, at most `token_budget` tokens a step, or one longer text.

    Texts for different adapters of the network share a step; each is read by the head of its adapter.
    """

    def __init__(
        self, executor: Executor, head: OutputHead, *, model: str, task: Task, token_budget: int = 4096
    ) -> None:
        self.model, self.task = model, task
        self._executor = executor
        self._task_heads: dict[int, TaskHead] = {0: (task, head)}  # by the number of the adapter
        self._token_budget = token_budget
        self._requests: PendingRequests[Encode] = PendingRequests()
        self._batch: list[RequestHandle] = []  # of the current step
        self._bisector: FaultBisector[RequestHandle] = FaultBisector()

    is_background = False

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def validate(self, request: Request) -> None:
        assert isinstance(request, Encode)
        if not request.tokens:
            raise BadRequest("the text has no tokens", param="input")
        if request.segments and len(request.segments) != len(request.tokens):
            raise BadRequest(f"{len(request.segments)} segments for {len(request.tokens)} tokens", param="input")
        if request.rows and (request.rows[-1] >= len(request.tokens) or not is_ascending((-1, *request.rows))):
            raise BadRequest(f"rows must be ascending and below the {len(request.tokens)} tokens", param="input")
        task, _ = self._task_heads[request.adapter]
        if request.form and FORM_TASKS[request.form] != task:
            raise BadRequest(f"a model that can {task} has no {request.form} to tell", param="input")
        if request.form == "" and isinstance(self._task_heads[request.adapter][1], TokenVectorHead):
            raise BadRequest("a model with a vector for each token has none for a text", param="input")
        check_label_rows(request, reads_labels=task in LABEL_TASKS)
        if not 0 <= request.hidden < len(request.tokens):
            raise BadRequest(
                f"hidden: fewer than the {len(request.tokens)} tokens, got {request.hidden}", param="input"
            )
        if request.top_k < 1:
            raise BadRequest(f"top_k: at least 1, got {request.top_k}", param="top_k")

    def attach(self, lora: Lora, task: Task, head: OutputHead | None) -> int:
        """Add an adapter to the network.  Returns its number, which requests name it by and which is never reused.

        `head` reads its states, by default the worker's head.  Raises StepFailed where its output is not finite, and
        what the executor raises.
        """
        number = self._executor.attach(lora)
        self._task_heads[number] = task, head or self._task_heads[0][1]
        try:
            self._self_test(number)
        except StepFailed:
            self.detach(number)
            raise
        return number

    def detach(self, number: int) -> None:
        """Remove an adapter."""
        del self._task_heads[number]
        self._executor.detach(number)

    def submit(self, handle: RequestHandle) -> None:
        request = handle.request
        assert isinstance(request, Encode)
        self._requests.add(handle, request)

    def abort(self, handle: RequestHandle) -> None:
        if handle in self._requests:
            self._requests.remove(handle)

    def pause(self, handle: RequestHandle) -> None:
        """Does nothing: an answer of one event is never behind."""

    def resume(self, handle: RequestHandle) -> None:
        """Does nothing: see `pause`."""

    def expire(self, now: float) -> list[HandleEvent]:
        late = self._requests.expired(now)
        for handle, _ in late:
            self._requests.remove(handle)
        return late

    def step(self) -> StepResult:
        self._batch = batch = self._next_batch()
        rows, groups = self._build_step_input([self._requests[handle] for handle in batch])
        began = perf_counter()
        with torch.inference_mode():
            states = self._executor.step(rows)  # [M, W]
            computed = perf_counter()
            found = [event for group in groups for event in group.read(states)]
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
            waiting=self._requests.waiting,
            queue_s=[began - handle.submitted for handle in batch],
        )
        events = self._collect_events(found)
        self._batch = []  # a handle refers to its worker, whose memory must be freed as soon as it is dropped
        return StepResult(events, report, batch, began)

    def blame_failed_step(self) -> list[HandleEvent]:
        error = StepFailed("the step that computed this request failed")
        blamed = self._bisector.split(self._batch)
        for handle in blamed:
            self._requests.remove(handle)
        return [(handle, Failed(error)) for handle in blamed]

    def self_test(self) -> None:
        self._self_test(0)

    def _self_test(self, adapter: int) -> None:
        form = default_form(self._task_heads[adapter][1])
        rows, [group] = self._build_step_input([Encode("proof", (0,), adapter=adapter, form=form)])
        with torch.inference_mode():
            scores = group.head(self._executor.step(rows), group.starts)
        if not scores.isfinite().all():
            raise StepFailed("the answer to token 0 is not finite")

    def check_invariants(self) -> None:
        """Assert that no ended request is kept."""
        self._requests.check()

    def warm_up(self, breathe: Callable[[], None] = lambda: None) -> None:
        """Runs four texts of different lengths, with and without the head's final activation."""
        form = default_form(self._task_heads[0][1])
        for length, raw in ((8, False), (16, True), (24, False), (32, True)):
            self.submit(WarmupRequest(Encode("warm-up", (0,) * length, raw=raw, form=form)))
        while self.has_work:
            self.step()
            breathe()

    def _next_batch(self) -> list[RequestHandle]:
        """The next part of a failed step, or else the next requests of the queue, sorted for the step."""
        self._batch = []
        while self._bisector:
            batch = [handle for handle in self._bisector.next_batch() if handle in self._requests]
            if batch:
                return batch
        batch, tokens_left = [], self._token_budget
        while (handle := self._requests.peek()) is not None:
            tokens = len(self._requests[handle].tokens)
            if batch and tokens > tokens_left:
                break
            self._requests.start(handle)
            self._requests.charge(handle, self._requests[handle].prompt_tokens)
            tokens_left -= tokens
            batch.append(handle)
        return sorted(batch, key=lambda handle: step_order(self._requests[handle]))

    def _build_step_input(self, requests: list[Encode]) -> tuple[StepInput, list[HeadGroup]]:
        """The concatenated texts, and the groups of neighbours that one head reads in the same way."""
        rows, groups, first = pack_texts(requests), list[HeadGroup](), 0
        for (adapter, form), alike in groupby(requests, key=attrgetter("adapter", "form")):
            members = list(alike)
            task, own = self._task_heads[adapter]
            head = STATE_HEAD if form == "tokens" and not isinstance(own, TokenVectorHead) else own
            shown, counts = select_rows(members, rows.starts[first])
            wanted, starts = head.needed_rows(list(accumulate(counts, initial=0)))
            groups.append(HeadGroup(form or task, head, members, starts, len(rows.output_rows)))
            rows.output_rows.extend(shown[row] for row in wanted)
            first += len(members)
        return rows, groups

    def _collect_events(self, found: HeadEvents) -> list[HandleEvent]:
        events: list[HandleEvent] = []
        for handle, event in zip(self._batch, found, strict=True):
            tokens = len(self._requests[handle].tokens)
            self._requests.remove(handle)
            if event is not None:
                events.append((handle, event))
                events.append((handle, Done("encoded", tokens)))
            else:
                error = StepFailed(f"model {self.model!r} computed numbers that are not finite for this request")
                events.append((handle, Failed(error)))
        return events


def check_label_rows(request: Encode, *, reads_labels: bool) -> None:
    """Raise BadRequest unless the request names rows of labels and of its text exactly if the head `reads_labels`."""
    given = (request.label_rows, request.text_rows)
    if not reads_labels:
        if any(given):
            raise BadRequest("the model reads no labels beside a text", param="input")
        return
    for name, rows in zip(("label_rows", "text_rows"), given, strict=True):
        if not rows or rows[-1] >= len(request.tokens) or not is_ascending((-1, *rows)):
            message = f"{name}: must be ascending and below the {len(request.tokens)} tokens, and not empty"
            raise BadRequest(message, param="input")
    if len(request.label_rows) > MAX_LABELS:
        raise BadRequest(f"label_rows: at most {MAX_LABELS}, got {len(request.label_rows)}", param="input")
    if request.rows or request.form:
        raise BadRequest("a model that reads labels has no other rows or forms", param="input")


def default_form(head: OutputHead) -> OutputForm:
    """The form of a head's own output."""
    return "tokens" if isinstance(head, TokenVectorHead) else ""


def step_order(request: Encode) -> tuple[int, str, int]:
    """Sort key within a step: by adapter, by output, then by length."""
    return request.adapter, request.form, len(request.tokens)


def pack_texts(requests: list[Encode]) -> StepInput:
    """Concatenate the texts.  The output rows are left empty: the heads choose them."""
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
    adapters, hidden = [request.adapter for request in requests], [request.hidden for request in requests]
    return StepInput(
        tokens,
        positions,
        starts,
        [[]] * len(requests),
        [],
        segments,
        adapters=adapters if any(adapters) else None,
        hidden=hidden if any(hidden) else None,
    )


def select_rows(requests: list[Encode], start: int) -> tuple[Sequence[int], list[int]]:
    """The rows that heads see of texts whose first row is `start`, and how many they are of each text."""
    if not any(request.rows for request in requests):
        counts = [len(request.tokens) for request in requests]
        return range(start, start + sum(counts)), counts
    shown: list[int] = []
    for request in requests:
        shown += [start + row for row in request.rows or range(len(request.tokens))]
        start += len(request.tokens)
    return shown, [len(request.rows or request.tokens) for request in requests]


def is_ascending(numbers: tuple[int, ...]) -> bool:
    return all(a < b for a, b in pairwise(numbers))
