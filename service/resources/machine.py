"""What this machine has to give, as far as the container lets us: memory in bytes, cores to compute on.

Knows nothing of models.
"""

import os
from collections.abc import Iterator

import torch

from . import capacity
from .process_info import trim_heap

ASSUMED_MEMORY = 4 << 30  # what is assumed of a system that doesn't say
MIN_RESERVE = 128 << 20  # bytes left alone at least: what libraries and the allocator keep, requests and their texts
RESERVE_FRACTION = 0.1  # of the free memory, if that is more
PHYSICAL_CORES = torch.get_num_threads()  # before anybody sets it; two threads on one core only get in each other's way


def free_memory(device: torch.device) -> int:
    """Bytes that can be taken on `device` without taking them from others."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(capacity.available_memory(), default=ASSUMED_MEMORY)


def spendable_memory(device: torch.device) -> int:
    """Of the free memory, what may be planned with."""
    free = free_memory(device)
    return max(free - max(int(free * RESERVE_FRACTION), MIN_RESERVE), 0)


def return_free_memory() -> None:
    """Return to the system, and to the device, what nobody holds any more."""
    trim_heap()
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
    yield from capacity.core_limits()
