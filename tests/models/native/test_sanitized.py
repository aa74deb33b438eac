"""The compiled step reads and writes nothing but its own memory, and does nothing that C++ leaves undefined.

It is compiled once more, with sanitizers, and driven in processes of its own: by tests/support/sanitized.py over
networks of every kind, by tests/support/fuzzing.py with random networks and rows.  `make fuzz SECONDS=60` is the
long form: all instruction sets that run here, both sanitizers, so many seconds of random rows for each."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from polyhead.models.native import build
from polyhead.models.native.library import runnable_targets
from tests.support.places import ROOT

FLAGS = (
    "-O1",
    "-g1",
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize=null,object-size,pointer-overflow",  # half the time of compiling; the address sanitizer sees these
    "-fno-sanitize-recover=all",
    *("--param", "asan-instrumentation-with-call-threshold=0"),  # a call for each look at memory: quicker to compile
)
# Where registers are wide: 29 s of a processor instead of 75 to compile for AVX-512.  The portable step has the same
# arrays on the stack, and there they are looked at.
HEAP_ONLY = ("--param", "asan-stack=0")
RACES = ("-O1", "-g1", "-fsanitize=thread")
# What a process must have loaded before anything else.
FIRST = ("libasan.so", "libubsan.so", "libstdc++.so")
FIRST_OF_RACES = ("libtsan.so", "libstdc++.so")
HERE = ROOT / "tests" / "support"
ROUND, ROUNDS = 9, 10  # of random rows in the short form: the first of them, and how many


@pytest.fixture
def seconds(request: pytest.FixtureRequest) -> float:
    """How long each instruction set is driven with random rows; 0: the short form."""
    return float(request.config.getoption("--fuzz"))


def runtimes(command: str, names: Sequence[str]) -> list[str]:
    """Where the compiler has what must be loaded first; a name it does not know it gives back as it is."""
    asked = (subprocess.run([command, f"-print-file-name={name}"], capture_output=True, text=True) for name in names)
    return [found for each in asked if Path(found := each.stdout.strip()).is_absolute()]


def sanitized(
    config: pytest.Config, instructions: str, flags: Sequence[str] = (), names: Sequence[str] = FIRST
) -> tuple[Path, list[str]]:
    """The folder of a library with sanitizers, and their runtimes.  It is compiled again only when something changed.
    Skips where that cannot be done."""
    command = build.find_compiler()
    if command is None:
        pytest.skip("no C++ compiler is here")
    if len(found := runtimes(command, names)) < len(names):
        pytest.skip(f"{command} has no shared runtime of its sanitizers")
    flags = flags or (FLAGS if instructions == "portable" else FLAGS + HEAP_ONLY)
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    stamp = hashlib.sha256("\0".join((version, *flags)).encode()).hexdigest()[:16]
    assert config.cache is not None
    folder = config.cache.mkdir(f"sanitized-{stamp}")
    if build.is_stale(folder / f"{instructions}.so"):
        build.compile_target(command, instructions, *flags, out=folder)
    return folder, found


def driven(script: str, first: Sequence[str], *words: object) -> str:
    """What tests/`script` says at its end, with the runtimes loaded `first`; a report of theirs fails the test."""
    variables = {
        "LD_PRELOAD": ":".join(first),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own would be all there is
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1",  # the interpreter's own
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, str(HERE / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not start under this kernel's layout of addresses")
    assert done.returncode == 0, done.stderr[-6000:]
    assert "Sanitizer" not in done.stderr
    return done.stdout


def judge(folder: Path, instructions: str, first: Sequence[str]) -> None:
    assert int(driven("sanitized.py", first, folder, instructions).split()[0]) > 80
    assert f"{ROUNDS} networks" in driven("fuzzing.py", first, folder, instructions, 0, ROUND, ROUNDS)


@pytest.mark.timeout(1200)  # a minute and a half of a processor, most of it to compile
def test_nothing_is_reported_of_the_portable_step(pytestconfig: pytest.Config) -> None:
    folder, first = sanitized(pytestconfig, "portable")
    judge(folder, "portable", first)


@pytest.mark.timeout(1200)
def test_nothing_is_reported_of_the_fastest_step(pytestconfig: pytest.Config) -> None:
    if not runnable_targets() or runnable_targets()[0] == "portable":
        pytest.skip("the portable step is the fastest that runs here")
    folder, first = sanitized(pytestconfig, runnable_targets()[0])
    judge(folder, runnable_targets()[0], first)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("instructions", runnable_targets())
def test_nothing_is_reported_of_random_rows(pytestconfig: pytest.Config, instructions: str, seconds: float) -> None:
    """Other rows in each run; the number of the round is in the report."""
    if not seconds:
        pytest.skip("takes minutes: make fuzz")
    folder, first = sanitized(pytestconfig, instructions)
    sys.stdout.write(driven("fuzzing.py", first, folder, instructions, seconds, time.time_ns() // 10**6 % 10**9))


@pytest.mark.timeout(1200)
def test_threads_of_a_step_do_not_race(pytestconfig: pytest.Config) -> None:
    folder, first = sanitized(pytestconfig, "portable", RACES, FIRST_OF_RACES)
    assert int(driven("racing.py", first, folder, "portable").split()[0]) > 300
