"""What the engine expects of a worker, and what it tells an observer.

A worker is one way of batching (token by token, or whole texts) over one model.  It knows neither threads nor clients:
`refuse` apart, only the engine's thread calls it, and it hands answers back as (ticket, event), so that one step is one
delivery.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, Protocol

from ..core.errors import Expired, PolyheadError, StepFailed
from ..core.request import DEFAULT_TERMS, Event, Request, Terms, WorkerTask

RequestOutcome = Literal["done", "failed", "aborted", "expired"]
FinishReason = Literal["", "stop", "length", "encoded", "explained"]


@dataclass(slots=True)
class RequestTiming:
    """How a request fares, for whoever tells of it afterwards.  Times are those of `time.perf_counter`; 0: not yet.

    Lives on the event loop thread, but for `begun`, which the engine's thread writes.
    """

    submitted: float = field(default_factory=perf_counter)
    started: float = 0.0  # when it was first computed
    first_token: float = 0.0  # when its first token was heard of
    last_text: float = 0.0  # when the last of it became text
    text_seconds: float = 0.0  # seconds that took, in all
    ended: float = 0.0
    prompt_tokens: int = 0  # tokens
    generated_tokens: int = 0  # generated
    cached_tokens: int = 0  # of the prompt's
    outcome: RequestOutcome = "aborted"  # unless it ends otherwise
    reason: str = ""

    def record_text(self, began: float) -> None:
        """Some of it became text just now."""
        self.last_text = perf_counter()
        self.text_seconds += self.last_text - began


class RequestHandle(Protocol):
    """A request on its way, compared by identity.  Its answer is received on the event loop thread."""

    @property
    def request(self) -> Request: ...

    @property
    def timing(self) -> RequestTiming: ...

    @property
    def submitted(self) -> float:
        """When, by `time.perf_counter`."""

    def receive(self, event: Event) -> None: ...


@dataclass(eq=False, slots=True)
class WarmupRequest:
    """A ticket nobody waits for: what a worker warms up with."""

    request: Request
    submitted: float = field(default_factory=perf_counter)
    timing: RequestTiming = field(default_factory=RequestTiming)

    def receive(self, event: Event) -> None:
        """Nobody listens."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step in numbers.  Counts are of this step; `running`, `waiting` and blocks are as it leaves them."""

    model: str
    task: WorkerTask
    sequences: int
    tokens: int
    padding: int  # token slots computed that belong to no token
    forward_s: float
    sample_s: float  # sampling, or the head and its closing
    running: int
    waiting: int
    blocks_total: int = 0
    blocks_used: int = 0
    preemptions: int = 0
    cached_tokens: int = 0  # tokens of prompts found stored
    drafted: int = 0  # tokens foretold and tried
    accepted: int = 0  # those of them that came
    adapters: Mapping[int, int] = field(default_factory=dict)  # of those running, how many with each adapter
    queue_s: list[float] = field(default_factory=list)  # submitted to first scheduled, of those first scheduled now
    first_token_s: list[tuple[float, str]] = field(default_factory=list)  # submitted to first token, and whose trace
    inter_token_s: list[float] = field(default_factory=list)  # token to token


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended.  Every request ends once.

    `reason` is its error's code, if it has one; `finish` what ended an answer that is done.
    """

    model: str
    task: WorkerTask
    outcome: RequestOutcome
    seconds: float  # since it was submitted
    prompt_tokens: int
    completion_tokens: int
    reason: str = ""
    terms: Terms = DEFAULT_TERMS
    finish: FinishReason = ""


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Open requests of one model."""

    waiting: int
    running: int


class Observer(Protocol):
    """Is told, on the event loop thread."""

    def record_step(self, report: StepReport) -> None: ...

    def record_end(self, ended: RequestEnd) -> None: ...

    def record_idle(self, model: str, task: WorkerTask) -> None:
        """Nothing of this model is computed, whatever its last step said: the rest was aborted since, or is held."""


HandleEvent = tuple[RequestHandle, Event]


def deadline_error(ticket: RequestHandle, now: float) -> Expired:
    """What a request is told whose deadline has passed."""
    return Expired(f"the deadline has passed: {now - ticket.submitted:.1f} s after the request was submitted")


def submission_error(error: Exception) -> PolyheadError:
    """The error of a request that a worker could not take."""
    return error if isinstance(error, PolyheadError) else StepFailed("the request could not be begun")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step leaves: events in order, and the report."""

    events: list[HandleEvent]
    report: StepReport


class Worker(Protocol):
    """One model at work."""

    @property
    def model(self) -> str: ...

    @property
    def task(self) -> WorkerTask: ...

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    @property
    def is_background(self) -> bool:
        """Whether it takes what others leave: see service.engine.background_throttle."""

    def validate(self, request: Request) -> None:
        """Raise BadRequest if it can never be done.  Any thread may ask: it looks at nothing that changes."""

    def detach(self, number: int) -> None:
        """Let go of an adapter, which nobody asks for any more."""

    def submit(self, ticket: RequestHandle) -> None: ...

    def abort(self, ticket: RequestHandle) -> None:
        """Free what it holds and say no more of it.  One that is not here is no error."""

    def pause(self, ticket: RequestHandle) -> None:
        """Compute no more of it until `resume`: its reader is behind.  One that is not here is no error, in both."""

    def resume(self, ticket: RequestHandle) -> None: ...

    def expire(self, now: float) -> list[HandleEvent]:
        """End those whose deadline is not after `now` (`time.perf_counter`), SLICE of them at most.

        They take part in no further step."""

    def step(self) -> StepResult: ...

    def blame_failed_step(self) -> list[HandleEvent]:
        """After `step` raised: end the request that is to blame, with an error; nobody while that is being found out.

        The steps that follow compute again what this one should have.
        """

    def self_test(self) -> None:
        """Compute the least there is to compute, beside the queue.  Raises if the model cannot."""

    def check_invariants(self) -> None:
        """Assert that nothing is leaked.  The engine asks when there is nothing else to do."""

    def warm_up(self, breathe: Callable[[], None] = lambda: None) -> None:
        """Do what is slow only the first time, calling `breathe` now and then.  For a worker without requests."""
