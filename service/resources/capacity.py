"""The memory (bytes) and cores available to this process, by its control groups (Linux, versions 1 and 2).

Imports neither torch nor a model, so that too small a limit is reported before anything large is imported.
"""

import math
from collections.abc import Iterator
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP_FILE = Path("/proc/self/cgroup")
MEMORY_FILES = (  # controller, limit, usage; a process may exceed memory.high, but is slowed down then
    ("", "memory.max", "memory.current"),
    ("", "memory.high", "memory.current"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
MIN_MEMORY = 256 << 20  # bytes of the interpreter and the libraries, measured without any model; rounded up
NO_LIMIT = 1 << 50  # bytes; control groups of version 1 without a limit state a number about as large as an address


def explain_shortage() -> str:
    """Why the memory of the control groups is too small for any server; empty if it is not."""
    most = min((limit for limit, _ in group_limits()), default=MIN_MEMORY)
    if most >= MIN_MEMORY:
        return ""
    return (
        f"the container of this process has {most >> 20} MiB of memory, and interpreter and libraries alone take "
        f"about {MIN_MEMORY >> 20}; give it those and what `polyhead check` states for the models"
    )


def available_memory() -> Iterator[int]:
    """The free memory of the machine and of each control group; empty where the system does not tell."""
    if MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        yield int(lines["MemAvailable"].split()[0]) << 10
    yield from (left for _, left in group_limits())


def group_limits() -> Iterator[tuple[int, int]]:
    """The limit, and what is left of it, of each control group with a memory limit."""
    for controller, limit, used in MEMORY_FILES:
        for group in control_groups(controller):
            if most := read_number(group / limit):
                taken = read_number(group / used) - reclaimable_bytes(group / "memory.stat")
                yield most, max(most - max(taken, 0), 0)


def core_limits() -> Iterator[int]:
    """The number of cores that each group's CPU quota is worth, rounded up."""
    for group in control_groups(""):
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
            if quota.isdecimal():
                yield max(math.ceil(int(quota) / int(period)), 1)
    for group in control_groups("cpu"):
        if quota_us := read_number(group / "cpu.cfs_quota_us"):
            yield max(math.ceil(quota_us / read_number(group / "cpu.cfs_period_us")), 1)


def control_groups(controller: str) -> Iterator[Path]:
    """The control groups whose limits apply to this process: the topmost visible one, its own, and all between.

    `controller` is one of version 1; empty: version 2.  In a container the topmost is usually the container's own.
    """
    root = CGROUP_ROOT / controller
    yield root
    for line in OWN_CGROUP_FILE.read_text().splitlines() if OWN_CGROUP_FILE.exists() else ():
        _, controllers, path = line.split(":", 2)
        own = root / path.lstrip("/")
        if controller in controllers.split(",") and ".." not in own.parts and own.is_dir():
            yield from (group for group in (own, *own.parents) if group.is_relative_to(root) and group != root)


def read_number(file: Path) -> int:
    """The limit or usage in a file of a group; 0: no such file, or no limit ("max", "-1", or a huge number)."""
    try:
        text = file.read_text().strip()
    except OSError:  # or the group was removed meanwhile
        return 0
    number = int(text) if text.isdecimal() else 0
    return number if number < NO_LIMIT else 0


def reclaimable_bytes(statistics: Path) -> int:
    """Bytes of cached files not used lately: they count as used, but the kernel frees them when needed."""
    if not statistics.exists():
        return 0
    lines = dict(line.split(maxsplit=1) for line in statistics.read_text().splitlines())
    return int(lines.get("total_inactive_file", lines.get("inactive_file", "0")))
