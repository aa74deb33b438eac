"""When full garbage collections happen."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator

import pytest

from polyhead.service.server.garbage_collection import (
    CHECK_S,
    LARGEST_GROWTH,
    LARGEST_SHARE,
    LONGEST_S,
    FullCollections,
)
from tests.support.processes import PATIENCE


class Kept:
    """A large object that refers to itself."""

    def __init__(self) -> None:
        self.myself, self.payload = self, bytearray(1 << 20)


class Process:
    """A process with clocks that are set by hand; `young` counts its collections of young objects."""

    def __init__(self, cost: float = 0.0) -> None:
        self.now, self.used, self.young, self.cost, self.memory = 0.0, 0.0, 0, cost, 0
        self.collections = FullCollections(
            lambda: self.young, lambda: self.memory, lambda: self.now, self.processor_time
        )

    def processor_time(self) -> float:
        """Between two readings a collection takes `cost`."""
        self.used += self.cost
        return self.used

    def run(self, seconds: float, *, is_busy: bool) -> list[float]:
        """Check for some time; returns when it collected."""
        collected = list[float]()
        for _ in range(round(seconds / CHECK_S)):
            self.now += CHECK_S
            self.young += is_busy
            if self.collections.check():
                collected.append(self.now)
        return collected


@pytest.fixture
def old_cycle() -> Iterator[Callable[[], weakref.ref[Kept]]]:
    """Makes a reference cycle that young collections do not examine any more."""

    def make() -> weakref.ref[Kept]:
        kept = Kept()
        gc.collect()
        return weakref.ref(kept)

    gc.disable()
    yield make
    gc.enable()


def test_a_cycle_is_freed_as_soon_as_the_process_is_quiet(old_cycle: Callable[[], weakref.ref[Kept]]) -> None:
    process, cycle = Process(), old_cycle()
    process.run(5, is_busy=True)
    assert cycle() is not None
    assert process.run(3, is_busy=False) == [6.0]
    assert cycle() is None


def test_a_cycle_is_freed_in_a_bounded_time_where_the_process_is_never_quiet(
    old_cycle: Callable[[], weakref.ref[Kept]],
) -> None:
    process, cycle = Process(), old_cycle()
    assert process.run(3 * LONGEST_S, is_busy=True) == [LONGEST_S, 2 * LONGEST_S, 3 * LONGEST_S]
    assert cycle() is None


def test_a_cycle_is_freed_where_memory_has_grown_however_costly_that_is(
    old_cycle: Callable[[], weakref.ref[Kept]],
) -> None:
    process, cycle = Process(cost=1.0), old_cycle()
    process.run(LONGEST_S, is_busy=True)
    process.memory = LARGEST_GROWTH - 1
    assert process.run(5, is_busy=True) == []
    process.memory += 1
    assert process.run(5, is_busy=True) == [process.now - 4]
    assert cycle() is None


def test_costly_collections_are_rare_whether_or_not_the_process_is_quiet() -> None:
    process = Process(cost=1.0)
    assert process.run(LONGEST_S, is_busy=True) == [LONGEST_S]
    for is_busy in (True, False) * 45:
        assert process.run(CHECK_S, is_busy=is_busy) == []
    process.run(CHECK_S, is_busy=True)
    assert process.run(60, is_busy=False) == [LONGEST_S + 1.0 / LARGEST_SHARE]


def test_nothing_is_examined_again_while_nothing_happens() -> None:
    process = Process()
    assert process.run(2 * LONGEST_S, is_busy=False) == []
    process.run(CHECK_S, is_busy=True)
    assert len(process.run(2 * LONGEST_S, is_busy=False)) == 1


SERVER = f"""
import gc, time, weakref
from polyhead.service.server.process import tune_interpreter
tune_interpreter()
full = gc.get_stats()[2]["collections"]
rows = [[[] for _ in range(1000)] for _ in range(300)]
assert gc.get_stats()[2]["collections"] == full, "a call with many objects is examined in one piece"

class Cycle: pass
cycle = Cycle()
cycle.myself, gone = cycle, weakref.ref(cycle)
gc.collect(1)
del cycle
for _ in range(10 * {PATIENCE:.0f}):
    time.sleep(0.1)
    if gone() is None:
        break
assert gone() is None
"""


def test_a_server_starts_no_full_collection_while_it_works_and_one_when_it_is_quiet() -> None:
    subprocess.run([sys.executable, "-c", SERVER], check=True)
