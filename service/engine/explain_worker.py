"""The worker of explanations: one text at a time through a network of its own that exposes its attention.

An explanation is computed in many small pieces, and after each of them the engine lets other workers step.  Other
requests are answered by another network with fused attention, so an explanation slows none of them: it is a background
worker (see service.engine.background_throttle).
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from polyhead.models.core.errors import UnsupportedError
from polyhead.models.explain import Explanation, ExplanationRequest, InputTokens, InstrumentedNetwork, Share, explain
from polyhead.models.network.heads import count_read_tokens

from ..core.errors import BadRequest, StepFailed
from ..core.request import (
    AttentionWeights,
    Attribution,
    Done,
    Event,
    ExplainTextRequest,
    ExplanationProgress,
    ExplanationResult,
    Failed,
    Request,
    Task,
    WorkerTask,
)
from .encoder_worker import check_label_rows
from .head_outputs import OutputHead
from .pending_requests import PendingRequests
from .worker import HandleEvent, RequestHandle, StepReport, StepResult, WarmupRequest

MAX_ACTIVE_JOBS = 4  # explanations computed in rotation, so that a short one does not wait for a long one
MAX_JOBS = 6  # the same; those beyond MAX_ACTIVE_JOBS belong to owners without another active job
PROGRESS_STEP = 0.01  # of the work between two events that say how much is done, so there are 100 of them at most


@dataclass
class ExplainJob:
    """An explanation that is computed, and the share of its work that was reported as done."""

    pieces: Generator[Share, None, Explanation]
    reported: float = 0.0


class ExplainWorker:
    """`piece` is about how many rows are computed in one step.

    `head` is the network's head, None for a generator, and `answers` is the task of the model.  `check_cost` raises a
    PolyheadError for a request that costs too much.
    """

    task: WorkerTask = "explain"
    is_background = True

    def __init__(
        self, watched: InstrumentedNetwork, head: OutputHead | None, *, model: str, answers: Task, piece: int
    ) -> None:
        self.model = model
        self.check_cost: Callable[[ExplanationRequest], None] = lambda asked: None  # noqa: ARG005
        self._network, self._head, self._rows_per_piece = watched, head, piece
        self._answers = answers
        self._shortest_source = (0,) if watched.seq2seq is not None else ()
        self._requests: PendingRequests[ExplainTextRequest] = PendingRequests()
        self._jobs: dict[RequestHandle, ExplainJob] = {}
        self._rotation: deque[RequestHandle] = deque()  # requests with a job; the first has waited longest for a step
        self._current: RequestHandle | None = None  # the request to blame if the step fails

    @property
    def layout(self) -> Mapping[str, tuple[int, int]]:
        """Layers and heads of each kind of attention that can be shown.  Constant."""
        return {str(kind): shape for kind, shape in self._network.layout.items()}

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def validate(self, request: Request) -> None:
        assert isinstance(request, ExplainTextRequest)
        if not request.tokens:
            raise BadRequest("the text has no tokens", param="input")
        if request.goals:
            check_label_rows(request, self._answers)
        self.check_cost(to_explain_query(request))

    def release(self) -> None:
        """Free the network's memory.  The worker takes no request afterwards."""
        self._network.release()

    def detach(self, number: int) -> None:
        """Does nothing: the network has no adapters, each adapter is merged into a network of its own."""

    def submit(self, handle: RequestHandle) -> None:
        request = handle.request
        assert isinstance(request, ExplainTextRequest)
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
        for handle, _ in late:
            self._remove(handle)
        return late

    def step(self) -> StepResult:
        began, started = perf_counter(), list[RequestHandle]()
        while (new_handle := self._next_to_start()) is not None:
            self._current = new_handle
            self._start(new_handle)
            started.append(new_handle)
        self._current = handle = self._next_handle()
        request, turn = self._requests[handle], perf_counter()
        events = self._advance(handle)
        has_ended = any(isinstance(event, Done | Failed) for event in events)
        self._requests.charge(handle, perf_counter() - turn)
        self._current = None  # a handle refers to its worker, whose memory must be freed as soon as it is dropped
        if has_ended:
            self._remove(handle)
        report = StepReport(
            model=self.model,
            task=self.task,
            sequences=1,
            tokens=request.prompt_tokens if has_ended else 0,
            padding=0,
            forward_s=perf_counter() - began,
            sample_s=0.0,
            running=len(self._rotation),
            waiting=self._requests.waiting,
            queue_s=[began - each.submitted for each in started],
        )
        return StepResult([(handle, event) for event in events], report, started, began)

    def blame_failed_step(self) -> list[HandleEvent]:
        blamed, self._current = self._current, None
        if blamed is None:
            return []
        self._remove(blamed)
        return [(blamed, Failed(StepFailed("the step that computed this request failed")))]

    def self_test(self) -> None:
        """Explain one token."""
        job = self._new_job(ExplainTextRequest("proof", (0,), "attention", source=self._shortest_source))
        for _ in job.pieces:
            pass

    def check_invariants(self) -> None:
        """Assert that no ended request is kept."""
        self._requests.check()
        assert not self._jobs, "a job has no request"
        assert not self._rotation, "the rotation holds a request without a job"

    def warm_up(self, breathe: Callable[[], None] = lambda: None) -> None:
        self.submit(
            WarmupRequest(ExplainTextRequest("warm-up", (0,) * 8, "attention", source=self._shortest_source * 8))
        )
        while self.has_work:
            self.step()
            breathe()

    def _next_to_start(self) -> RequestHandle | None:
        """The next waiting request that may be started now; None: too many are active."""
        if len(self._rotation) < MAX_ACTIVE_JOBS:
            return self._requests.peek()
        if len(self._rotation) < MAX_JOBS:
            return self._requests.peek(without={self._requests.owner(handle) for handle in self._rotation})
        return None

    def _next_handle(self) -> RequestHandle:
        """The next request to be computed: of the owner served least, the one that has waited longest for a step."""
        owner = self._requests.next_owner(self._rotation)
        handle = next(each for each in self._rotation if self._requests.owner(each) == owner)
        self._rotation.remove(handle)
        self._rotation.append(handle)
        return handle

    def _start(self, handle: RequestHandle) -> None:
        self._requests.start(handle)
        self._jobs[handle] = self._new_job(self._requests[handle])
        self._rotation.append(handle)

    def _new_job(self, request: ExplainTextRequest) -> ExplainJob:
        return ExplainJob(explain(self._network, to_explain_query(request), piece=self._rows_per_piece))

    def _advance(self, handle: RequestHandle) -> list[Event]:
        """Compute a piece of an explanation.  Returns its result after the last piece; before, where it is asked for,
        how much is done.
        """
        request, job = self._requests[handle], self._jobs[handle]
        try:
            share = next(job.pieces)
        except StopIteration as over:
            return self._build_events(request, over.value)
        except UnsupportedError as error:
            return [Failed(BadRequest(str(error), param="method"))]
        if not request.reports_progress or share is None or share < job.reported + PROGRESS_STEP:
            return []
        job.reported = share
        return [ExplanationProgress(share)]

    def _build_events(self, request: ExplainTextRequest, found: Explanation) -> list[Event]:
        numbers = [each.values for each in found.weights] + [each.values for each in found.attributions]
        numbers += [np.array([each.score for each in found.attributions])]
        if not all(np.isfinite(some).all() for some in numbers):
            message = f"model {self.model!r} computed numbers that are not finite for this request"
            return [Failed(StepFailed(message))]
        weights = tuple(
            AttentionWeights(each.kind, each.layers, each.heads, to_memoryview(each.values)) for each in found.weights
        )
        attributions = tuple(
            Attribution(to_memoryview(each.values), each.score, each.baseline) for each in found.attributions
        )
        count = count_read_tokens(self._head, request.tokens)
        rows = self._head.needed_rows([0, count])[0] if self._head is not None else []
        return [ExplanationResult(weights, attributions, tuple(rows)), Done("explained", request.prompt_tokens)]

    def _remove(self, handle: RequestHandle) -> None:
        self._requests.remove(handle)
        if job := self._jobs.pop(handle, None):
            self._rotation.remove(handle)
            job.pieces.close()


def to_explain_query(request: ExplainTextRequest) -> ExplanationRequest:
    return ExplanationRequest(
        text=InputTokens(
            request.tokens, request.segments, request.source, request.label_rows, request.text_rows, request.question
        ),
        method=request.method,
        goals=request.goals,
        layers=request.layers,
        heads=request.heads,
        steps=request.steps,
        baseline=request.baseline,
        kept_rows=request.kept_rows,
        window=request.window,
        compared_text=InputTokens(request.compared_tokens) if request.compared_tokens else None,
    )


def to_memoryview(values: NDArray[np.float32]) -> "memoryview[float]":
    """A contiguous float32 buffer that keeps its shape."""
    return memoryview(np.ascontiguousarray(values, np.float32))  # type: ignore[arg-type]
