"""Full garbage collections, at chosen moments.

A full collection examines all lists, objects and instances that requests keep alive, in one piece and with the
interpreter lock: 40 ns of a processor each.  By itself the interpreter starts one whenever their number has grown by a
quarter, so several while a large call begins, and all other requests wait for each.  What it finds are reference cycles
that lived for some time; all other objects are freed at once, and young cycles by collections of some thousand objects.
"""

import gc
import threading
import time
from collections.abc import Callable

from ..resources.process_info import resident_memory

YOUNG_OBJECTS, YOUNG_COLLECTIONS, NEVER = 700, 10, 1 << 30  # thresholds of the generations; the first two as usual
CHECK_S = 1.0  # seconds between two checks; a process is quiet where no young objects were collected in one of them
LONGEST_S = 30.0  # seconds until a full collection where the process is never quiet
LARGEST_SHARE = 0.01  # of a processor's time
LARGEST_GROWTH = 256 << 20  # bytes of memory since the last full collection, after which there is one at once


class FullCollections:
    """Decides when to collect: soon after the process has become quiet, after LONGEST_S otherwise, and so rarely that
    it takes at most LARGEST_SHARE of a processor; but at once where memory has grown by LARGEST_GROWTH.

    `count_young` returns how many collections of young objects there were, `measure_memory` resident bytes, `clock`
    seconds, `processor_clock` those of a processor that this thread has had.
    """

    def __init__(
        self,
        count_young: Callable[[], int],
        measure_memory: Callable[[], int] = resident_memory,
        clock: Callable[[], float] = time.monotonic,
        processor_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._count_young, self._clock, self._processor_clock = count_young, clock, processor_clock
        self._measure_memory, self._memory = measure_memory, measure_memory()  # after the last full collection
        self._seen = self._examined = count_young()  # at the last check; at the last full collection
        self._since = clock()  # the last check at which there was nothing new to examine
        self._ended, self._seconds = clock(), 0.0  # of the last full collection: when it ended, and its processor time

    def check(self) -> bool:
        """Collect, if it is time to.  Returns whether it did."""
        now, young = self._clock(), self._count_young()
        is_quiet, self._seen = young == self._seen, young
        if young == self._examined:
            self._since = now
            return False
        is_due = is_quiet or now - self._since >= LONGEST_S
        is_allowed = now - self._ended >= self._seconds / LARGEST_SHARE
        if not (is_due and is_allowed) and self._measure_memory() - self._memory < LARGEST_GROWTH:
            return False
        began = self._processor_clock()
        gc.collect()
        self._seconds = self._processor_clock() - began
        self._since = self._ended = self._clock()
        self._seen = self._examined = self._count_young()
        self._memory = self._measure_memory()
        return True

    def check_forever(self) -> None:
        while True:
            time.sleep(CHECK_S)
            self.check()


def count_young_collections() -> int:
    """How many collections of the youngest objects there were, each after some hundred new ones."""
    return int(gc.get_stats()[0]["collections"])


def control_garbage_collection() -> None:
    """Let the interpreter collect young objects only, and start a thread for full collections.

    The objects that exist now, mostly code, are permanent: no collection examines them.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS, NEVER)
    gc.enable()
    collections = FullCollections(count_young_collections)
    threading.Thread(target=collections.check_forever, name="garbage", daemon=True).start()
