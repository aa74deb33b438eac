"""Requests that are answered by one event: their queue and their deadlines.

A request is kept from its submission to its end, however it ends, and is removed in one place.
"""

from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

from ..concurrency.fair_queue import Deadlines, FairQueue
from ..core.request import Encode, ExplainTextRequest, Failed
from .worker import HandleEvent, RequestHandle, deadline_error

R = TypeVar("R", Encode, ExplainTextRequest)


class PendingRequests(Generic[R]):
    """Requests that wait, are being computed, or are to be tried again."""

    def __init__(self) -> None:
        self._requests: dict[RequestHandle, R] = {}
        self._waiting: FairQueue[RequestHandle] = FairQueue()
        self._deadlines: Deadlines[RequestHandle] = Deadlines()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, ticket: RequestHandle) -> bool:
        return ticket in self._requests

    def __getitem__(self, ticket: RequestHandle) -> R:
        return self._requests[ticket]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, ticket: RequestHandle, request: R) -> None:
        self._requests[ticket] = request
        self._waiting.add(ticket, request.terms.owner, request.terms.priority)
        self._deadlines.add(ticket, request.terms.deadline)

    def peek(self, without: Collection[str] = ()) -> RequestHandle | None:
        """The next request of the queue; it stays there until it is started."""
        return self._waiting.peek(without)

    def start(self, ticket: RequestHandle) -> None:
        """Take a request off the queue and charge its owner."""
        self._waiting.remove(ticket)

    def charge(self, ticket: RequestHandle, cost: float) -> None:
        """Its owner pays for it: tokens or seconds, the same for all requests of one worker."""
        self._waiting.charge(self.owner(ticket), cost)

    def owner(self, ticket: RequestHandle) -> str:
        return self._requests[ticket].terms.owner

    def next_owner(self, tickets: Iterable[RequestHandle]) -> str:
        """The owner of some of `tickets` that has been served least."""
        return self._waiting.next_owner(map(self.owner, tickets))

    def remove(self, ticket: RequestHandle) -> None:
        del self._requests[ticket]
        self._deadlines.remove(ticket)
        if ticket in self._waiting:
            self._waiting.remove(ticket)

    def expired(self, now: float) -> list[HandleEvent]:
        """The events of requests whose deadline has passed.  They stay until they are removed."""
        return [(ticket, Failed(deadline_error(ticket, now))) for ticket in self._deadlines.expired(now)]

    def check(self) -> None:
        """Assert that no ended request is kept."""
        assert not self._waiting, "the queue holds a request that is not pending"
        assert not self._deadlines, "a deadline outlives its request"
