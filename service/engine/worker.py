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
from ..core.request import UNCONDITIONAL, Duty, Event, Request, Terms

Outcome = Literal["done", "failed", "aborted", "expired"]
Finish = Literal["", "stop", "length", "encoded", "explained"]


@dataclass(slots=True)
class Course:
    """How a request fares, for whoever tells of it afterwards.  Times are those of `time.perf_counter`; 0: not yet.

    Lives on the event loop thread, but for `begun`, which the engine's thread writes.
    """

    submitted: float = field(default_factory=perf_counter)
    begun: float = 0.0  # when it was first computed
    first: float = 0.0  # when its first token was heard of
    written: float = 0.0  # when the last of it became text
    writing: float = 0.0  # seconds that took, in all
    ended: float = 0.0
    prompt: int = 0  # tokens
    tokens: int = 0  # generated
    cached: int = 0  # of the prompt's
    outcome: Outcome = "aborted"  # unless it ends otherwise
    reason: str = ""

    def wrote(self, began: float) -> None:
        """Some of it became text just now."""
        self.written = perf_counter()
        self.writing += self.written - began


class Ticket(Protocol):
    """A request on its way, compared by identity.  Its answer is received on the event loop thread."""

    @property
    def request(self) -> Request: ...

    @property
    def course(self) -> Course: ...

    @property
    def submitted(self) -> float:
        """When, by `time.perf_counter`."""

    def receive(self, event: Event) -> None: ...


@dataclass(eq=False, slots=True)
class Rehearsal:
    """A ticket nobody waits for: what a worker warms up with."""

    request: Request
    submitted: float = field(default_factory=perf_counter)
    course: Course = field(default_factory=Course)

    def receive(self, event: Event) -> None:
        """Nobody listens."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step in numbers.  Counts are of this step; `running`, `waiting` and blocks are as it leaves them."""

    model: str
    task: Duty
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
class Ended:
    """How a request ended.  Every request ends once.

    `reason` is its error's code, if it has one; `finish` what ended an answer that is done.
    """

    model: str
    task: Duty
    outcome: Outcome
    seconds: float  # since it was submitted
    prompt_tokens: int
    completion_tokens: int
    reason: str = ""
    terms: Terms = UNCONDITIONAL
    finish: Finish = ""


@dataclass(frozen=True, slots=True)
class Counts:
    """Open requests of one model."""

    waiting: int
    running: int


class Observer(Protocol):
    """Is told, on the event loop thread."""

    def step(self, report: StepReport) -> None: ...

    def ended(self, ended: Ended) -> None: ...

    def rested(self, model: str, task: Duty) -> None:
        """Nothing of this model is computed, whatever its last step said: the rest was aborted since, or is held."""


Answer = tuple[Ticket, Event]


def too_late(ticket: Ticket, now: float) -> Expired:
    """What a request is told whose deadline has passed."""
    return Expired(f"the deadline has passed: {now - ticket.submitted:.1f} s after the request was submitted")


def not_begun(error: Exception) -> PolyheadError:
    """The error of a request that a worker could not take."""
    return error if isinstance(error, PolyheadError) else StepFailed("the request could not be begun")


@dataclass(frozen=True, slots=True)
class Step:
    """What a step leaves: events in order, and the report."""

    answers: list[Answer]
    report: StepReport


class Worker(Protocol):
    """One model at work."""

    @property
    def model(self) -> str: ...

    @property
    def task(self) -> Duty: ...

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""

    @property
    def patient(self) -> bool:
        """Whether it takes what others leave: see service.engine.background_throttle."""

    def refuse(self, request: Request) -> None:
        """Raise BadRequest if it can never be done.  Any thread may ask: it looks at nothing that changes."""

    def detach(self, number: int) -> None:
        """Let go of an adapter, which nobody asks for any more."""

    def submit(self, ticket: Ticket) -> None: ...

    def abort(self, ticket: Ticket) -> None:
        """Free what it holds and say no more of it.  One that is not here is no error."""

    def hold(self, ticket: Ticket) -> None:
        """Compute no more of it until `resume`: its reader is behind.  One that is not here is no error, in both."""

    def resume(self, ticket: Ticket) -> None: ...

    def expire(self, now: float) -> list[Answer]:
        """End those whose deadline is not after `now` (`time.perf_counter`), SLICE of them at most.

        They take part in no further step."""

    def step(self) -> Step: ...

    def fail(self) -> list[Answer]:
        """After `step` raised: end the request that is to blame, with an error; nobody while that is being found out.

        The steps that follow compute again what this one should have.
        """

    def prove(self) -> None:
        """Compute the least there is to compute, beside the queue.  Raises if the model cannot."""

    def check(self) -> None:
        """Assert that nothing is leaked.  The engine asks when there is nothing else to do."""

    def warm_up(self, breathe: Callable[[], None] = lambda: None) -> None:
        """Do what is slow only the first time, calling `breathe` now and then.  For a worker without requests."""
