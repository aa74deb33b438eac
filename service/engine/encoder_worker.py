"""The worker of encoder-only models: whole texts, batched by tokens.

Texts are concatenated without padding, so the dense layers compute no padding.  A step takes texts in the order of the
queue (priority, fair shares, arrival) up to a number of tokens, and sorts them by length, so that attention pads
little.

A batch may take much longer than a step should: a long text in the network, or answers in the heads
(service.engine.head_outputs).  A step computes states for COMPUTING_TURN_S and reads answers for READING_TURN_S at
most, and a later one goes on where it stopped.  In between other workers have their steps.  While a long text is
computed, or answers are read, every second step of this worker is for texts that wait.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from operator import attrgetter
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.models.core.label_prompt import MAX_LABELS
from polyhead.models.core.turns import YieldTurn, keep_turn
from polyhead.models.executors.contract import Executor, JointExecutor, StepInput, step_in_turns
from polyhead.models.network.heads import count_read_tokens
from polyhead.models.network.lora import Lora

from ..core.errors import BadRequest, StepFailed
from ..core.request import Done, Encode, ExplainTextRequest, Failed, OutputForm, Request, Task
from .fault_bisection import FaultBisector
from .head_outputs import HeadEvent, HeadSet, OutputHead, TextRows, read_outputs
from .joint_steps import SHORT_TOKENS, STEPS_A_THREAD, JointStep
from .pending_requests import PendingRequests
from .worker import HandleEvent, RequestHandle, StepReport, StepResult, WarmupRequest

ROWS_OF_TASKS: Mapping[Task, tuple[str, ...]] = {  # which rows a request names for a task; others: none
    "label_spans": ("label_rows", "text_rows"),
    "label_texts": ("label_rows", "text_rows"),
    "decide": ("label_rows",),
}
FORM_NAMES: dict[OutputForm, str] = {
    "": "vector for a text",
    "tokens": "vector for each token",
    "words": "weights of words",
}
COMPUTING_TURN_S = 0.1  # how long a step computes states, but for the pieces of work that end it
JOINT_TURN_S = 0.05  # the same, of steps together: a text waits for the turn of others, and for those beside it
READING_TURN_S = 0.02  # how long a step reads answers, but for the piece of work that ends it
SMALLER_BATCH = 4  # part of a step's tokens that texts beside unfinished readings may have, whatever those hold
SHARED_READINGS = 2  # unfinished readings at a time, so that short texts do not wait for a long one
MAX_READINGS = 3  # the same; the last one is of owners without another
TextEvents = tuple[int, list[HeadEvent | None]]  # the number of a text in its step, and an event for each of its forms


@dataclass(frozen=True)
class Reading:
    """How one head reads texts whose sequences begin at `starts` among its rows: `rows` of the group's; None: all."""

    output: Task | OutputForm
    head: OutputHead
    rows: list[int] | None
    starts: list[int]


@dataclass(frozen=True)
class HeadGroup:
    """Texts of one step that the same heads read in the same way; their `row_count` output rows begin at
    `first_row`."""

    readings: list[Reading]
    requests: list[Encode]
    first_row: int
    row_count: int

    def read(self, states: Tensor, is_wanted: Callable[[int], bool]) -> Iterator[TextEvents | None]:
        """The events of those of its requests that are wanted, from the step's states [M, W]; None between two pieces
        of work."""
        own = states[self.first_row :][: self.row_count]
        found: list[list[HeadEvent | None]] = [[] for _ in self.requests]
        for each in self.readings:
            texts = TextRows(select_states(own, each.rows), each.starts, self.requests, is_wanted)
            for answer in read_outputs(each.output, each.head, texts):
                if answer is None:
                    yield None
                    continue
                number, event = answer
                found[number].append(event)
                if len(found[number]) == len(self.readings):
                    yield number, found[number]


