"""The cost of a call, as a number that does not depend on the machine."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StepCounter:
    """Counts the lines of Python that run."""

    def __init__(self) -> None:
        self.count = 0

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.count += event == "line"
        return self.trace


@contextmanager
def counting_steps() -> Iterator[StepCounter]:
    """Count the lines of Python that this thread runs inside."""
    counter, before = StepCounter(), sys.gettrace()
    sys.settrace(counter.trace)
    try:
        yield counter
    finally:
        sys.settrace(before)


def count_steps(call: Callable[[], Any]) -> int:
    """How many lines of Python `call` runs."""
    with counting_steps() as counter:
        call()
    return counter.count
