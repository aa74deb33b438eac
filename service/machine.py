"""What this machine has to give, as far as the container lets us: memory in bytes, cores to compute on.

Knows nothing of models.
"""

import asyncio
import ctypes
import math
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
GROUPS = Path("/sys/fs/cgroup")
MEMORY = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
UNKNOWN = 4 << 30  # what is assumed of a system that doesn't say
RESERVE = 128 << 20  # bytes left alone at least: what libraries and the allocator keep, requests and their texts
RESERVED = 0.1  # of the free memory, if that is more
PHYSICAL_CORES = torch.get_num_threads()  # before anybody sets it; two threads on one core only get in each other's way
STATM = Path("/proc/self/statm")
STAT, UPTIME = Path("/proc/self/stat"), Path("/proc/uptime")
SLACK = 64 << 20  # bytes that a process may grow by before what is free in it is given back
GLANCE_S = 1.0
FILES = 128  # that a process opens beside connections: models, children, logs


def free_memory(device: torch.device) -> int:
    """Bytes that can be taken on `device` without taking them from others."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(memory_limits(), default=UNKNOWN)


def spendable_memory(device: torch.device) -> int:
    """Of the free memory, what may be planned with."""
    free = free_memory(device)
    return max(free - max(int(free * RESERVED), RESERVE), 0)


def memory_limits() -> Iterator[int]:
    """What the system has left, and what the container may still take."""
    if MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        yield int(lines["MemAvailable"].split()[0]) << 10
    for limit, used, statistics in MEMORY:  # control groups of version 2 and of version 1
        if (GROUPS / limit).exists() and (text := (GROUPS / limit).read_text().strip()).isdecimal():
            taken = int((GROUPS / used).read_text()) - reclaimable(GROUPS / statistics)
            yield max(int(text) - max(taken, 0), 0)


def reclaimable(statistics: Path) -> int:
    """Bytes of files in a container's memory that nobody has used lately: they count as used and go when asked."""
    if not statistics.exists():
        return 0
    lines = dict(line.split(maxsplit=1) for line in statistics.read_text().splitlines())
    return int(lines.get("total_inactive_file", lines.get("inactive_file", "0")))


def resident_memory() -> int:
    """Bytes of this process in memory; 0 on a system that doesn't say."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if STATM.exists() else 0


def age() -> float:
    """Seconds since this process was started; 0 on a system that doesn't say."""
    if not (STAT.exists() and UPTIME.exists()):
        return 0.0
    started = int(STAT.read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return max(float(UPTIME.read_text().split()[0]) - started, 0.0)


def trim() -> None:
    """Have the C library give back free memory; another than glibc is left alone."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def give_back() -> None:
    """Return to the system, and to the device, what nobody holds any more."""
    trim()
    torch.cuda.empty_cache()


async def keep_low() -> None:
    """For ever: see that the C library doesn't keep what is free.

    Tensors of ever new sizes leave holes in its heap, which stay resident: with steps of mixed lengths they grew to ten
    times what a step needs, and went on growing.
    """
    floor = resident_memory()
    while True:
        await asyncio.sleep(GLANCE_S)
        if resident_memory() > floor + SLACK:
            await asyncio.to_thread(trim)  # it takes some milliseconds, without the interpreter's lock
            floor = resident_memory()
        floor = min(floor, resident_memory())


def compute_threads() -> int:
    """Threads for one operation: the cores there are, less one for the event loop where there are many."""
    cores = min(core_limits())
    return cores if cores <= 2 else cores - 1


def core_limits() -> Iterator[int]:
    """What the machine has, what this process may use, and what the container is given time for."""
    yield PHYSICAL_CORES
    if hasattr(os, "sched_getaffinity"):
        yield len(os.sched_getaffinity(0))
    if (GROUPS / "cpu.max").exists():
        quota, period = (GROUPS / "cpu.max").read_text().split()
        if quota.isdecimal():
            yield max(math.ceil(int(quota) / int(period)), 1)


def sockets(wanted: int) -> int:
    """How many connections there can be: so many, or what the limit on open files leaves, which is raised for them."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = math.inf if most == resource.RLIM_INFINITY else most
    limit = int(min(max(now, wanted + FILES), ceiling)) if now != resource.RLIM_INFINITY else wanted + FILES
    if limit > now != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    return min(wanted, max(limit - FILES, limit // 4))
