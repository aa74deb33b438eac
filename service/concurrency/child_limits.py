"""Limits of a child process that reads a stranger's data, as far as the system has them.

Linux has all of them.  macOS may refuse the limit on memory, and Windows has none of them; both are untested.
"""

import platform
import signal
from contextlib import AbstractContextManager, nullcontext, suppress

try:
    import resource
except ImportError:  # Windows
    HAS_LIMITS = False
else:
    HAS_LIMITS = True


def limit_memory(memory: int, stack: int = 0) -> None:
    """Limit this process to `memory` bytes of address space and `stack` bytes of a stack; 0: as before.  Where it may
    have less already, that stays.  It writes no core file.
    """
    if not HAS_LIMITS:
        return
    set_limit(resource.RLIMIT_CORE, 0)
    refused: AbstractContextManager[None] = (
        nullcontext() if platform.system() == "Linux" else suppress(ValueError, OSError)
    )
    with refused:
        set_limit(resource.RLIMIT_AS, memory)
    if stack:
        with refused:
            set_limit(resource.RLIMIT_STACK, stack)


def set_limit(kind: int, most: int) -> None:
    """Set the soft and the hard limit of this process to `most`, or to the hard limit that it has if that is less."""
    _, hard = resource.getrlimit(kind)
    least = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (least, least))


def limit_processor_time(seconds: float) -> None:
    """Kill this process after so many seconds of processor time; 0: never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
