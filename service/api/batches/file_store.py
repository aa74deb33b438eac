"""The files of batches: what clients upload, and what batches write.  They are kept in one folder:

    FOLDER/lock                held by the server that uses the folder
    FOLDER/files/ID.json       a `StoredFile`
    FOLDER/files/ID.content    its bytes

Every file belongs to the key that made it, and is found by that key only.  Files of batches that are not finished are
not found by anyone.  Reads and writes run on threads, which owners share; the list of files belongs to the event loop.
"""

import asyncio
import logging
import os
import stat
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from ...config.settings import SettingsError
from ...core.errors import Conflict, InsufficientStorage, NotFound
from ...resources.key_share import KeyShare
from .record_folder import (
    Disk,
    Number,
    Record,
    RecordFolder,
    append_whole,
    keep_whole_lines,
    new_id,
    open_regular,
    read_part,
    remove_stray,
    write_file,
)

try:
    import fcntl
except ImportError:  # Windows, where nothing keeps two servers from one folder
    fcntl = None  # type: ignore[assignment]

Purpose = Literal["batch", "batch_output"]
MAX_FILES = 10_000
MAX_NAME_CHARS = 255
PIECE_BYTES = 1 << 16  # of a file that are read at a time to be sent
R = TypeVar("R")

log = logging.getLogger("polyhead.batches")


class StoredFile(Record):
    filename: Annotated[str, Field(max_length=MAX_NAME_CHARS)]
    purpose: Purpose
    bytes: Number = 0
    expires_at: Number = 0  # 0: never
    is_complete: bool = True  # otherwise a batch still writes it


@dataclass(frozen=True)
class StoreLimits:
    """Bytes of all files together, and how many there may be; one owner may have the fraction `share` of both."""

    bytes: int
    share: float = 1.0
    files: int = MAX_FILES


