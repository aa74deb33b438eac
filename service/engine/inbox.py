"""What the event loop sends to the engine thread: functions, which are run between steps.

Those of one owner run in the order in which they were sent, and a limited number of them between two steps.  Owners do
not wait for each other: a single request of one is accepted before the next step, whatever another has sent.  What
concerns all owners, such as a new worker, runs after everything that was sent before it.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..concurrency.time_slices import SLICE_SIZE

INBOX_LIMIT = 2 * SLICE_SIZE  # functions and accepted streams of one owner that are run between two steps
Function = Callable[[], None]


@dataclass(frozen=True, slots=True)
class InboxItem:
    """A function of `owner`, or of all owners.  `work` is how much it counts towards the limit."""

    function: Function
    owner: str = ""
    work: int = 1
    is_for_all: bool = False


class Inbox:
    """`send` and `send_for_all` are called on the event loop thread, `take_turn` on the engine thread."""

    def __init__(self) -> None:
        self._sent: deque[InboxItem] = deque()  # both threads
        self._lines: dict[str, deque[InboxItem]] = {}  # by owner, none of them empty; engine thread

    def __bool__(self) -> bool:
        return bool(self._sent or self._lines)

    def send(self, function: Function, owner: str, work: int = 1) -> None:
        self._sent.append(InboxItem(function, owner, work))

    def send_for_all(self, function: Function) -> None:
        self._sent.append(InboxItem(function, is_for_all=True))

    def take_turn(self) -> Iterator[Function]:
        """The functions to be run before the next step.  One of them may take a turn itself."""
        done = Counter[str]()
        while True:
            self._sort_sent()
            owner = next((owner for owner in self._lines if done[owner] < INBOX_LIMIT), None)
            if owner is not None:
                item = self._take_first(owner)
                done[owner] += item.work
                yield item.function
            elif self._sent and not self._lines:
                yield self._sent.popleft().function
            else:
                return

    def _sort_sent(self) -> None:
        """Move what was sent to the lines of its owners, up to what concerns all of them."""
        while self._sent and not self._sent[0].is_for_all:
            item = self._sent.popleft()
            self._lines.setdefault(item.owner, deque()).append(item)

    def _take_first(self, owner: str) -> InboxItem:
        line = self._lines[owner]
        item = line.popleft()
        if not line:
            del self._lines[owner]
        return item
