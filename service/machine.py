"""What this machine has to give, as far as the container lets us: memory in bytes, cores to compute on.

Knows nothing of models.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
GROUPS = Path("/sys/fs/cgroup")
MEMORY = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
UNKNOWN = 4 << 30  # what is assumed of a system that doesn't say


def free_memory(device: torch.device) -> int:
    """Bytes that can be taken on `device` without taking them from others."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(memory_limits(), default=UNKNOWN)


def memory_limits() -> Iterator[int]:
    """What the system has left, and what the container may still take."""
    if MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        yield int(lines["MemAvailable"].split()[0]) << 10
    for limit, used in MEMORY:  # control groups of version 2 and of version 1
        if (GROUPS / limit).exists() and (text := (GROUPS / limit).read_text().strip()).isdecimal():
            yield max(int(text) - int((GROUPS / used).read_text()), 0)


def compute_threads() -> int:
    """Threads for one operation: the cores there are, less one for the event loop where there are many."""
    cores = min(core_limits())
    return cores if cores <= 2 else cores - 1


def core_limits() -> Iterator[int]:
    """What the machine has, what this process may use, and what the container is given time for."""
    yield torch.get_num_threads()  # physical cores: two threads on one core only get in each other's way
    if hasattr(os, "sched_getaffinity"):
        yield len(os.sched_getaffinity(0))
    if (GROUPS / "cpu.max").exists():
        quota, period = (GROUPS / "cpu.max").read_text().split()
        if quota.isdecimal():
            yield max(math.ceil(int(quota) / int(period)), 1)
