"""Files of a checkpoint, opened so that none can hang, swell or lead astray whoever reads it.

Knows no format.  The one idea: a checkpoint is somebody else's folder.  So what is read is a regular file, it lies in
that folder (or where a hub's cache keeps the files of its snapshots), and it is no longer than a sane one of its kind.
"""

import os
import stat
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from .errors import CheckpointError

MAX_SMALL_BYTES = 16 << 20  # bytes of a description, an index, a template
MAX_VOCABULARY_BYTES = 64 << 20  # bytes of a vocabulary
MAX_JSON_VALUES = 1 << 21  # fields, objects and lists in a file of JSON; each costs many times its bytes
MAX_LISTED_FILES = 10_000  # files of a folder that are looked at for a hint


def open_regular(path: Path) -> BinaryIO:
    """A file for reading.  CheckpointError for a pipe, a device, a folder: opening one may never return.  OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError("is no regular file, and nothing else is read", file=str(path))
    return path.open("rb")


def open_member(path: Path) -> BinaryIO:
    """The same of a file in its folder: CheckpointError, too, if it is a link to anywhere else."""
    if path.is_symlink():
        home, real = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
        if not real.is_relative_to(home) and not real.is_relative_to(blob_folder(home)):
            message = "is a link that leads out of its folder, and such are not followed; put the file itself there"
            raise CheckpointError(message, file=str(path))
    return open_regular(path)


def blob_folder(folder: Path) -> Path:
    """Where a hub's cache keeps the files that a snapshot (models--org--name/snapshots/revision) links to; the folder
    itself, if it is none."""
    for snapshot in (folder, folder.parent):
        if snapshot.parent.name == "snapshots" and snapshot.parent.parent.name.startswith("models--"):
            return snapshot.parent.parent / "blobs"
    return folder


def read_content(path: Path, most: int = MAX_SMALL_BYTES) -> bytes:
    """All of a small file.  CheckpointError if it has more than `most` bytes or cannot be read; FileNotFoundError."""
    try:
        with open_member(path) as file:
            raw = file.read(most) if os.fstat(file.fileno()).st_size <= most else b""
            if len(raw) < most and file.read(1):
                raise CheckpointError(f"is longer than {most >> 20} MiB, which no such file is", file=str(path))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=str(path)) from None
    return raw


def copy_file(source: Path, target: Path) -> None:
    """Copies a file of a checkpoint folder that has at most VOCABULARY bytes.  CheckpointError as `content`, and where
    there is no such file; OSError where `target` cannot be written."""
    target.write_bytes(read_copyable(source))


def read_copyable(path: Path) -> bytes:
    """All of a file that may be copied.  CheckpointError."""
    try:
        return read_content(path, MAX_VOCABULARY_BYTES)
    except FileNotFoundError:
        raise CheckpointError("cannot be read: there is no such file", file=str(path)) from None


def read_text(path: Path, most: int = MAX_SMALL_BYTES, errors: str = "strict") -> str:
    """The same of a file of text, every line of which ends in one character."""
    return read_content(path, most).decode(errors=errors).replace("\r\n", "\n").replace("\r", "\n")


def read_json_bytes(path: Path, most: int = MAX_SMALL_BYTES) -> bytes:
    """The same of a file of JSON: CheckpointError, too, if it has more values than any that describes a network."""
    raw = read_content(path, most)
    if max(map(raw.count, (b"[", b"{", b":"))) > MAX_JSON_VALUES:
        raise CheckpointError(f"has more than {MAX_JSON_VALUES} values, which no such file has", file=str(path))
    return raw


def subfolder(folder: Path, name: str) -> Path:
    """A folder inside a folder.  CheckpointError unless `name` is one, and no link."""
    path = folder / name
    if name and (Path(name).name != name or name == ".." or path.is_symlink()):
        raise CheckpointError(f"{name!r} is no folder inside this one", file=str(folder))
    return path


def list_files(folder: Path, suffixes: Collection[str]) -> list[str]:
    """Names of a few files in a folder that end so, for a hint.  OSError."""
    with os.scandir(folder) as found:
        names = [each.name for each in islice(found, MAX_LISTED_FILES)]
    return sorted(name for name in names if Path(name).suffix in suffixes)[:3]