@dataclass(eq=False)
class OpenReading:
    """The texts of one batch, whose states are computed and whose answers are read in turns. `states` gives them [M, W]
    after None for each turn that did not finish them; `read` is called with them. Numbers are places in `handles`."""

    handles: list[RequestHandle]
    states: Iterator[Tensor | None]
    read: Callable[[Tensor], Iterator[TextEvents | None]]
    computed_s: float = 0.0  # in the last turn
    answers: Iterator[TextEvents | None] | None = None  # None: the states are not computed yet
    is_finished: bool = False

    @property
    def is_computing(self) -> bool:
        return self.answers is None

    def advance(self, reading_turn_s: float) -> list[TextEvents]:
        """Compute states for a turn. If they are there, read answers for so long, at least a piece."""
        began = perf_counter()
        if self.answers is None and (states := next(self.states)) is not None:
            self.answers = self.read(states)
        computed = perf_counter()
        self.computed_s = computed - began
        found = list[TextEvents]()
        if self.answers is None:
            return found
        for answer in self.answers:
            if answer is not None:
                found.append(answer)
            elif perf_counter() >= computed + reading_turn_s:
                return found
        self.is_finished = True
        return found


class BegunStep(NamedTuple):
    """A step whose texts are chosen; nothing is computed yet."""

    reading: OpenReading
    rows: StepInput
    executor: Executor
    began: float  # by time.perf_counter
    prepare_s: float


class QueryNetwork(NamedTuple):
    """A network that reads queries alone, at most `token_budget` tokens a step, and its head."""

    executor: Executor
    head: OutputHead
    token_budget: int


