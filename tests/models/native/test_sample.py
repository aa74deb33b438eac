"""The edges of top-k and top-p in the compiled sampler: those of a sorted row, found without sorting it.

tests/support/selecting.cpp compares them for random rows and for rows of ties, zeros and extreme numbers. It counts
the entries that are given to the library to be sorted or partitioned: at most 2,048 at a time, however long a row is.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from polyhead.models.native import build
from polyhead.models.native.library import runnable_targets
from tests.support.places import ROOT

ROUNDS = 2
FASTEST, *OTHERS = runnable_targets() or [""]
TARGETS = [FASTEST, *(pytest.param(each, marks=pytest.mark.thorough) for each in OTHERS)]


@pytest.mark.skipif(not FASTEST, reason="polyhead was installed without a compiler")
@pytest.mark.parametrize("instructions", TARGETS)
def test_the_edges_of_a_row_are_found_without_sorting_it(instructions: str, tmp_path: Path) -> None:
    command = build.find_compiler()
    if command is None:
        pytest.skip("there is no C++ compiler")
    program, source = tmp_path / "selecting", ROOT / "tests" / "support" / "selecting.cpp"
    flags = ("-std=c++20", "-O1", "-pthread", *build.TARGETS[instructions], f"-I{build.HERE / 'src'}")
    subprocess.run([command, *flags, "-o", str(program), str(source)], check=True)
    done = subprocess.run([program, str(ROUNDS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 100


FEW_THREADS = """
import ctypes, os, re, resource, sys
from pathlib import Path
from polyhead.models.native import library

sampler = library.load_library(sys.argv[1])
stack, libc = 1 << 30, ctypes.CDLL(None)
attributes = ctypes.create_string_buffer(256)
assert libc.pthread_attr_init(attributes) == 0
assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(stack)) == 0
assert libc.pthread_setattr_default_np(attributes) == 0
size = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + 3 * stack + stack // 2, hard))  # stacks of three threads
before = len(os.listdir("/proc/self/task"))
team = sampler.polyhead_open_sampler(64)
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
started = len(os.listdir("/proc/self/task")) - before
logits = [(ctypes.c_float * 8)(*(number == row for number in range(8))) for row in range(8)]
rows = (library.SampleStruct * 8)()
for row, values in zip(rows, logits):
    row.logits, row.words, row.top_p = ctypes.addressof(values), 8, 1.0
sampler.polyhead_sample(team, rows, 8)  # by all threads together
assert [row.word for row in rows] == list(range(8)), [row.word for row in rows]
sampler.polyhead_close_sampler(team)
print(started)
"""


@pytest.mark.skipif(sys.platform != "linux" or not FASTEST, reason="it limits the address space, as Linux can")
def test_a_team_has_as_many_threads_as_can_be_started() -> None:
    """The process ended with SIGABRT: threads that were started cannot be destroyed while they run."""
    command = [sys.executable, "-c", FEW_THREADS, FASTEST]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 1 <= int(done.stdout) <= 3
