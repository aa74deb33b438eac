"""What this process is and keeps: its age, its memory, how many files it may open.

Knows neither models nor what computes them.
"""

import asyncio
import ctypes
import logging
import math
import os
import resource
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..concurrency.outcome import run_on_thread

STATM = Path("/proc/self/statm")
STAT, UPTIME = Path("/proc/self/stat"), Path("/proc/uptime")
TRIM_GROWTH = 64 << 20  # bytes that a process may grow by before what is free in it is given back
TRIM_INTERVAL_S = 1.0
OTHER_FILES = (
    256  # that a process opens beside connections: models, children, logs, connections that are just made or ending
)

log = logging.getLogger("polyhead")


def start_background_task(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """A task that runs `work` beside the server; if it fails, the log says so, since nothing awaits it."""
    task = asyncio.create_task(work, name=getattr(work, "__qualname__", ""))
    task.add_done_callback(log_task_failure)
    return task


def log_task_failure(task: "asyncio.Task[None]") -> None:
    """Log what ended a task, unless it was cancelled or has done its work."""
    if not task.cancelled() and (fault := task.exception()) is not None:
        log.critical("%s has failed and does not run any more; restart the server", task.get_name(), exc_info=fault)


def resident_memory() -> int:
    """Bytes of this process in memory; 0 on a system that doesn't say."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if STATM.exists() else 0


def process_age() -> float:
    """Seconds since this process was started; 0 on a system that doesn't say."""
    if not (STAT.exists() and UPTIME.exists()):
        return 0.0
    started = int(STAT.read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return max(float(UPTIME.read_text().split()[0]) - started, 0.0)


def trim_heap() -> None:
    """Have the C library give back free memory; another than glibc is left alone."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


async def trim_heap_forever() -> None:
    """For ever: see that the C library doesn't keep what is free.

    Tensors of ever new sizes leave holes in its heap, which stay resident: with steps of mixed lengths they grew to ten
    times what a step needs, and went on growing.
    """
    floor = resident_memory()
    while True:
        await asyncio.sleep(TRIM_INTERVAL_S)
        if resident_memory() > floor + TRIM_GROWTH:
            await run_on_thread(trim_heap)  # it takes some milliseconds, without the interpreter's lock
            floor = resident_memory()
        floor = min(floor, resident_memory())


def allow_connections(wanted: int, beside: int = 0) -> int:
    """How many connections there can be: so many, or what the limit on open files leaves, which is raised for them.

    `beside` files are opened besides these connections and `FILES`.
    """
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
