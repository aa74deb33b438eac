"""The process itself: background tasks, age, memory, and the limit on open files."""

import asyncio
import ctypes
import logging
import math
import os
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..concurrency.outcome import run_on_thread

try:
    import resource
except ImportError:  # Windows
    HAS_FILE_LIMIT = False
else:
    HAS_FILE_LIMIT = True

STATM = Path("/proc/self/statm")
STATUS = Path("/proc/self/status")
STAT, UPTIME = Path("/proc/self/stat"), Path("/proc/uptime")
TRIM_GROWTH = 64 << 20  # bytes that the process may grow by before its heap is trimmed
TRIM_INTERVAL_S = 1.0
# Heaps of glibc that threads share.  Its default is 8 for each core, and each keeps up to 64 MB of what large requests
# have freed.  Python's threads allocate one at a time.
MAX_ARENAS, M_ARENA_MAX = 2, -8
OTHER_FILES = 256  # open files besides connections: models, children, logs, connections that are just made or ending

log = logging.getLogger("polyhead")


def start_background_task(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """A task that runs `work` in the background; its failure is logged, because nothing awaits it."""
    task = asyncio.create_task(work, name=getattr(work, "__qualname__", ""))
    task.add_done_callback(log_task_failure)
    return task


def log_task_failure(task: "asyncio.Task[None]") -> None:
    """Log what ended a task, unless it was cancelled or has finished."""
    if not task.cancelled() and (fault := task.exception()) is not None:
        log.critical("%s has failed and does not run any more; restart the server", task.get_name(), exc_info=fault)


def resident_memory() -> int:
    """Resident bytes of this process; 0 where the system does not tell."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if STATM.exists() else 0


def peak_memory() -> int:
    """The most resident bytes that this process had; 0 where the system does not tell."""
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def process_age() -> float:
    """Seconds since this process was started; 0 where the system does not tell."""
    if not (STAT.exists() and UPTIME.exists()):
        return 0.0
    started = int(STAT.read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return max(float(UPTIME.read_text().split()[0]) - started, 0.0)


def trim_heap() -> None:
    """Have glibc return free memory; other C libraries are left alone."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def limit_arenas() -> None:
    """Have all threads that start from now on share MAX_ARENAS heaps of glibc; other C libraries are left alone."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, MAX_ARENAS)


async def trim_heap_forever() -> None:
    """Trim the heap whenever the process has grown by TRIM_GROWTH.

    Tensors of ever new sizes leave holes in the heap of the C library, which stay resident: with steps of mixed lengths
    they grew to ten times what a step needs, and went on growing.
    """
    floor = resident_memory()
    while True:
        await asyncio.sleep(TRIM_INTERVAL_S)
        if resident_memory() > floor + TRIM_GROWTH:
            await run_on_thread(trim_heap)  # it takes some milliseconds and releases the interpreter's lock
            floor = resident_memory()
        floor = min(floor, resident_memory())


def allow_connections(wanted: int, beside: int = 0) -> int:
    """How many of `wanted` connections the limit on open files allows, after raising it as far as needed and possible.

    `beside` files are opened besides these connections and OTHER_FILES.
    """
    if not HAS_FILE_LIMIT:
        return wanted
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = math.inf if most == resource.RLIM_INFINITY else most
    limit = (
        int(min(max(now, wanted + beside + OTHER_FILES), ceiling))
        if now != resource.RLIM_INFINITY
        else wanted + beside + OTHER_FILES
    )
    if limit > now != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    return min(wanted, max(limit - beside - OTHER_FILES, (limit - beside) // 4, 1))
