"""A guard for threads that must not wait for others, such as an engine's."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Condition, Lock, get_ident
from types import ModuleType

import pytest


class WaitGuard:
    """While it is `watched`, a thread may not wait for a future, an event or a condition without a limit of time, nor
    for a lock that `modules` make from now on: AssertionError where it would.  A lock that is free counts, too: another
    thread might have it.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self._thread = 0
        self.faults: list[str] = []  # also those that were caught
        wait = Condition.wait

        def checked_wait(condition: Condition, timeout: float | None = None) -> bool:
            if timeout is None:
                self.check("a future, an event or a condition")
            return wait(condition, timeout)

        patch.setattr(Condition, "wait", checked_wait)
        for module in modules:
            patch.setattr(module, "Lock", partial(GuardedLock, self))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch this thread."""
        self._thread = get_ident()
        try:
            yield
        finally:
            self._thread = 0
        assert not self.faults

    def check(self, what: str) -> None:
        if get_ident() == self._thread:
            self.faults.append(f"waits for {what}")
            raise AssertionError(self.faults[-1])


class GuardedLock:
    """A lock that a watched thread may only try to take.  `unwatched` is the lock itself, as other threads use it."""

    def __init__(self, guard: WaitGuard) -> None:
        self._guard, self.unwatched = guard, Lock()
        self.release = self.unwatched.release

    def acquire(self, blocking: bool = True) -> bool:
        if blocking:
            self._guard.check("a lock")
        return self.unwatched.acquire(blocking)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
