"""Reads and writes files of a checkpoint safely: a file must be a regular file inside its folder (or inside the blob
folder of a hub's cache) and no longer than the limit for its kind. So no file can block the reader, fill the memory or
lead outside of the folder."""

import os
import secrets
import stat
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import IO, BinaryIO

from .errors import CheckpointError, show_value

MAX_SMALL_BYTES = 16 << 20  # bytes of a document
MAX_TEMPLATE_BYTES = 1 << 20  # bytes of a template; of 200,000 characters with four bytes each
MAX_VOCABULARY_BYTES = 64 << 20  # bytes of a vocabulary
MAX_NAME_BYTES = 255  # bytes of a file's name, as file systems have it
MAX_SNAPSHOT_DEPTH = 4  # folders of a snapshot inside each other
# Of O_PATH, which Linux has, permission to search a folder is enough.
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", 0)
MAX_LISTED_FILES = 10_000  # files of a folder that are searched for a hint


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading. Opening a pipe, a device or a folder may never return, so it raises
    CheckpointError. Raises OSError."""
    return open(path, "rb", opener=_open_regular)


def _open_regular(path: str, flags: int, folder: int | None = None, name: str = "") -> int:
    """Opens for `open`, or the file `name`, which may be no link, in the open `folder`. What takes the place of the
    file meanwhile does not block either."""
    at, no_link = (path, 0) if folder is None else (name, os.O_NOFOLLOW)
    check_regular(path, os.stat(at, dir_fd=folder, follow_symlinks=not no_link))
    descriptor = os.open(at, flags | no_link | os.O_NONBLOCK, dir_fd=folder)
    try:
        check_regular(path, os.fstat(descriptor))
    except CheckpointError:
        os.close(descriptor)
        raise
    return descriptor


def _open_beneath(base: Path, real: Path, path: str, flags: int) -> int:
    """Opens `real`, which lies in `base`, for `open`. Each folder on the way is opened in the one before, and none may
    be a link, so one that is put there after the path was checked does not lead out."""
    *folders, name = real.relative_to(base).parts or (".",)
    folder = os.open(base, FOLDER_FLAGS)
    try:
        for each in folders:
            outer, folder = folder, os.open(each, FOLDER_FLAGS, dir_fd=folder)
            os.close(outer)
        return _open_regular(path, flags, folder, name)
    finally:
        os.close(folder)


def check_regular(path: Path | str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError("is no regular file, and nothing else is read", file=str(path))


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when it was described. Its content is read later, from places that the description has."""

    path: Path
    state: tuple[int, ...]  # its device, inode, size in bytes, and the times in ns of its content and of the file

    @property
    def size(self) -> int:
        return self.state[2]

    @classmethod
    def of(cls, path: Path, file: IO[bytes]) -> "SourceFile":
        """The open file, which has this path."""
        return cls(path, _file_state(file.fileno()))

    def open(self) -> FileIO:
        """Opens it without a buffer. Raises CheckpointError as `open_regular` does, and if it is another file now or
        was written to. Raises OSError."""
        return open(self.path, "rb", buffering=0, opener=self._open_same)

    def _open_same(self, path: str, flags: int) -> int:
        descriptor = _open_regular(path, flags)
        if _file_state(descriptor) != self.state:
            os.close(descriptor)
            message = "was changed or replaced after the model was described; restart the server, or load the model"
            raise CheckpointError(f"{message} again", file=path)
        return descriptor


def _file_state(descriptor: int) -> tuple[int, ...]:
    """A writer can set the time of the content, but not that of the file (its status)."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def open_member(path: Path) -> BinaryIO:
    """Opens a file of a checkpoint folder. Raises CheckpointError as `open_regular` does, and for a link that leads out
    of the folder."""
    home, real = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    base = next((each for each in (home, blob_folder(home)) if real.is_relative_to(each)), None)
    if base is None:
        message = "is a link that leads out of its folder, and such are not followed; put the file itself there"
        raise CheckpointError(message, file=str(path))
    return open(path, "rb", opener=partial(_open_beneath, base, real))


def blob_folder(folder: Path) -> Path:
    """The folder where a hub's cache keeps the files that a snapshot (models--org--name/snapshots/revision) links to;
    the folder itself if it is no snapshot."""
    for snapshot in (folder, *list(folder.parents)[:MAX_SNAPSHOT_DEPTH]):
        if snapshot.parent.name == "snapshots" and snapshot.parent.parent.name.startswith("models--"):
            return snapshot.parent.parent / "blobs"
    return folder


def read_content(path: Path, most: int = MAX_SMALL_BYTES) -> bytes:
    """All bytes of a small file. Raises CheckpointError if it has more than `most` bytes or cannot be read,
    FileNotFoundError if it is missing."""
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


def read_beginning(path: Path, most: int) -> bytes:
    """The first `most` bytes of a file. Raises CheckpointError as `open_member` does, and OSError."""
    with open_member(path) as file:
        return file.read(most)


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Writes a file whole, or leaves what is there as it is. The new file has a random name first: a stranger's folder
    cannot hold a link of that name, which would lead elsewhere. Raises OSError."""
    new = path.with_suffix(f".{secrets.token_hex(8)}.new")
    try:
        with open(new, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(content)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def copy_file(source: Path, target: Path) -> None:
    """Copies a file of a checkpoint folder that has at most MAX_VOCABULARY_BYTES. Raises CheckpointError as
    `read_content` does and where the file is missing, OSError where `target` cannot be written."""
    target.write_bytes(read_copyable(source))


def read_copyable(path: Path) -> bytes:
    """All bytes of a file that may be copied. Raises CheckpointError, also where the file is missing."""
    try:
        return read_content(path, MAX_VOCABULARY_BYTES)
    except FileNotFoundError:
        raise CheckpointError("cannot be read: there is no such file", file=str(path)) from None


def read_text(path: Path, most: int, errors: str = "strict") -> str:
    """The text of a small file, with every line ending as one newline. Raises as `read_content` does, and
    UnicodeDecodeError."""
    return read_content(path, most).decode(errors=errors).replace("\r\n", "\n").replace("\r", "\n")


def subfolder(folder: Path, name: str) -> Path:
    """A folder inside a folder. Raises CheckpointError unless `name` is the plain name of one that is no link."""
    path = folder / name
    if name and (not is_plain_name(name) or path.is_symlink()):
        raise CheckpointError(f"{show_value(name)} is no folder inside this one", file=str(folder))
    return path


def is_plain_name(name: str) -> bool:
    """Whether this may be the name of a file inside a folder: no path, and nothing that a file system refuses."""
    refused = "\0" in name or len(name.encode(errors="replace")) > MAX_NAME_BYTES
    return not refused and name not in ("", ".", "..") and Path(name).name == name and "\\" not in name


def list_files(folder: Path, suffixes: Collection[str]) -> list[str]:
    """Names of up to three files in a folder with one of these suffixes, for a hint in a message. A folder that is
    missing or cannot be read has none: what reads its files says what is wrong with it."""
    try:
        with os.scandir(folder) as found:
            names = [each.name for each in islice(found, MAX_LISTED_FILES)]
    except OSError:
        return []
    return sorted(name for name in names if Path(name).suffix in suffixes)[:3]
