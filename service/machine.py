"""What this machine has to give, as far as the container lets us: memory in bytes, cores to compute on.

Knows nothing of models.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from service.upkeep import trim

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


def give_back() -> None:
    """Return to the system, and to the device, what nobody holds any more."""
    trim()
    torch.cuda.empty_cache()


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