class FileStore:
    """All files.  `open` must be called before anything else.

    If there are several `owners`, each may use its share of the limits; the collection may change.
    """

    def __init__(
        self,
        folder: Path,
        limits: StoreLimits,
        owners: Collection[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises SettingsError if the folder cannot be used, or another server uses it."""
        self.folder, self.limits, self.clock = folder, limits, clock
        self.disk = Disk()
        self._share = KeyShare(owners, limits.share)
        self._records = RecordFolder(folder / "files", StoredFile, self.disk)
        self._files: dict[str, StoredFile] = {}
        self._bytes = Counter[str]()  # by owner; summing up all files for each line that a batch writes would take long
        self._counts = Counter[str]()  # by owner: its files
        self._uses: dict[str, int] = {}  # by file: how many batches and responses read it
        self._lock = lock_folder(folder)

    async def open(self) -> None:
        """Read what is known of all files.  Raises InsufficientStorage if the folder cannot be read.

        Bytes without a record are removed, and records without bytes: the server ended while the file was uploaded, or
        deleted.
        """
        files = await self._records.read_all()
        for file in await self.disk.run("", partial(self._match_contents, files)):
            self._set(file)

    def _match_contents(self, files: Iterable[StoredFile]) -> list[StoredFile]:
        """Those of `files` that have their content.  What is left of others is removed; what was not written by a
        server is left where it is, and logged.
        """
        found = []
        for file in files:
            record, path = self._records.path(file.id), self.content_path(file.id)
            try:
                content = path.lstat()
            except FileNotFoundError:
                log.warning("%s is removed: its content is gone", record)
                remove_stray(record)
                continue
            if not stat.S_ISREG(content.st_mode) or file.bytes > content.st_size:
                log.warning("%s is not read: %s is no regular file of its %d bytes", record, path.name, file.bytes)
            elif content.st_size > self.limits.bytes:
                log.warning("%s is not read: %s is longer than all files together may be", record, path.name)
            else:
                found.append(file)
        for path in self._records.folder.glob("*.content"):
            if not os.path.lexists(path.with_suffix(".json")):
                remove_stray(path)
        return found

    def close(self) -> None:
        self.disk.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def find(self, file_id: str, owner: str) -> StoredFile:
        """Raises NotFound."""
        file = self._files.get(file_id)
        if file is None or file.owner != owner or not file.is_complete or self._is_expired(file):
            raise NotFound(f"there is no file {file_id[:60]!r}")
        return file

    def list_files(self, owner: str, *, newest_first: bool = True) -> Iterator[StoredFile]:
        for file in reversed(self._files.values()) if newest_first else self._files.values():
            if file.owner == owner and file.is_complete and not self._is_expired(file):
                yield file

    async def read_pieces(self, file: StoredFile) -> AsyncGenerator[bytes, None]:
        """The content, at least one piece.  Raises InsufficientStorage.  The caller holds the file meanwhile."""
        path, start = self.content_path(file.id), 0
        while start < file.bytes or not start:
            size = min(PIECE_BYTES, file.bytes - start)
            yield await self.disk.run(file.owner, partial(read_part, path, start, size), size)
            start += max(size, 1)

    def content_path(self, file_id: str) -> Path:
        return self._records.folder / f"{file_id}.content"

    async def add(self, owner: str, filename: str, content: bytes | bytearray, seconds: int = 0) -> StoredFile:
        """Keep an uploaded file, for `seconds` if they are given.  Raises InsufficientStorage."""
        file = self._new_file(owner, filename, "batch", seconds)
        grown = file.model_copy(update={"bytes": len(content)})
        self._check_room(owner, len(content))
        self._set(grown.model_copy(update={"is_complete": False}))  # its bytes are counted from now on
        await self._write(grown, content)
        self._set(grown)
        return grown

    async def start_output(self, owner: str, filename: str) -> str:
        """Begin an empty file that a batch writes, and return its id.  Raises InsufficientStorage."""
        file = self._new_file(owner, filename, "batch_output", 0).model_copy(update={"is_complete": False})
        self._set(file)
        await self._write(file, b"")
        return file.id

    async def _write(self, file: StoredFile, content: bytes | bytearray) -> None:
        """Write a new file and its record.  Where that fails, nothing of it is left."""
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._forget, file.id)
            await self.disk.run(file.owner, partial(write_file, self.content_path(file.id), content), len(content))
            await self._records.write(file)
            undo.pop_all()

    async def continue_output(self, file_id: str, read_begin: Callable[[bytes], R]) -> list[R]:
        """What `read_begin` returns for each line of a file that a batch did not finish.  From the first line on that
        is cut off, or for which it raises ValueError, the file is cut.
        """
        file = self._files[file_id]
        keep = partial(keep_whole_lines, self.content_path(file_id), read_begin)
        size, found = await self.disk.run(file.owner, keep, file.bytes)
        self._set(self._files[file_id].model_copy(update={"bytes": size}))
        return found

    async def append(self, file_id: str, parts: Collection[bytes | bytearray]) -> None:
        """Write lines, in parts, to the end of a file.  Raises InsufficientStorage, and then nothing is kept."""
        file = self._files[file_id]
        size = sum(map(len, parts))
        self._check_room(file.owner, size)
        await self.disk.run(file.owner, partial(append_whole, self.content_path(file_id), file.bytes, parts), size)
        self._set(file.model_copy(update={"bytes": file.bytes + size}))

    async def finish_output(self, file_id: str, seconds: int) -> bool:
        """Let its owner find a file, for `seconds` if they are given.  An empty one is removed; returns whether it is
        kept.
        """
        file = self._files[file_id]
        if not file.bytes:
            with suppress(InsufficientStorage):  # it is logged
                await self._forget(file_id)
            return False
        now = int(self.clock())
        file = file.model_copy(update={"is_complete": True, "expires_at": now + seconds if seconds else 0})
        self._set(file)
        with suppress(InsufficientStorage):  # what is on the disk is found incomplete by the next server
            await self._records.write(file)
        return True

    async def delete(self, file_id: str, owner: str) -> None:
        """Raises NotFound, and Conflict while a batch or a response reads the file."""
        self.find(file_id, owner)
        if self._uses.get(file_id):
            message = "is read by a batch, or sent to a client; cancel the batch first, or wait"
            raise Conflict(f"the file {file_id!r} {message}")
        await self._forget(file_id)

    def hold(self, file_id: str) -> None:
        """Keep a file from being deleted until `release` is called as often."""
        self._uses[file_id] = self._uses.get(file_id, 0) + 1

    def release(self, file_id: str) -> None:
        self._uses[file_id] -= 1
        if not self._uses[file_id]:
            del self._uses[file_id]

    def size(self, file_id: str) -> int:
        """In bytes; 0 if it does not exist."""
        return self._files[file_id].bytes if file_id in self._files else 0

    def contains(self, file_id: str) -> bool:
        """Whether the file exists, complete or not."""
        return file_id in self._files

    def may_use(self, file_id: str, owner: str, purpose: str) -> bool:
        """Whether a batch of `owner` may have this file for this purpose: it is such a file, or there is none, since it
        was deleted.
        """
        file = self._files.get(file_id)
        return file is None or (file.owner, file.purpose) == (owner, purpose)

    async def remove_expired(self) -> None:
        """Those of one owner one after the other, beside those of others."""
        expired = defaultdict[str, list[str]](list)
        for file in self._files.values():
            if self._is_expired(file) and not self._uses.get(file.id):
                expired[file.owner].append(file.id)
        await asyncio.gather(*map(self._remove_unused, expired.values()))

    async def remove_unfinished(self, known: Collection[str]) -> None:
        """Remove files that a batch has begun and that none names in `known`: the server ended before it was kept."""
        lost = [file.id for file in self._files.values() if not file.is_complete and file.id not in known]
        await self._remove_unused(lost)

    async def _remove_unused(self, file_ids: Iterable[str]) -> None:
        for file_id in file_ids:
            if not self._uses.get(file_id):
                with suppress(InsufficientStorage):  # it is logged, and tried again later
                    await self._forget(file_id)

    def _is_expired(self, file: StoredFile) -> bool:
        return bool(file.expires_at) and self.clock() >= file.expires_at

    def _new_file(self, owner: str, filename: str, purpose: Purpose, seconds: int) -> StoredFile:
        of_owner = self._share.of(self.limits.files)
        if len(self._files) >= self.limits.files or self._counts[owner] >= of_owner:
            most, whose = (of_owner, "a key") if self._counts[owner] >= of_owner else (self.limits.files, "all keys")
            raise InsufficientStorage(f"{whose} may have {most} files together, and there are as many; delete some")
        now = int(self.clock())
        expires_at = now + seconds if seconds else 0
        file_id = new_id("file-")
        return StoredFile(
            id=file_id, owner=owner, created_at=now, filename=filename, purpose=purpose, expires_at=expires_at
        )

    def _check_room(self, owner: str, size: int) -> None:
        of_owner, of_all = self._bytes[owner], self._bytes.total()
        share = self._share.of(self.limits.bytes)
        if of_all + size > self.limits.bytes or of_owner + size > share:
            most, used = (share, of_owner) if of_owner + size > share else (self.limits.bytes, of_all)
            whose = "the files of a key" if most < self.limits.bytes else "all files"
            raise InsufficientStorage(
                f"{size} bytes do not fit: {whose} may have {most} bytes together (files_mib), and have {used}; "
                "delete some"
            )

    async def _forget(self, file_id: str) -> None:
        """Remove a file.  It is not found while its bytes are removed; where they cannot be, it is as before, and an
        incomplete one is left to `remove_expired`.
        """
        if (file := self._files.get(file_id)) is None:
            return
        self._set(file.model_copy(update={"is_complete": False}))
        try:
            await self.disk.run(file.owner, partial(self.content_path(file_id).unlink, missing_ok=True))
            await self._records.remove(file_id, file.owner)
        except InsufficientStorage:
            self._set(file if file.is_complete else file.model_copy(update={"expires_at": 1}))
            raise
        if self._files.pop(file_id, None) is not None:
            self._bytes[file.owner] -= file.bytes
            self._counts[file.owner] -= 1

    def _set(self, file: StoredFile) -> None:
        before = self._files.get(file.id)
        self._bytes[file.owner] += file.bytes - (before.bytes if before else 0)
        self._counts[file.owner] += before is None
        self._files[file.id] = file


def lock_folder(folder: Path) -> int:
    """Make `folder` if it is missing, and lock it.  Returns the descriptor of the lock.  Raises SettingsError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open_regular(str(folder / "lock"), os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise SettingsError(f"files_dir: {folder} cannot be used: {error.strerror}") from None
    try:
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise SettingsError(f"files_dir: {folder} is used by another server; give each a folder of its own") from None
    return lock
