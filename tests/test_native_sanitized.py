"""The compiled step reads and writes nothing but its own memory, and does nothing that C++ leaves undefined.

It is compiled once more, with both sanitizers, and driven by tests/sanitized.py in a process of its own.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from models.native import build
from models.native.library import runnable

FLAGS = (
    "-O1",
    "-g1",
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize=null,object-size,pointer-overflow",  # half the time of compiling; the address sanitizer sees these
    "-fno-sanitize-recover=all",
)
CALLS = ("--param", "asan-instrumentation-with-call-threshold=0")  # a call for each look at memory: quicker to compile
FIRST = ("libasan.so", "libubsan.so", "libstdc++.so")  # of what a process must have loaded before anything else
CHILD = Path(__file__).with_name("sanitized.py")


def runtimes(command: str) -> list[str]:
    """Where the compiler has what must be loaded first; a name it does not know it gives back as it is."""
    asked = (subprocess.run([command, f"-print-file-name={name}"], capture_output=True, text=True) for name in FIRST)
    return [found for each in asked if Path(found := each.stdout.strip()).is_absolute()]


def compiled(instructions: str, folder: Path) -> list[str]:
    """Compiles into `folder`; the runtimes.  Skips where that cannot be done."""
    command = build.compiler()
    if command is None:
        pytest.skip("no C++ compiler is here")
    if len(found := runtimes(command)) < len(FIRST):
        pytest.skip(f"{command} has no shared runtime of its sanitizers")
    build.compile_one(command, instructions, *FLAGS, *CALLS, out=folder)
    return found


def driven(folder: Path, instructions: str, first: Sequence[str]) -> subprocess.CompletedProcess[str]:
    variables = {
        "LD_PRELOAD": ":".join(first),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own would be all there is
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    words = [sys.executable, str(CHILD), str(folder), instructions]
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, **variables}, check=False)


def judge(instructions: str, folder: Path) -> None:
    done = driven(folder, instructions, compiled(instructions, folder))
    assert done.returncode == 0, done.stderr[-6000:]
    assert "Sanitizer" not in done.stderr
    assert int(done.stdout.split()[0]) > 80


@pytest.mark.timeout(600)  # a minute and a half of a processor, most of it to compile
def test_nothing_is_reported_of_the_portable_step(tmp_path: Path) -> None:
    judge("portable", tmp_path)


def test_nothing_is_reported_of_the_fastest_step(tmp_path: Path, full: bool) -> None:
    if not full or not runnable():
        pytest.skip("takes a minute to compile: --full")
    judge(runnable()[0], tmp_path)
