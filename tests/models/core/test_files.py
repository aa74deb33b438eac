"""Listing and writing files in folders of strangers."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyhead.models.core import files
from polyhead.models.core.errors import CheckpointError
from polyhead.models.core.files import SourceFile, list_files, open_member, read_content, replace_file


def test_a_file_is_replaced_whole_with_the_mode_that_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    replace_file(path, b"first")
    replace_file(path, b"second", 0o600)
    assert path.read_bytes() == b"second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]


def test_a_link_of_that_name_is_replaced_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    (tmp_path / "out.json").symlink_to(outside)
    replace_file(tmp_path / "out.json", b"new")
    assert (outside.read_text(), (tmp_path / "out.json").read_text()) == ("kept", "new")


def test_a_link_of_the_name_that_is_written_first_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    monkeypatch.setattr("secrets.token_hex", lambda _: "known")
    (tmp_path / "out.known.new").symlink_to(outside)
    with pytest.raises(FileExistsError):
        replace_file(tmp_path / "out.json", b"new")
    assert not outside.exists()


def test_a_file_that_cannot_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "out.json").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "out.json", b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]


def test_a_folder_that_is_missing_or_is_a_file_has_no_files_for_a_hint(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    assert list_files(tmp_path, {".gguf"}) == ["a.gguf"]
    assert list_files(tmp_path / "none", {".gguf"}) == []
    assert list_files(tmp_path / "a.gguf", {".gguf"}) == []


def swap_at_the_first_opening(monkeypatch: pytest.MonkeyPatch, swap: Callable[[], object]) -> None:
    """A writer of the folder changes it after the path was checked, and before anything is opened."""
    opened, waiting = os.open, [swap]

    def open_later(*given: Any, **options: Any) -> int:
        if waiting:
            waiting.pop()()
        return opened(*given, **options)

    monkeypatch.setattr(files.os, "open", open_later)


@pytest.mark.parametrize("link", ["", "inside/real.txt", "blobs/real.txt"])
def test_what_takes_the_place_of_a_checked_file_does_not_lead_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    """A file, the folder of a link's target, or one that a hub's cache links to."""
    folder, outside = tmp_path / "models--a--b" / "snapshots" / "1", tmp_path / "outside"
    blobs = folder.parent.parent / "blobs"
    for each in (folder / "inside", outside, blobs):
        each.mkdir(parents=True)
    (outside / "real.txt").write_text("secret")
    path = folder / "file.txt"
    if not link:
        path.write_text("own")
        replaced = path
    elif link.startswith("inside"):
        (folder / link).write_text("own")
        path.symlink_to(link)
        replaced = folder / "inside"
    else:
        (blobs / "real.txt").write_text("own")
        path.symlink_to(blobs / "real.txt")
        replaced = blobs
    assert read_content(path) == b"own"

    def swap() -> None:
        replaced.rename(tmp_path / "moved")
        replaced.symlink_to(outside / "real.txt" if replaced == path else outside)

    before = len(os.listdir("/proc/self/fd"))
    swap_at_the_first_opening(monkeypatch, swap)
    with pytest.raises(CheckpointError, match=r"file\.txt: (is no regular file|cannot be read)"):
        read_content(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_to_its_own_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(".")
    with pytest.raises(CheckpointError, match="loop: is no regular file"):
        open_member(tmp_path / "loop")


def test_a_file_that_was_written_in_place_is_another_though_its_size_and_time_are_set_back(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"old")
    with open_member(path) as file:
        source = SourceFile.of(path, file)
    found = path.stat()
    with path.open("r+b") as file:
        file.write(b"new")
    while path.stat().st_ctime_ns == found.st_ctime_ns:  # the clock of files may be coarse
        path.chmod(0o600)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(CheckpointError, match="was changed or replaced"):
        source.open()
