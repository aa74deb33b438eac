"""Memory in bytes and cores of this machine, within the limits of the container."""

import os
from collections.abc import Iterator

import torch

from . import capacity
from .process_info import trim_heap

ASSUMED_MEMORY = 4 << 30  # assumed where the system does not tell
MIN_RESERVE = 128 << 20  # least reserve in bytes: for libraries, the allocator, requests and their texts
RESERVE_FRACTION = 0.1  # of the free memory, if that is more
PHYSICAL_CORES = torch.get_num_threads()  # read before it is set; two threads on one core slow each other down


def free_memory(device: torch.device) -> int:
    """Bytes on `device` that are free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(capacity.available_memory(), default=ASSUMED_MEMORY)


def spendable_memory(device: torch.device) -> int:
    """The free memory that loads may be planned with, without a reserve."""
    free = free_memory(device)
    return max(free - max(int(free * RESERVE_FRACTION), MIN_RESERVE), 0)


def return_free_memory() -> None:
    """Return unused memory to the system and to the device."""
    trim_heap()
    torch.cuda.empty_cache()


def compute_threads() -> int:
    """Threads for one operation: the available cores, less one for the event loop where there are more than two."""
    cores = min(core_limits())
    return cores if cores <= 2 else cores - 1


def core_limits() -> Iterator[int]:
    """The cores of the machine, those this process may use, and those of the container's CPU quota."""
    yield PHYSICAL_CORES
    if hasattr(os, "sched_getaffinity"):
        yield len(os.sched_getaffinity(0))
    yield from capacity.core_limits()
