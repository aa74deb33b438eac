"""Listing and writing files in folders of strangers."""

import stat
from pathlib import Path

import pytest

from polyhead.models.core.files import list_files, replace_file


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
