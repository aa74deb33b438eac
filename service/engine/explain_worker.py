"""The worker of explanations: one text at a time through a network of its own, whose insides can be seen.

Knows tokens, goals and a watched network (models.explain); no labels, no text.  The one idea: an explanation is many
small pieces of work, and after each of them the engine lets others compute.  What answers the others is another network
with its fused attention, so whoever asks why pays for it alone: waiting (see service.engine.background_throttle).
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from polyhead.models.core.errors import UnsupportedError
from polyhead.models.explain import Asked, Explanation, Text, Watched, explain

from ..core.errors import BadRequest, StepFailed
from ..core.request import Attribution, Done, Duty, Event, Explain, Explained, Failed, Request, Weights
from .head_outputs import Head
from .pending_requests import Pending
from .worker import Answer, Rehearsal, Step, StepReport, Ticket

AT_ONCE = 4  # explanations that take turns, so that a short one does not wait for a long one
MOST_AT_ONCE = 6  # the same, where those that are more belong to owners that have no other

Job = Generator[None, None, Explanation]


class Explainer:
    """`piece`: about as many rows are computed at a time, then others have a turn.

    `head` answers for what is read, None where it is gone on with; `reads`: one sequence is read and another written;
    `bound` raises a PolyheadError for a request that is too much work.
    """

    task: Duty = "explain"
    patient = True

    def __init__(self, watched: Watched, head: Head | None, *, model: str, reads: bool, piece: int) -> None:
        self.model = model
        self.bound: Callable[[Asked], None] = lambda asked: None  # noqa: ARG005
        self._watched, self._head, self._piece = watched, head, piece
        self._read = (0,) if reads else ()  # the shortest source
        self._pending: Pending[Explain] = Pending()
        self._jobs: dict[Ticket, Job] = {}
        self._turns: deque[Ticket] = deque()  # those that have a job; the first had no turn for longest
        self._current: Ticket | None = None  # whose a failure would be

    @property
    def layout(self) -> Mapping[str, tuple[int, int]]:
        """Layers and heads of each kind of attention that can be seen.  Never changes."""
        return {str(kind): shape for kind, shape in self._watched.layout.items()}

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    def refuse(self, request: Request) -> None:
        assert isinstance(request, Explain)
        if not request.tokens:
            raise BadRequest("the text has no tokens", param="input")
        self.bound(asked_of(request))

    def release(self) -> None:
        """Let go of the network's memory.  The worker takes no request any more."""
        self._watched.release()

    def detach(self, number: int) -> None:
        """There are no adapters beside a network that explains: each is merged into one of its own."""

    def submit(self, ticket: Ticket) -> None:
        request = ticket.request
        assert isinstance(request, Explain)
        self._pending.add(ticket, request)

    def abort(self, ticket: Ticket) -> None:
        if ticket in self._pending:
            self._remove(ticket)

    def hold(self, ticket: Ticket) -> None:
        """An answer of one event is never behind."""

    def resume(self, ticket: Ticket) -> None:
        """See `hold`."""

    def expire(self, now: float) -> list[Answer]:
        late = self._pending.late(now)
        for ticket, _ in late:
            self._remove(ticket)
        return late

    def step(self) -> Step:
        began, waited = perf_counter(), list[float]()
        while (begun := self._next_to_begin()) is not None:
            self._current = begun
            self._begin(begun)
            begun.course.begun = began
            waited.append(began - begun.submitted)
        self._current = ticket = self._next_turn()
        request, turn = self._pending[ticket], perf_counter()
        events = self._advance(ticket)
        self._pending.charge(ticket, perf_counter() - turn)
        self._current = None  # a ticket leads back to its worker, and whoever drops that wants the memory at once
        if events:
            self._remove(ticket)
        report = StepReport(
            model=self.model,
            task=self.task,
            sequences=1,
            tokens=request.prompt_tokens if events else 0,
            padding=0,
            forward_s=perf_counter() - began,
            sample_s=0.0,
            running=len(self._turns),
            waiting=self._pending.waiting,
            queue_s=waited,
        )
        return Step([(ticket, event) for event in events], report)

    def fail(self) -> list[Answer]:
        guilty, self._current = self._current, None
        if guilty is None:
            return []
        self._remove(guilty)
        return [(guilty, Failed(StepFailed("the step that computed this request failed")))]

    def prove(self) -> None:
        """One token, looked at."""
        job = self._job(Explain("proof", (0,), "attention", source=self._read))
        for _ in job:
            pass

    def check(self) -> None:
        """Assert that nobody is kept who has left."""
        self._pending.check()
        assert not self._jobs, "somebody is explained to whom nobody listens"
        assert not self._turns, "somebody has a turn and nothing to do"

    def warm_up(self, breathe: Callable[[], None] = lambda: None) -> None:
        self.submit(Rehearsal(Explain("warm-up", (0,) * 8, "attention", source=self._read * 8)))
        while self.busy:
            self.step()
            breathe()

    def _next_to_begin(self) -> Ticket | None:
        """Who waits and may take turns with those that were begun."""
        if len(self._turns) < AT_ONCE:
            return self._pending.first()
        if len(self._turns) < MOST_AT_ONCE:
            return self._pending.first(without={self._pending.owner(ticket) for ticket in self._turns})
        return None

    def _next_turn(self) -> Ticket:
        """Of the owner that was computed for least, the one that had no turn for longest."""
        owner = self._pending.next_owner(self._turns)
        ticket = next(each for each in self._turns if self._pending.owner(each) == owner)
        self._turns.remove(ticket)
        self._turns.append(ticket)
        return ticket

    def _begin(self, ticket: Ticket) -> None:
        self._pending.begin(ticket)
        self._jobs[ticket] = self._job(self._pending[ticket])
        self._turns.append(ticket)

    def _job(self, request: Explain) -> Job:
        return explain(self._watched, asked_of(request), piece=self._piece)

    def _advance(self, ticket: Ticket) -> list[Event]:
        """A piece of its work; what it is answered, once that was the last."""
        try:
            next(self._jobs[ticket])
        except StopIteration as over:
            return self._events(self._pending[ticket], over.value)
        except UnsupportedError as error:
            return [Failed(BadRequest(str(error), param="method"))]
        return []

    def _events(self, request: Explain, found: Explanation) -> list[Event]:
        numbers = [each.values for each in found.weights] + [each.values for each in found.attributions]
        numbers += [np.array([each.score for each in found.attributions])]
        if not all(np.isfinite(some).all() for some in numbers):
            message = f"model {self.model!r} computed numbers that are not finite for this request"
            return [Failed(StepFailed(message))]
        weights = tuple(Weights(each.kind, each.layers, each.heads, plain(each.values)) for each in found.weights)
        worth = tuple(Attribution(plain(each.values), each.score, each.baseline) for each in found.attributions)
        rows = self._head.wanted([0, len(request.tokens)])[0] if self._head is not None else []
        return [Explained(weights, worth, tuple(rows)), Done("explained", request.prompt_tokens)]

    def _remove(self, ticket: Ticket) -> None:
        self._pending.remove(ticket)
        if job := self._jobs.pop(ticket, None):
            self._turns.remove(ticket)
            job.close()


def asked_of(request: Explain) -> Asked:
    return Asked(
        text=Text(request.tokens, request.segments, request.source),
        method=request.method,
        goals=request.goals,
        layers=request.layers,
        heads=request.heads,
        steps=request.steps,
        baseline=request.baseline,
        kept=request.kept,
        window=request.window,
        beside=Text(request.beside) if request.beside else None,
    )


def plain(values: NDArray[np.float32]) -> "memoryview[float]":
    """As one piece of memory that knows its shape."""
    return memoryview(np.ascontiguousarray(values, np.float32))  # type: ignore[arg-type]
