"""Folders of small JSON files, one for each record, and the reads and writes of the disk, which run on threads."""

import asyncio
import errno
import logging
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Generic, TypeVar
from weakref import WeakValueDictionary

from pydantic import BaseModel, ConfigDict, Field

from polyhead.models.core.files import replace_file

from ...concurrency.thread_pool import ThreadPool, WorkInfo
from ...core.errors import InsufficientStorage, first_line

DISK_THREADS, THREADS_PER_OWNER = 8, 2
HOLD_S = 1.0  # after which another thread takes the place of one with slow work
LINE_BEGIN_BYTES = 1 << 14  # of a line that is not read whole
MAX_RECORD_BYTES = 256 << 10  # of a record's JSON file: twice what a batch with the longest metadata and errors takes
ID_PATTERN = re.compile(r"[a-z]+[-_][0-9a-f]{24}")
FILE_ID = r"file-[0-9a-f]{24}"  # those of files
ID_BYTES = 12
MAX_NUMBER = (1 << 53) - 1  # in a record: JSON has it exactly
RECORD_MODE = 0o600  # only the server's user may read files of clients
# Nothing here is a link, and opening a pipe must not wait for its other end.
OPEN_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
T = TypeVar("T")

Number = Annotated[int, Field(ge=0, le=MAX_NUMBER)]

log = logging.getLogger("polyhead.batches")


class Record(BaseModel):
    """What is known of a file or a batch.  Its JSON file is called after its id."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    id: Annotated[str, Field(pattern=f"^{ID_PATTERN.pattern}$")]
    owner: str  # the name of the key; empty if the server requires none
    created_at: Number  # seconds since 1970, as all times


class Disk:
    """Threads that read and write the disk for owners.  One owner has at most THREADS_PER_OWNER of them at a time, so
    that its slow work does not delay that of others.
    """

    def __init__(self) -> None:
        self._threads = ThreadPool(DISK_THREADS, "disk", math.inf, HOLD_S, THREADS_PER_OWNER)

    async def run(self, owner: str, work: Callable[[], T], size: int = 1) -> T:
        """What `work`, which reads or writes about `size` bytes, returns.  Raises InsufficientStorage instead of
        OSError.
        """
        try:
            return await self._threads.run(work, WorkInfo("using the disk", owner, owner, max(size, 1)))
        except OSError as error:
            log.error("the folder of files cannot be used: %s", error)
            raise InsufficientStorage(f"the disk with the files cannot be used: {error.strerror}") from None

    def close(self) -> None:
        self._threads.close()


R = TypeVar("R", bound=Record)


class RecordFolder(Generic[R]):
    """A folder of records of one kind.  Raises InsufficientStorage where the disk cannot be used."""

    def __init__(self, folder: Path, kind: type[R], disk: Disk) -> None:
        self.folder, self.kind, self._disk = folder, kind, disk
        self._writing = WeakValueDictionary[str, asyncio.Lock]()  # by record, so that the last write wins
        self.has_unread = False  # whether `read_all` has left a record where it is

    async def read_all(self) -> list[R]:
        """All records, the oldest first.  One that cannot be read is left where it is, and logged.

        What is left of records that were not written to their end is removed.
        """
        return await self._disk.run("", self._read_all)

    def _read_all(self) -> list[R]:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for path in self.folder.glob("*.new"):
            remove_stray(path)
        found = []
        for path in self.folder.glob("*.json"):
            try:
                with open(path, "rb", opener=open_regular) as file:
                    record = self.kind.model_validate_json(file.read(MAX_RECORD_BYTES))
            except (OSError, ValueError) as error:
                log.warning("%s is not read: %s", path, first_line(error))
                self.has_unread = True
                continue
            if record.id == path.stem:
                found.append(record)
            else:
                log.warning("%s is not read: it is the record of %s", path, record.id)
                self.has_unread = True
        return sorted(found, key=lambda record: record.created_at)

    async def write(self, record: R) -> None:
        """Replace a record: afterwards, or if the machine stops meanwhile, its file has the old one or the new one."""
        content = record.model_dump_json().encode()
        assert len(content) <= MAX_RECORD_BYTES, "the fields of a record are bounded, so that it can be read"
        replace = partial(replace_file, self.path(record.id), content, RECORD_MODE)
        async with self._writing.setdefault(record.id, asyncio.Lock()):  # an owner has several threads
            await self._disk.run(record.owner, replace, len(content))

    async def remove(self, record_id: str, owner: str) -> None:
        """Remove a record, as work of `owner`."""
        async with self._writing.setdefault(record_id, asyncio.Lock()):
            await self._disk.run(owner, partial(self.path(record_id).unlink, missing_ok=True))

    def path(self, record_id: str) -> Path:
        return self.folder / f"{record_id}.json"


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(ID_BYTES)


def open_regular(path: str, flags: int) -> int:
    """Opens for `open`.  Raises OSError for a link, and for what is no regular file."""
    descriptor = os.open(path, flags | OPEN_FLAGS, RECORD_MODE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file")
    return descriptor


def remove_stray(path: Path) -> None:
    """Remove a file that nothing names, if its name is that of a record.  One that cannot be removed is logged."""
    if ID_PATTERN.fullmatch(path.name.partition(".")[0]):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed: %s", path, error.strerror)


def write_file(path: Path, content: bytes | bytearray) -> None:
    with open(path, "wb", opener=open_regular) as file:
        file.write(content)


def read_part(path: Path, start: int, size: int) -> bytes:
    """`size` bytes from `start` on.  Raises OSError if the file ends before."""
    with open(path, "rb", opener=open_regular) as file:
        file.seek(start)
        part = file.read(size)
    if len(part) < size:
        raise OSError(errno.EIO, "a file is shorter than it was")
    return part


def append_whole(path: Path, size: int, parts: Iterable[bytes | bytearray]) -> None:
    """Write `parts` at `size`, the end of the file.  If the disk is full, the file is as before."""
    with open(path, "r+b", opener=open_regular) as file:
        try:
            file.seek(size)
            file.writelines(parts)
            file.flush()
        except OSError:
            file.truncate(size)
            raise


def keep_whole_lines(path: Path, read_begin: Callable[[bytes], T]) -> tuple[int, list[T]]:
    """The size of the lines of JSON of a file that are whole and whose beginning `read_begin` reads, and what it
    returns for them.  What follows them is removed from the file.  Of a line LINE_BEGIN_BYTES are in memory at a time.
    """
    size, found = 0, list[T]()
    with open(path, "r+b", opener=open_regular) as file:
        while begin := file.readline(LINE_BEGIN_BYTES):
            part, length, has_hole = begin, len(begin), b"\0" in begin  # left where the machine stopped while it wrote
            while part and not part.endswith(b"\n"):
                part = file.readline(LINE_BEGIN_BYTES)
                length += len(part)
                has_hole |= b"\0" in part
            try:
                value = read_begin(begin)
            except ValueError:
                break
            if not part or has_hole:
                break
            found.append(value)
            size += length
        file.truncate(size)
    return size, found
