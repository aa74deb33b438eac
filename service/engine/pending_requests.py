"""Requests that one event answers: whose they are, who is next of those that wait, until when each is wanted.

Knows no batch and no network.  The one idea: a request is here from its submission to its end, however it ends, and
what is kept of it goes in one place.
"""

from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

from ..concurrency.fair_queue import Deadlines, Queue
from ..core.request import Encode, Explain, Failed
from .worker import Answer, Ticket, too_late

R = TypeVar("R", Encode, Explain)


class Pending(Generic[R]):
    """Those that wait, are being computed, or are to be tried again."""

    def __init__(self) -> None:
        self._asked: dict[Ticket, R] = {}
        self._waiting: Queue[Ticket] = Queue()
        self._deadlines: Deadlines[Ticket] = Deadlines()

    def __len__(self) -> int:
        return len(self._asked)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._asked

    def __getitem__(self, ticket: Ticket) -> R:
        return self._asked[ticket]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, ticket: Ticket, request: R) -> None:
        self._asked[ticket] = request
        self._waiting.add(ticket, request.terms.owner, request.terms.priority)
        self._deadlines.add(ticket, request.terms.deadline)

    def first(self, without: Collection[str] = ()) -> Ticket | None:
        """Who is next, of owners that are not among `without`; it waits until it is begun."""
        return self._waiting.first(without)

    def begin(self, ticket: Ticket) -> None:
        """It waits no more."""
        self._waiting.remove(ticket)

    def charge(self, ticket: Ticket, cost: float) -> None:
        """Its owner pays for it: tokens or seconds, the same for all requests of one worker."""
        self._waiting.charge(self.owner(ticket), cost)

    def owner(self, ticket: Ticket) -> str:
        return self._asked[ticket].terms.owner

    def next_owner(self, tickets: Iterable[Ticket]) -> str:
        """The owner of some of `tickets` that has been served least."""
        return self._waiting.next_owner(map(self.owner, tickets))

    def remove(self, ticket: Ticket) -> None:
        del self._asked[ticket]
        self._deadlines.remove(ticket)
        if ticket in self._waiting:
            self._waiting.remove(ticket)

    def late(self, now: float) -> list[Answer]:
        """What those are told whose time is over.  They stay until they are removed."""
        return [(ticket, Failed(too_late(ticket, now))) for ticket in self._deadlines.passed(now)]

    def check(self) -> None:
        """Assert that nobody is kept who has left."""
        assert not self._waiting, "somebody waits for whom nothing is asked"
        assert not self._deadlines, "a deadline outlives its request"