class EncoderWorker:
    """Runs texts through an executor and a head, at most `token_budget` tokens a step, or one longer text.

    Texts for different adapters of the network share a step; each is read by the head of its adapter.
    """

    def __init__(
        self,
        executor: Executor,
        head: OutputHead,
        *,
        model: str,
        task: Task,
        token_budget: int = 4096,
    ) -> None:
        self.model, self.task = model, task
        self._executor = executor
        self._queries: QueryNetwork | None = None
        self._heads: dict[int, HeadSet] = {0: HeadSet.of(task, head)}  # by the number of the adapter
        self._token_budget, self.reading_turn_s = token_budget, READING_TURN_S
        self.step_threads, self._product_bytes = 0, 0
        if isinstance(executor, JointExecutor):
            self.step_threads, self._product_bytes = executor.threads, executor.product_bytes
        self._requests: PendingRequests[Encode] = PendingRequests()
        self._batch: list[RequestHandle] = []  # of the current step
        self._bisector: FaultBisector[RequestHandle] = FaultBisector()
        self._readings: deque[OpenReading] = deque()  # the first is the next
        self._reads_next = False  # whether the next step goes on with it
        self._joint: tuple[BegunStep, JointStep] | None = None  # the next step, where it was begun

    is_background = False

    def add_query_network(self, queries: QueryNetwork) -> None:
        """Queries are read by this network from now on, in steps of their own."""
        self._queries, self._heads[0] = queries, replace(self._heads[0], queries={"": queries.head})
        self._token_budget = min(self._token_budget, queries.token_budget)

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
        heads = self._heads[request.adapter]
        for form in request.forms:
            if form not in heads.texts:
                raise BadRequest(f"a model that can {heads.task} has no {FORM_NAMES[form]} here", param="input")
        if len({*request.forms}) < len(request.forms):
            raise BadRequest("the same output is asked for twice", param="input")
        check_label_rows(request, heads.task)
        if heads.task in ROWS_OF_TASKS and (request.rows or any(request.forms)):
            raise BadRequest("a model that reads labels has no other rows or forms", param="input")
        if not 0 <= request.hidden < len(request.tokens):
            raise BadRequest(
                f"hidden: fewer than the {len(request.tokens)} tokens, got {request.hidden}", param="input"
            )
        if request.top_k < 1:
            raise BadRequest(f"top_k: at least 1, got {request.top_k}", param="top_k")

    def attach(self, lora: Lora, task: Task, head: OutputHead | None, yield_turn: YieldTurn = keep_turn) -> int:
        """Add an adapter to the network.  Returns its number, which requests name it by and which is never reused.

        `head` reads its states, by default the worker's head.  `yield_turn`: see
        models.executors.contract.Executor.attach.  Raises StepFailed where its output is not finite, and what the
        executor raises.
        """
        number = self._executor.attach(lora, yield_turn)
        self._heads[number] = self._heads[0] if head is None else HeadSet.of(task, head)
        try:
            self._self_test(number)
        except StepFailed:
            self.detach(number)
            raise
        return number

    def detach(self, number: int) -> None:
        """Remove an adapter."""
        del self._heads[number]
        self._executor.detach(number)

    def submit(self, handle: RequestHandle) -> None:
        request = handle.request
        assert isinstance(request, Encode)
        self._requests.add(handle, request)

    def abort(self, handle: RequestHandle) -> None:
        if handle in self._requests:
            self._remove(handle)

    def pause(self, handle: RequestHandle) -> None:
        """Does nothing: an answer of one event is never behind."""

    def resume(self, handle: RequestHandle) -> None:
        """Does nothing: see `pause`."""

    def expire(self, now: float) -> list[HandleEvent]:
        late = self._requests.expired(now)
        self._remove(*(handle for handle, _ in late))
        return late

    def short_step_cost(self) -> float:
        """See JointWorker: tokens times bytes of weights."""
        if self._readings or self._bisector or self._queries is not None:
            return 0.0
        waiting = self._requests.peek()
        if waiting is None or self._requests[waiting].prompt_tokens > self._short_tokens:
            return 0.0
        return float(min(self._requests.waiting_tokens, self._short_tokens) * self._product_bytes)

    @property
    def _short_tokens(self) -> int:
        return min(SHORT_TOKENS, self._token_budget)

    def begin_short_step(self) -> JointStep:
        begun = self._begin_step((), self._short_tokens, JOINT_TURN_S)
        assert isinstance(begun.executor, JointExecutor)
        cost = max(len(begun.rows.tokens), 1) * self._product_bytes
        joint = JointStep(begun.executor, begun.reading.states, float(cost))
        self._joint = begun, joint
        return joint

    def step(self) -> StepResult:
        if self._joint is not None:
            (begun, joint), self._joint = self._joint, None
            return self._finish_step(begun, self.reading_turn_s / (STEPS_A_THREAD * self.step_threads), joint.forward_s)
        without = self._owners_that_wait()
        if without is None:
            return self._continue_reading(perf_counter())
        return self._finish_step(self._begin_step(without, self._tokens_left, COMPUTING_TURN_S), self.reading_turn_s)

    def _begin_step(self, without: Collection[str], most_tokens: int, turn_s: float) -> BegunStep:
        """Choose the texts of a step: of at most so many tokens, or one longer text; none of the owners `without`."""
        began = perf_counter()
        self._batch = batch = self._next_batch(without, most_tokens)
        requests = [self._requests[handle] for handle in batch]
        rows, groups = self._build_step_input(requests)
        wanted = self._wanted_among(batch)
        executor = self._executor_of(requests[0]) if requests else self._executor
        states: Iterator[Tensor | None] = iter([torch.empty(0, 0)])
        if rows.tokens:
            states = step_in_turns(executor, rows, turn_s)
        reading = OpenReading(batch, states, lambda states: read_groups(groups, states, wanted))
        return BegunStep(reading, rows, executor, began, perf_counter() - began)

    def _finish_step(self, begun: BegunStep, reading_turn_s: float, forward_s: float = 0.0) -> StepResult:
        """Compute and read the first turn of a step.  `forward_s`: seconds that it was computed beside other steps."""
        reading, rows, executor, began, prepare_s = begun
        resumed = perf_counter() - prepare_s
        events = self._advance(reading, reading_turn_s)
        self._reads_next = True
        report = replace(
            self._report(),
            sequences=len(reading.handles),
            tokens=len(rows.tokens),
            padding=executor.padding(rows) if rows.tokens else 0,
            forward_s=forward_s + reading.computed_s,
            sample_s=perf_counter() - resumed - reading.computed_s,
            queue_s=[began - handle.submitted for handle in reading.handles],
        )
        return StepResult(events, report, reading.handles, began)

    def _continue_reading(self, began: float) -> StepResult:
        """Go on with the first of the batches that are computed or read."""
        reading = self._readings.popleft()  # for good, if it raises: its texts are computed again
        self._batch = [handle for handle in reading.handles if handle in self._requests]
        was_first = self._goes_first(reading)  # it took no turn of the others
        events = self._advance(reading, self.reading_turn_s)
        self._reads_next = was_first
        computed = reading.computed_s
        report = replace(self._report(), forward_s=computed, sample_s=perf_counter() - began - computed)
        return StepResult(events, report, (), began)

    def blame_failed_step(self) -> list[HandleEvent]:
        error = StepFailed("the step that computed this request failed")
        blamed, self._batch = self._bisector.split(self._batch), []
        self._remove(*blamed)
        return [(handle, Failed(error)) for handle in blamed]

    def self_test(self) -> None:
        self._self_test(0)
        if self._queries is not None:
            self._self_test(0, is_query=True)

    def _self_test(self, adapter: int, *, is_query: bool = False) -> None:
        form = self._heads[adapter].default_form
        request = Encode("proof", (0,), adapter=adapter, form=form, is_query=is_query)
        rows, [group] = self._build_step_input([request])
        [reading] = group.readings
        with torch.inference_mode():
            scores = reading.head(self._executor_of(request).step(rows), reading.starts)
        if not scores.isfinite().all():
            raise StepFailed("the answer to token 0 is not finite")

    def check_invariants(self) -> None:
        """Assert that no ended request is kept."""
        self._requests.check()
        assert not self._readings, "a reading has no request"

    def warm_up(self, breathe: Callable[[], None] = lambda: None) -> None:
        """Runs four texts of different lengths, with and without the head's final activation, and as many queries."""
        form = self._heads[0].default_form
        for is_query in (False, True) if self._queries is not None else (False,):
            for length, raw in ((8, False), (16, True), (24, False), (32, True)):
                request = Encode("warm-up", (0,) * length, raw=raw, form=form, is_query=is_query)
                self.submit(WarmupRequest(request))
        while self.has_work:
            self.step()
            breathe()

    def _owners_that_wait(self) -> Collection[str] | None:
        """Whose texts are left out of the next step, if it is for texts that wait; None: it goes on with a reading."""
        if not self._readings:
            return ()
        if self._reads_next or len(self._readings) == MAX_READINGS or self._goes_first(self._readings[0]):
            return None
        without = set[str]()
        if len(self._readings) >= SHARED_READINGS:
            without = {self._requests.owner(handle) for handle in self._open_handles()}
        if self._bisector:
            return without
        waiting = self._requests.peek(without)
        fits = waiting is not None and len(self._requests[waiting].tokens) <= self._tokens_left
        return without if fits else None

    def _goes_first(self, reading: OpenReading) -> bool:
        """Whether it is a batch whose states are computed. With one long text, texts that wait take turns."""
        if not reading.is_computing:
            return False
        held = sum(len(self._requests[handle].tokens) for handle in reading.handles if handle in self._requests)
        return held <= self._token_budget

    @property
    def _tokens_left(self) -> int:
        """How many tokens the next step takes. The memory of a step is that of its states and of those that are held
        for unfinished readings."""
        held = sum(len(self._requests[handle].tokens) for handle in self._open_handles())
        return max(self._token_budget - held, self._token_budget // SMALLER_BATCH) if held else self._token_budget

    def _executor_of(self, request: Encode) -> Executor:
        """What computes a text."""
        return self._queries.executor if request.is_query and self._queries is not None else self._executor

    def _open_handles(self) -> list[RequestHandle]:
        """The requests whose answers are being read."""
        return [handle for reading in self._readings for handle in reading.handles if handle in self._requests]

    def _advance(self, reading: OpenReading, reading_turn_s: float) -> list[HandleEvent]:
        """The next events of a batch, which is kept unless it is finished."""
        with torch.inference_mode():
            found = reading.advance(reading_turn_s)
        if self._goes_first(reading):
            self._readings.appendleft(reading)
        elif not reading.is_finished:
            self._readings.append(reading)
        events = self._collect_events(reading, found)
        self._batch = []  # a handle refers to its worker, whose memory must be freed as soon as it is dropped
        return events

    def _wanted_among(self, handles: Sequence[RequestHandle]) -> Callable[[int], bool]:
        """Whether the request with a number among `handles` is still waited for."""
        return lambda number: handles[number] in self._requests

    def _remove(self, *handles: RequestHandle) -> None:
        """Forget requests that have ended, and what was computed for them alone."""
        for handle in handles:
            self._requests.remove(handle)
        self._readings = deque(
            reading for reading in self._readings if any(handle in self._requests for handle in reading.handles)
        )

    def _report(self) -> StepReport:
        """A report of a step that computed no states."""
        held = self._open_handles()
        return StepReport(
            model=self.model,
            task=self.task,
            sequences=0,
            tokens=0,
            padding=0,
            forward_s=0.0,
            sample_s=0.0,
            running=len(held),
            waiting=self._requests.waiting,
            adapters=Counter(self._requests[handle].adapter for handle in held if self._requests[handle].adapter),
        )

    def _next_batch(self, without: Collection[str], tokens_left: int) -> list[RequestHandle]:
        """The next part of a failed step, or else the next requests of the queue, without those of the owners
        `without`; sorted for the step."""
        self._batch = []
        while self._bisector:
            batch = [handle for handle in self._bisector.next_batch() if handle in self._requests]
            if batch:
                return batch
        batch = []
        while (handle := self._requests.peek(without)) is not None:
            tokens = len(self._requests[handle].tokens)
            if (batch or self._readings) and tokens > tokens_left:
                break
            executor = self._executor_of(self._requests[handle])
            if batch and executor is not self._executor_of(self._requests[batch[0]]):
                break
            self._requests.start(handle)
            self._requests.charge(handle, self._requests[handle].prompt_tokens)
            tokens_left -= tokens
            batch.append(handle)
        return sorted(batch, key=lambda handle: step_order(self._requests[handle]))

    def _build_step_input(self, requests: list[Encode]) -> tuple[StepInput, list[HeadGroup]]:
        """The concatenated texts of which states are read, and the groups of neighbours that the same heads read in
        the same way."""
        computed = [request for request in requests if not self._heads[request.adapter].reads_no_states(request)]
        rows, groups, first = pack_texts(computed), list[HeadGroup](), 0
        for (adapter, forms, is_query), alike in groupby(requests, key=attrgetter("adapter", "forms", "is_query")):
            members, heads = list(alike), self._heads[adapter]
            shown: Sequence[int] = []
            starts = [0] * (len(members) + 1)
            if not heads.reads_no_states(members[0]):
                shown, counts = select_rows(members, rows.starts[first], heads.texts[heads.default_form])
                starts = list(accumulate(counts, initial=0))
                first += len(members)
            readings, first_row = list[Reading](), len(rows.output_rows)
            for form in forms:
                head = heads.choose(form, is_query=is_query)
                wanted, own_starts = head.needed_rows(starts)
                if len(forms) == 1:  # the other rows need not be computed
                    shown = [shown[row] for row in wanted]
                picked = None if len(wanted) == len(shown) else wanted
                readings.append(Reading(form or heads.task, head, picked, own_starts))
            rows.output_rows.extend(shown)
            groups.append(HeadGroup(readings, members, first_row, len(shown)))
        return rows, groups

    def _collect_events(self, reading: OpenReading, found: Sequence[TextEvents]) -> list[HandleEvent]:
        events: list[HandleEvent] = []
        # A text may have ended while its batch was computed, and heads read several texts at once.
        found = [(number, answers) for number, answers in found if reading.handles[number] in self._requests]
        for number, answers in found:
            handle = reading.handles[number]
            tokens = len(self._requests[handle].tokens)
            finite = [event for event in answers if event is not None]
            if len(finite) == len(answers):
                events += ((handle, event) for event in finite)
                events.append((handle, Done("encoded", tokens)))
            else:
                error = StepFailed("the model computed numbers that are not finite for this request")
                events.append((handle, Failed(error)))
        self._remove(*(reading.handles[number] for number, _ in found))
        return events


def read_groups(
    groups: Sequence[HeadGroup], states: Tensor, is_wanted: Callable[[int], bool]
) -> Iterator[TextEvents | None]:
    """The events of the texts of all groups of a step, which `is_wanted` numbers through; None between two pieces of
    work."""
    first = 0
    for group in groups:
        for answer in group.read(states, number_from(first, is_wanted)):
            yield None if answer is None else (first + answer[0], answer[1])
        first += len(group.requests)


def number_from(first: int, is_wanted: Callable[[int], bool]) -> Callable[[int], bool]:
    """`is_wanted` of the numbers that begin at `first`."""
    return lambda number: is_wanted(first + number)


def check_label_rows(request: Encode | ExplainTextRequest, task: Task) -> None:
    """Raise BadRequest unless the request names exactly the rows that a head of this task reads: of labels or options,
    and of its text."""
    wanted = ROWS_OF_TASKS.get(task, ())
    for name, rows in (("label_rows", request.label_rows), ("text_rows", request.text_rows)):
        if name not in wanted and rows:
            known = f"a model that can {task} reads no {name}" if wanted else "the model reads no labels beside a text"
            raise BadRequest(known, param="input")
        if name in wanted and (not rows or rows[-1] >= len(request.tokens) or not is_ascending((-1, *rows))):
            message = f"{name}: must be ascending and below the {len(request.tokens)} tokens, and not empty"
            raise BadRequest(message, param="input")
    if "text_rows" in wanted and len(request.label_rows) > MAX_LABELS:  # scores of spans are as many as labels
        raise BadRequest(f"label_rows: at most {MAX_LABELS}, got {len(request.label_rows)}", param="input")


def select_states(states: Tensor, rows: list[int] | None) -> Tensor:
    """[R, W] states of a group to those of `rows`; None: all."""
    return states if rows is None else states[torch.tensor(rows, dtype=torch.int64, device=states.device)]


def step_order(request: Encode) -> tuple[int, tuple[OutputForm, ...], bool, int]:
    """Sort key within a step: by adapter, by outputs, then by length."""
    return request.adapter, request.forms, request.is_query, len(request.tokens)


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


def select_rows(requests: list[Encode], start: int, head: OutputHead) -> tuple[Sequence[int], list[int]]:
    """The rows that `head`, and those beside it, see of texts whose first row is `start`, and how many they are of each
    text."""
    read = [request.rows or range(count_read_tokens(head, request.tokens)) for request in requests]
    counts, lengths = [len(rows) for rows in read], [len(request.tokens) for request in requests]
    if counts == lengths:
        return range(start, start + sum(counts)), counts
    shown: list[int] = []
    for rows, length in zip(read, lengths, strict=True):
        shown += [start + row for row in rows]
        start += length
    return shown, counts


def is_ascending(numbers: tuple[int, ...]) -> bool:
    return all(a < b for a, b in pairwise(numbers))
