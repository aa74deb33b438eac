"""The contract between the engine and its workers, and what is reported to an observer.

A worker is one way of batching (token by token, or whole texts) for one model.  Apart from `validate`, only the engine
thread calls it.  It returns events with the handles of their requests, so that one step is one delivery.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, Protocol

from ..core.errors import Expired, PolyheadError, StepFailed
from ..core.request import DEFAULT_TERMS, Event, FinishReason, Request, Terms, WorkerTask

RequestOutcome = Literal["done", "failed", "aborted", "expired"]


@dataclass(slots=True)
class RequestTiming:
    """The course of a request, for logs and traces.  Times are those of `time.perf_counter`; 0: not yet.

    Used on the event loop thread only.
    """

    submitted: float = field(default_factory=perf_counter)
    started: float = 0.0  # when it was first computed
    first_token: float = 0.0  # when its first token was delivered
    last_text: float = 0.0  # when its last tokens became text
    text_seconds: float = 0.0  # seconds spent on making text, in all
    ended: float = 0.0
    prompt_tokens: int = 0  # tokens
    generated_tokens: int = 0  # generated
    cached_tokens: int = 0  # prompt tokens found in the cache
    outcome: RequestOutcome = "aborted"  # unless it ends otherwise
    reason: str = ""

    def record_text(self, began: float) -> None:
        """Some of the answer became text just now."""
        self.last_text = perf_counter()
        self.text_seconds += self.last_text - began


class RequestHandle(Protocol):
    """A submitted request, compared by identity.  It receives its events on the event loop thread."""

    @property
    def request(self) -> Request: ...

    @property
    def timing(self) -> RequestTiming: ...

    @property
    def submitted(self) -> float:
        """Time of submission, by `time.perf_counter`."""

    def receive(self, event: Event) -> None: ...


@dataclass(eq=False, slots=True)
class WarmupRequest:
    """A request that a worker warms up with; its events are ignored."""

    request: Request
    submitted: float = field(default_factory=perf_counter)
    timing: RequestTiming = field(default_factory=RequestTiming)

    def receive(self, event: Event) -> None:
        """Ignore the event."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The numbers of one step.  `running`, `waiting` and blocks are those after the step, the others are of the step
    itself.
    """

    model: str
    task: WorkerTask
    sequences: int
    tokens: int
    padding: int  # computed token slots without a token
    forward_s: float
    sample_s: float  # sampling, or the head and its postprocessing
    running: int
    waiting: int
    blocks_total: int = 0
    blocks_used: int = 0
    window_blocks_total: int = 0  # blocks of windowed layers that are not those of other layers
    window_blocks_used: int = 0
    states_total: int = 0  # slots for states of recurrent layers
    states_used: int = 0
    states_cached: int = 0  # slots whose state another sequence can find
    preemptions: int = 0
    cached_tokens: int = 0  # prompt tokens found in the cache
    drafted: int = 0  # draft tokens computed
    accepted: int = 0  # draft tokens accepted
    adapters: Mapping[int, int] = field(default_factory=dict)  # number of running requests by adapter
    queue_s: list[float] = field(default_factory=list)  # submission to first step, of requests first scheduled now
    first_token_s: list[tuple[float, str]] = field(default_factory=list)  # submission to first token, and trace id
    inter_token_s: list[float] = field(default_factory=list)  # token to token


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended.  Every request ends once.

    `reason` is its error's code, if it has one; `finish` is what ended an answer that is done.
    """

    model: str
    task: WorkerTask
    outcome: RequestOutcome
    seconds: float  # since it was submitted
    prompt_tokens: int
    completion_tokens: int
    reason: str = ""
    terms: Terms = DEFAULT_TERMS
    finish: FinishReason | Literal[""] = ""


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Open requests of one model."""

    waiting: int
    running: int


class Observer(Protocol):
    """Receives reports on the event loop thread."""

    def record_step(self, report: StepReport) -> None: ...

    def record_end(self, ended: RequestEnd) -> None: ...

    def record_idle(self, model: str, task: WorkerTask) -> None:
        """The model computes nothing any more, whatever its last report says: its requests were aborted or paused
        since.
        """


HandleEvent = tuple[RequestHandle, Event]


def deadline_error(handle: RequestHandle, now: float) -> Expired:
    """The error of a request whose deadline has passed."""
    return Expired(f"the deadline has passed: {now - handle.submitted:.1f} s after the request was submitted")


def submission_error(error: Exception) -> PolyheadError:
    """The error of a request that a worker could not accept."""
    return error if isinstance(error, PolyheadError) else StepFailed("the request could not be begun")


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: events in order, the report, and the requests that were computed for the first time, which
    the step began at `began` (`time.perf_counter`).
    """

    events: list[HandleEvent]
    report: StepReport
    started: Sequence[RequestHandle]
    began: float


class Worker(Protocol):
    """Computes the requests of one model."""

    @property
    def model(self) -> str: ...

    @property
    def task(self) -> WorkerTask: ...

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    @property
    def is_background(self) -> bool:
        """Whether it only uses time that others leave: see service.engine.background_throttle."""

    def validate(self, request: Request) -> None:
        """Raise BadRequest if the request can never be computed.  Any thread may call it; it reads constant values
        only.
        """

    def detach(self, number: int) -> None:
        """Remove an adapter that no request uses any more."""

    def submit(self, handle: RequestHandle) -> None: ...

    def abort(self, handle: RequestHandle) -> None:
        """Free what the request holds; no events follow.  An unknown handle is no error."""

    def pause(self, handle: RequestHandle) -> None:
        """Compute no more of it until `resume`: its reader is behind.  An unknown handle is no error, in both."""

    def resume(self, handle: RequestHandle) -> None: ...

    def expire(self, now: float) -> list[HandleEvent]:
        """End requests whose deadline is not after `now` (`time.perf_counter`), SLICE_SIZE of them at most.

        They take part in no further step.
        """

    def step(self) -> StepResult: ...

    def blame_failed_step(self) -> list[HandleEvent]:
        """After `step` raised: end the requests to blame and return their errors; none while the step is still being
        bisected.

        The following steps compute again what this one should have computed.
        """

    def self_test(self) -> None:
        """Compute the smallest possible input, outside of the queue.  Raises if the model cannot compute."""

    def check_invariants(self) -> None:
        """Assert that nothing is leaked.  The engine calls it when the worker is idle."""

    def warm_up(self, breathe: Callable[[], None] = lambda: None) -> None:
        """Do what is slow only the first time, calling `breathe` now and then.  For a worker without requests."""
