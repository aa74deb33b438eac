"""The compiled step under sanitizers: it accesses only its own memory and has no undefined behaviour.

It is compiled again with sanitizers and run in child processes: tests/support/sanitized.py runs networks of every kind,
tests/support/fuzzing.py random networks and rows.  `make fuzz SECONDS=60` is the long form: all instruction sets that
run here, both sanitizers, 60 seconds of random rows for each.
"""

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
    "-fno-sanitize=null,object-size,pointer-overflow",  # halves the compile time; the address sanitizer finds these too
    "-fno-sanitize-recover=all",
    *("--param", "asan-instrumentation-with-call-threshold=0"),  # a call for each memory access, which compiles faster
)
# For wide registers: compiling for AVX-512 takes 29 s of CPU time instead of 75 s.  The portable step has equal arrays
# on the stack, and its build checks them.
HEAP_ONLY = ("--param", "asan-stack=0")
# For the short form: half of the compile time.  Without these analyses the compiler removes fewer accesses, and their
# checks, and a report names functions but no lines: `make fuzz` names the lines.  Checks of alignment are a quarter of
# the compile time: without them the aligned instructions of wide registers still end the process, and `make fuzz` and
# the portable step have them.
QUICK = (
    "-fno-sanitize=alignment",
    *("-g0", "-fno-tree-pta", "-fno-tree-fre", "-fno-tree-pre", "-fno-tree-dse", "-fno-tree-sink"),
    *("-fno-tree-loop-optimize", "-fno-ipa-pure-const", "-fno-ipa-modref"),
)
RACES = ("-O1", "-g1", "-fsanitize=thread")
# Libraries that a process must load first.
FIRST = ("libasan.so", "libubsan.so", "libstdc++.so")
FIRST_OF_RACES = ("libtsan.so", "libstdc++.so")
HERE = ROOT / "tests" / "support"
ROUND, ROUNDS = 9, 4  # the short form of random rows: the first round and the number of rounds


@pytest.fixture
def seconds(request: pytest.FixtureRequest) -> float:
    """Seconds of random rows for each instruction set; 0 means the short form."""
    return float(request.config.getoption("--fuzz"))


def runtimes(command: str, names: Sequence[str]) -> list[str]:
    """Paths of the sanitizer runtimes of the compiler. For an unknown name the compiler prints the name itself."""
    asked = (subprocess.run([command, f"-print-file-name={name}"], capture_output=True, text=True) for name in names)
    return [found for each in asked if Path(found := each.stdout.strip()).is_absolute()]


def flags_for(instructions: str) -> tuple[str, ...]:
    return FLAGS if instructions == "portable" else FLAGS + HEAP_ONLY


def sanitized(
    config: pytest.Config, instructions: str, flags: Sequence[str] = (), names: Sequence[str] = FIRST
) -> tuple[Path, list[str]]:
    """The folder of a library with sanitizers, and their runtimes.  It is compiled only if something changed.

    Skips the test where it cannot be compiled.
    """
    command = build.find_compiler()
    if command is None:
        pytest.skip("there is no C++ compiler")
    if len(found := runtimes(command, names)) < len(names):
        pytest.skip(f"{command} has no shared runtime of its sanitizers")
    flags = flags or flags_for(instructions)
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    stamp = hashlib.sha256("\0".join((version, *flags)).encode()).hexdigest()[:16]
    folder = config.rootpath / ".pytest_cache" / "d" / f"sanitized-{stamp}"  # also without pytest's own cache
    folder.mkdir(parents=True, exist_ok=True)
    if build.is_stale(folder / f"{instructions}.so"):
        build.compile_target(command, instructions, *flags, out=folder)
    return folder, found


def run_script(script: str, first: Sequence[str], *words: object) -> str:
    """The output of tests/support/`script` with the runtimes `first` preloaded. A sanitizer report fails the test."""
    variables = {
        "LD_PRELOAD": ":".join(first),
        "ASAN_OPTIONS": "detect_leaks=0",  # all leaks would be those of the interpreter
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1",  # ignores races of the interpreter
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, str(HERE / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not start with this kernel's address layout")
    assert done.returncode == 0, done.stderr[-6000:]
    assert "Sanitizer" not in done.stderr
    return done.stdout


def judge(folder: Path, instructions: str, first: Sequence[str]) -> None:
    output = run_script("sanitized_both.py", first, folder, instructions, ROUND, ROUNDS)
    assert int(output.split()[0]) > 80
    assert f"{ROUNDS} networks" in output


@pytest.mark.thorough
@pytest.mark.timeout(1200)  # 90 seconds of CPU time, most of it for compiling
def test_the_portable_step_has_no_sanitizer_report(pytestconfig: pytest.Config) -> None:
    folder, first = sanitized(pytestconfig, "portable")
    judge(folder, "portable", first)


@pytest.mark.timeout(1200)
def test_the_fastest_step_has_no_sanitizer_report(pytestconfig: pytest.Config) -> None:
    """On a machine without wide registers this is the portable step."""
    fastest = runnable_targets()[0]
    folder, first = sanitized(pytestconfig, fastest, (*flags_for(fastest), *QUICK))
    judge(folder, fastest, first)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("instructions", runnable_targets())
def test_random_rows_have_no_sanitizer_report(pytestconfig: pytest.Config, instructions: str, seconds: float) -> None:
    """Each run has other rows. A report names the round."""
    if not seconds:
        pytest.skip("takes minutes: make fuzz")
    folder, first = sanitized(pytestconfig, instructions)
    sys.stdout.write(run_script("fuzzing.py", first, folder, instructions, seconds, time.time_ns() // 10**6 % 10**9))


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_threads_of_a_step_do_not_race(pytestconfig: pytest.Config) -> None:
    folder, first = sanitized(pytestconfig, "portable", RACES, FIRST_OF_RACES)
    assert int(run_script("racing.py", first, folder, "portable").split()[0]) > 300
