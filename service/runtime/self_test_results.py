"""The files in model_dir/fidelity: the measured costs of precisions, and hashes of weight files.

A file is read only if it is a regular file of at most MAX_RESULT_BYTES bytes that holds a JSON object; any other counts
as missing.
"""

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from polyhead.models.core.errors import CheckpointError
from polyhead.models.core.files import open_regular, read_content, replace_file

MAX_RESULT_BYTES = 1 << 16  # bytes of a file that is read back
HASH_CHUNK = 1 << 20  # bytes that are hashed at a time
HASH_PATTERN = re.compile("[0-9a-f]{64}")
log = logging.getLogger("polyhead.fidelity")


@dataclass(frozen=True)
class PrecisionCosts:
    """The costs of the weights with one hash, by precision, instruction set and kernels, in a file in `folder`."""

    folder: Path
    weights_hash: str  # their SHA-256

    @property
    def _file(self) -> Path:
        return self.folder / f"{self.weights_hash}.json"

    def find(self, key: str) -> float | None:
        """Return the cost; None if it was never measured."""
        found = read_object(self._file).get(key)
        return found if isinstance(found, float) and not math.isnan(found) else None

    def store(self, key: str, cost: float) -> None:
        """Store the cost. If the folder cannot be written, nothing is stored, and the next start measures it again."""
        write_object(self._file, read_object(self._file) | {key: cost})


@dataclass(frozen=True)
class FileHashes:
    """SHA-256 hashes of files, stored in `folder`.

    The name of the stored file has the device, inode, size, modification time and change time of the hashed file; its
    path does not count. Every write sets the change time to the present, and only an administrator can set it to
    another time. So one file cannot be mistaken for another.
    """

    folder: Path

    def find(self, path: Path) -> str:
        """Return the stored hash of a file without reading the file; empty if there is none."""
        try:
            found = read_object(self._record_path(path.stat())).get("sha256")
        except OSError:
            return ""
        return found if isinstance(found, str) and HASH_PATTERN.fullmatch(found) else ""

    def hash_file(self, path: Path, check: Callable[[], None]) -> str:
        """Return the hash of a file, reading it unless its hash is stored. `check` is called after each MiB, and may
        raise.

        Raises CheckpointError if the file cannot be read. The hash of a file that changes meanwhile is not stored.
        """
        if known := self.find(path):
            return known
        found = hashlib.sha256()
        try:
            with open_regular(path) as file:
                record = self._record_path(os.fstat(file.fileno()))
                while piece := file.read(HASH_CHUNK):
                    found.update(piece)
                    check()
                unchanged = record == self._record_path(os.fstat(file.fileno()))
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", file=str(path)) from None
        if unchanged:
            write_object(record, {"sha256": found.hexdigest()})
        return found.hexdigest()

    def _record_path(self, of: os.stat_result) -> Path:
        numbers = of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns
        return self.folder / f"{'-'.join(f'{number:x}' for number in numbers)}.json"


def read_object(path: Path) -> dict[str, object]:
    """Read a JSON object; empty if there is no such file or it is not valid."""
    try:
        found = json.loads(read_content(path, MAX_RESULT_BYTES))
    except (OSError, CheckpointError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_object(path: Path, content: dict[str, object]) -> None:
    """Write a JSON object. Does nothing but log if the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(content).encode())
    except OSError as error:
        log.info("the measured cost of a precision is not kept: %s", error)
