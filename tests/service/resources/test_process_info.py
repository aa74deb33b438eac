"""The heaps of a process's threads."""

import platform
import subprocess
import sys

import pytest

from polyhead.service.resources.process_info import MAX_ARENAS

# Threads that live beside each other and have allocated: glibc gives each a heap of its own, up to its limit.
COUNT_HEAPS = """
import ctypes, threading
from polyhead.service.resources.process_info import limit_arenas

if {limited}:
    limit_arenas()
libc, all_have, goes_on = ctypes.CDLL(None), threading.Barrier(7), threading.Event()
libc.malloc.restype, libc.fopen.restype = ctypes.c_void_p, ctypes.c_void_p


def allocate():
    libc.malloc(1 << 12)
    all_have.wait()
    goes_on.wait()


for _ in range(6):
    threading.Thread(target=allocate).start()
all_have.wait()
file = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
goes_on.set()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_threads_share_few_heaps() -> None:
    counts = []
    for limited in (False, True):
        ran = subprocess.run(
            [sys.executable, "-c", COUNT_HEAPS.format(limited=limited)], capture_output=True, text=True, check=True
        )
        counts.append(ran.stdout.count("<heap nr="))
    assert counts[0] > MAX_ARENAS
    assert counts[1] == MAX_ARENAS
