"""A compiled library belongs to its sources and options: a stale one is refused, and a current one is not rebuilt."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyhead.models.native import build, library
from polyhead.models.native.library import load_library, runnable_targets

needs_compiler = pytest.mark.skipif(not runnable_targets(), reason="nothing is compiled here")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Copies of the sources, which the build uses in their place."""
    copies = [Path(shutil.copy(path, tmp_path)) for path in build.SOURCES]
    monkeypatch.setattr(build, "SOURCES", copies)
    load_library.cache_clear()
    yield copies
    load_library.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the targets that would have been compiled."""
    names: list[str] = []
    monkeypatch.setattr(build, "find_compiler", lambda: "c++")
    monkeypatch.setattr(build, "compile_target", lambda command, name: names.append(name))
    return names


@needs_compiler
def test_a_library_of_other_sources_is_refused(sources: list[Path]) -> None:
    load_library(runnable_targets()[0])
    load_library.cache_clear()
    with sources[0].open("a") as changed:
        changed.write("// a comment, so the layout of structures is unchanged\n")
    with pytest.raises(
        OSError, match=re.escape("other sources; compile it again: python -m polyhead.models.native.build")
    ):
        load_library(runnable_targets()[0])


@pytest.mark.parametrize(
    ("features", "wanted"),
    [
        ("fp asimd asimddp i8mm", ["i8mm", "dotprod", "portable"]),
        ("fp asimd asimddp", ["dotprod", "portable"]),
        ("fp asimd", ["portable"]),
    ],
)
def test_a_processor_of_64_bit_arm_runs_what_it_has(
    features: str, wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nFeatures\t: {features}\n")
    for name in build.ARM:
        (tmp_path / f"{name}.so").touch()
    monkeypatch.setattr(library, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(library, "LIBRARIES", tmp_path)
    assert library.runnable_targets() == wanted


@needs_compiler
def test_without_sources_a_library_is_loaded_unchecked(sources: list[Path]) -> None:
    sources.clear()
    load_library(runnable_targets()[0])


@needs_compiler
def test_only_stale_targets_are_compiled(
    sources: list[Path], compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {name for name in build.TARGETS if (build.LIBRARIES / f"{name}.so").exists()}
    for path in sources:
        os.utime(path)  # a newer file with the same content
    build.build()
    assert not installed.intersection(compiled)
    monkeypatch.setitem(build.TARGETS, "portable", ("-O1",))
    compiled.clear()
    build.build()
    assert installed.intersection(compiled) == {"portable"}
    sources[-1].write_text("")
    compiled.clear()
    build.build()
    assert {*compiled} == {*build.TARGETS}
