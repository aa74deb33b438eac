"""What the event loop sends to the engine thread: functions, which are run between steps.

Those of one owner wait in a line: they run in the order in which they were sent, and a limited number of them between
two steps.  Lines do not wait for each other: a single request of one owner is accepted before the next step, whatever
another has sent.  What concerns all owners, such as a new worker, runs before all lines.  Only what ends a subject,
such as the removal of a worker, runs after what was sent about it: that leaves the lines of its owners, and both wait
in a line for ends.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from ..concurrency.time_slices import SLICE_SIZE

INBOX_LIMIT = 2 * SLICE_SIZE  # functions and accepted streams of one line that are run between two steps
Function = Callable[[], None]


@dataclass(frozen=True, eq=False, slots=True)
class InboxItem:
    """A function of `owner` about `subject`, or, without an owner, one of all owners.

    `work` is how much it counts towards the limit.  It runs after what was sent before it about the subjects `ended`.
    """

    function: Function
    owner: str | None = None
    work: int = 1
    subject: object = None
    ended: Collection[object] = ()


class Inbox:
    """`send` and `send_for_all` are called on the event loop thread, `take_turn` on the engine thread."""

    def __init__(self) -> None:
        self._sent: deque[InboxItem] = deque()  # both threads
        self._for_all: deque[InboxItem] = deque()  # engine thread, as the next
        self._lines: dict[str | None, deque[InboxItem]] = {}  # by owner; None: that for ends.  None of them is empty

    def __bool__(self) -> bool:
        return bool(self._sent or self._for_all or self._lines)

    def send(self, function: Function, owner: str, work: int = 1, subject: object = None) -> None:
        self._sent.append(InboxItem(function, owner, work, subject))

    def send_for_all(self, function: Function, ended: Collection[object] = ()) -> None:
        """Send what concerns all owners.  Nothing may be sent about the subjects `ended` after it."""
        self._sent.append(InboxItem(function, ended=ended))

    def take_turn(self) -> Iterator[Function]:
        """The functions to be run before the next step.  One of them may take a turn itself."""
        done = Counter[str | None]()
        while True:
            self._sort_sent()
            if self._for_all:
                yield self._for_all.popleft().function
                continue
            if all(done[owner] >= INBOX_LIMIT for owner in self._lines):
                return
            owner = next(owner for owner in self._lines if done[owner] < INBOX_LIMIT)
            done[owner] += self._lines[owner][0].work
            yield self._take_first(owner).function  # kept nowhere: it may hold a model that the next one is to free

    def _sort_sent(self) -> None:
        while self._sent:
            item = self._sent.popleft()
            if item.owner is not None:
                self._lines.setdefault(item.owner, deque()).append(item)
            elif item.ended:
                self._lines.setdefault(None, deque()).extend([*self._take_about(item.ended), item])
            else:
                self._for_all.append(item)

    def _take_about(self, subjects: Collection[object]) -> list[InboxItem]:
        """Take what waits about `subjects` out of its lines, those of one line in their order."""
        taken: list[InboxItem] = []
        for owner in [owner for owner in self._lines if owner is not None]:
            line = self._lines.pop(owner)
            taken += [item for item in line if item.subject in subjects]
            if others := [item for item in line if item.subject not in subjects]:
                self._lines[owner] = deque(others)
        return taken

    def _take_first(self, owner: str | None) -> InboxItem:
        line = self._lines[owner]
        item = line.popleft()
        if not line:
            del self._lines[owner]
        return item
