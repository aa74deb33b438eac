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
        self.waiting_tokens = 0  # prompt tokens of those in the queue

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, handle: RequestHandle) -> bool:
        return handle in self._requests

    def __getitem__(self, handle: RequestHandle) -> R:
        return self._requests[handle]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, handle: RequestHandle, request: R) -> None:
        self._requests[handle] = request
        self._waiting.add(handle, request.terms.owner, request.terms.priority)
        self._deadlines.add(handle, request.terms.deadline)
        self.waiting_tokens += request.prompt_tokens

    def peek(self, without: Collection[str] = ()) -> RequestHandle | None:
        """The next request of the queue, without those of the owners `without`; it stays there until it is started."""
        return self._waiting.peek(without)

    def start(self, handle: RequestHandle) -> None:
        """Take a request off the queue."""
        self._waiting.remove(handle)
        self.waiting_tokens -= self._requests[handle].prompt_tokens

    def charge(self, handle: RequestHandle, cost: float) -> None:
        """Charge the owner: tokens or seconds, the same unit for all requests of one worker."""
        self._waiting.charge(self.owner(handle), cost)

    def owner(self, handle: RequestHandle) -> str:
        return self._requests[handle].terms.owner

    def next_owner(self, handles: Iterable[RequestHandle]) -> str:
        """The owner of some of `handles` that has been served least."""
        return self._waiting.next_owner(map(self.owner, handles))

    def remove(self, handle: RequestHandle) -> None:
        if handle in self._waiting:
            self.start(handle)
        del self._requests[handle]
        self._deadlines.remove(handle)

    def expired(self, now: float) -> list[HandleEvent]:
        """The events of requests whose deadline has passed.  They stay until they are removed."""
        return [(handle, Failed(deadline_error(handle, now))) for handle in self._deadlines.expired(now)]

    def check(self) -> None:
        """Assert that no ended request is kept."""
        assert not self._waiting, "the queue holds a request that is not pending"
        assert not self.waiting_tokens, "tokens of requests that are not in the queue are counted"
        assert not self._deadlines, "a deadline outlives its request"
