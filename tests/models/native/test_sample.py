"""The edges of top-k and top-p in the compiled sampler: those of a sorted row, found without sorting it.

tests/support/selecting.cpp compares them for random rows and for rows of ties, zeros and extreme numbers. It counts
the entries that are given to the library to be sorted or partitioned: at most 2,048 at a time, however long a row is.
"""

import subprocess
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
