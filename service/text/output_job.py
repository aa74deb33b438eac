"""The reading of a call's answers on threads, and its memory. It ends early after the deadline or without a client."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ..concurrency.thread_pool import OwnerThreads
from ..core.errors import Expired
from ..core.request import DEFAULT_TERMS, Terms
from ..resources.request_memory import UNBOUNDED_HEADROOM, MemoryClaim
from .tokenization import wait_until

READING_PHRASE = "the answer was being read"

T = TypeVar("T")


@dataclass(slots=True)
class OutputJob:
    """The answers of one call, which are read on `threads`; `claim` is the memory of the call."""

    threads: OwnerThreads
    terms: Terms = DEFAULT_TERMS
    claim: MemoryClaim = field(default_factory=lambda: MemoryClaim(UNBOUNDED_HEADROOM))
    is_abandoned: bool = False  # its call no longer waits for it

    def check(self) -> None:
        """Raise Expired if the result is no longer needed. Called between parts of the work, on any thread."""
        if self.is_abandoned or time.perf_counter() >= self.terms.deadline:
            raise Expired(f"the deadline has passed while {READING_PHRASE}")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return what `work` returns, on a thread; `size` in characters or numbers. Raises Expired at the deadline."""
        return await wait_until(self.terms.deadline, self.threads.run(size, work), READING_PHRASE)
