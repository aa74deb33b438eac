"""A compiled library is known by what it was made of: no other is used, and none is compiled twice."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyhead.models.native import build
from polyhead.models.native.library import load_library, runnable_targets

needs = pytest.mark.skipif(not runnable_targets(), reason="nothing is compiled here")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Copies of the sources, which count instead of them."""
    copies = [Path(shutil.copy(path, tmp_path)) for path in build.SOURCES]
    monkeypatch.setattr(build, "SOURCES", copies)
    load_library.cache_clear()
    yield copies
    load_library.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what would have been compiled."""
    names: list[str] = []
    monkeypatch.setattr(build, "find_compiler", lambda: "c++")
    monkeypatch.setattr(build, "compile_target", lambda command, name: names.append(name))
    return names


@needs
def test_what_was_made_of_other_sources_is_refused(sources: list[Path]) -> None:
    load_library(runnable_targets()[0])
    load_library.cache_clear()
    with sources[0].open("a") as changed:
        changed.write("// nothing that a structure would show\n")
    with pytest.raises(
        OSError, match=re.escape("other sources; compile it again: python -m polyhead.models.native.build")
    ):
        load_library(runnable_targets()[0])


@needs
def test_without_sources_there_is_nothing_to_compare(sources: list[Path]) -> None:
    sources.clear()
    load_library(runnable_targets()[0])


@needs
def test_only_what_is_stale_is_compiled(
    sources: list[Path], compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {name for name in build.TARGETS if (build.LIBRARIES / f"{name}.so").exists()}
    for path in sources:
        os.utime(path)  # a newer file with the same in it
    build.build()
    assert not there.intersection(compiled)
    monkeypatch.setitem(build.TARGETS, "portable", ("-O1",))
    compiled.clear()
    build.build()
    assert there.intersection(compiled) == {"portable"}
    sources[-1].write_text("")
    compiled.clear()
    build.build()
    assert {*compiled} == {*build.TARGETS}
