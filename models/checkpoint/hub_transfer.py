"""Downloads files of one repository into the hub's cache, several at a time, and continues what was interrupted.

The cache has the layout of huggingface_hub, which other programs read too: `blobs/DIGEST` are contents,
`snapshots/COMMIT/NAME` links to them, `refs/REVISION` holds a commit. The library throws away what an interrupted
process has downloaded; here the part stays as `blobs/DIGEST.incomplete` and the next download continues it. Every file
is compared with its digest before it gets its name.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from logging import getLogger
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from ..core.errors import CheckpointError, show_value, truncate
from .hub_files import HubFile
from .hub_requests import library_part, open_answer
from .hub_watch import CheckWanted, always_wanted, wait_for_lock

try:
    import fcntl
except ImportError:  # Windows
    HAS_FILE_LOCKS = False
else:
    HAS_FILE_LOCKS = True

if find_spec("huggingface_hub") is not None:
    import huggingface_hub

CHUNK_BYTES = 1 << 20
PARALLEL_FILES = 4
RETRIES = 5  # attempts in a row that bring no byte
RETRY_SECONDS = 1.0  # before the first further attempt; twice as long before each next one
MAX_PLAIN_BYTES = 50_000_000_000  # the hub sends larger files by its own protocol only, which the library knows
OWN_HUB = "https://huggingface.co"
RESERVED_BYTES = 256 << 20  # bytes of the disk that a download leaves free
ABANDONED_SECONDS = 3600.0  # after which no program downloads a part that has not grown
LOG_SECONDS = 5.0  # between two lines of progress
SPAN_SECONDS = 15.0  # in which the bytes of all files are counted
MIN_SPAN_BYTES = 1 << 16  # bytes of such a span, or it is slow: 4 KiB a second; a modem of 56 kbit/s brings 7
MAX_SLOW_SPANS = 2  # in a row; a pause without a byte is one, however long it is
SHA256_DIGITS = 64
SERVER_ERROR = 500  # the first status of an answer that may be better the next time
log = getLogger(__name__)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Repository:
    """A repository at one commit, and its folder in the cache. `label` is what messages call it."""

    name: str
    commit: str
    storage: Path
    label: str

    @property
    def snapshot(self) -> Path:
        return self.storage / "snapshots" / self.commit

    def has(self, file: HubFile) -> bool:
        return (self.snapshot / file.name).exists()

    def blob(self, file: HubFile) -> Path:
        return self.storage / "blobs" / file.digest

    def partial(self, file: HubFile) -> Path:
        name = file.digest or hashlib.sha256(f"{self.commit}/{file.name}".encode()).hexdigest()
        return self.storage / "blobs" / f"{name}.incomplete"

    def bytes_left(self, file: HubFile) -> int:
        """Bytes of a file that are still to be downloaded."""
        if self.has(file) or (file.digest and self.blob(file).exists()):
            return 0
        return max(file.size - file_size(self.partial(file)), 0) if file.digest else file.size


def file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


@dataclass
class Tally:
    """Counts the bytes of all files of a download; any thread may call it. `progress` may raise to end the download.

    CheckpointError if the bytes of all files together come too slowly: a hub that sends one now and then would keep the
    download, since each of them counts as progress. What has come stays, and the next download continues it.
    `check_owner` raises if the load that began the download was cancelled.
    """

    label: str
    total: int
    progress: Progress
    check_owner: CheckWanted = always_wanted
    done: int = 0
    stopped: bool = False
    logged_at: float = field(default_factory=time.monotonic)
    span_start: float = field(default_factory=time.monotonic)
    span_bytes: int = 0
    slow_spans: int = 0  # in a row
    lock: Lock = field(default_factory=Lock)

    def receive(self, count: int) -> None:
        """Count bytes that have come, those that are there already included."""
        self.check_wanted()
        with self.lock:
            self.check_speed(count, time.monotonic())

    def check_wanted(self) -> None:
        """Raise if the download has ended otherwise."""
        if self.stopped:
            raise CheckpointError("another file of the download failed")
        self.check_owner()

    def add(self, count: int) -> None:
        """Count bytes that were lacking."""
        with self.lock:
            self.done += count
            self.progress(min(self.done, self.total), self.total)
            if time.monotonic() - self.logged_at >= LOG_SECONDS:
                self.logged_at = time.monotonic()
                log.info("%s: %s of %s are downloaded", self.label, show_bytes(self.done), show_bytes(self.total))

    def check_speed(self, count: int, now: float) -> None:
        """Count bytes that have come by the time `now`. CheckpointError after MAX_SLOW_SPANS slow spans in a row."""
        self.span_bytes += count
        if (seconds := now - self.span_start) < SPAN_SECONDS:
            return
        self.slow_spans = self.slow_spans + 1 if self.span_bytes < MIN_SPAN_BYTES else 0
        if self.slow_spans >= MAX_SLOW_SPANS:
            came = f"{self.span_bytes} bytes in the last {seconds:.0f} s"
            least = MIN_SPAN_BYTES / SPAN_SECONDS / 2**10
            message = f"the hub sends it too slowly: {came}, and {least:.0f} KiB a second are the least"
            raise CheckpointError(f"{message}; load it again, and it goes on with what has come")
        self.span_start, self.span_bytes = now, 0


def show_bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.1f} MiB"


def download_files(
    repository: Repository,
    files: Collection[HubFile],
    progress: Progress,
    max_bytes: int,
    check_wanted: CheckWanted = always_wanted,
) -> None:
    """Download the files that the cache lacks. `progress` is called with the bytes downloaded so far, and in all;
    `max_bytes` limits the size of all files together; 0: no limit. What `check_wanted` raises ends the download.

    CheckpointError before anything is downloaded if they are larger, or larger than what is free on the disk, or if the
    size of one is not known.
    """
    for file in files:
        if file.size < 0:
            raise CheckpointError(f"the hub names no size of {file.name}; a download of any size is not begun")
    size, left = sum(file.size for file in files), sum(repository.bytes_left(file) for file in files)
    if max_bytes and size > max_bytes:
        raise CheckpointError(f"its files have {show_bytes(size)}; a download may have {show_bytes(max_bytes)} at most")
    lacking = [file for file in files if not repository.has(file)]
    if not lacking:
        return
    repository.snapshot.mkdir(parents=True, exist_ok=True)
    (repository.storage / "blobs").mkdir(exist_ok=True)
    remove_other_parts(repository, files)
    free = shutil.disk_usage(repository.storage).free
    if left + RESERVED_BYTES > free:
        message = f"{show_bytes(left)} are to be downloaded, and {show_bytes(free)} are free in {repository.storage}"
        raise CheckpointError(f"{message}; {show_bytes(RESERVED_BYTES)} stay free")
    log.info("%s: %s in %d files are to be downloaded", repository.label, show_bytes(left), len(lacking))
    tally = Tally(repository.label, left, progress, check_wanted)
    with ThreadPoolExecutor(PARALLEL_FILES, "download") as pool:
        jobs = [pool.submit(download_file, repository, file, tally) for file in lacking]
        try:
            for job in jobs:
                job.result()
        finally:  # after an error or an interrupt of this thread the threads of the other files end
            tally.stopped = True
            pool.shutdown(cancel_futures=True)


def remove_other_parts(repository: Repository, files: Collection[HubFile]) -> None:
    """Remove what earlier downloads left of other contents, which nothing continues: a hub that names another digest
    each time would fill the disk. What has grown lately stays, since another program may download it.
    """
    continued = {repository.partial(file) for file in files}
    for path in (repository.storage / "blobs").glob("*.incomplete"):
        with suppress(OSError):
            if path not in continued and time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                path.unlink()


def download_file(repository: Repository, file: HubFile, tally: Tally) -> None:
    """Download one file, or what is lacking of it, and link it into the snapshot."""
    if file.size > MAX_PLAIN_BYTES:
        download_very_large(repository, file)
        tally.add(file.size)
        return
    blob = repository.blob(file)
    if not file.digest or not blob.exists():
        with open_locked(repository.partial(file), tally.check_wanted) as partial:
            if not file.digest or not blob.exists():  # else another process has downloaded it meanwhile
                blob = repository.storage / "blobs" / fill(repository, file, partial, tally)
                os.replace(repository.partial(file), blob)
    link(repository.snapshot / file.name, blob)


def download_very_large(repository: Repository, file: HubFile) -> None:
    """Download a file by the library. It places a file where the hub's answer says, and compares neither its size nor
    its digest, so it may do that with the hub itself only. CheckpointError for another one."""
    if library_part("constants").ENDPOINT != OWN_HUB:
        message = f"{file.name} has {show_bytes(file.size)}; files of more than {show_bytes(MAX_PLAIN_BYTES)}"
        raise CheckpointError(f"{message} are downloaded from {OWN_HUB} only, and HF_ENDPOINT names another hub")
    huggingface_hub.hf_hub_download(
        repository.name, file.name, revision=repository.commit, cache_dir=repository.storage.parent
    )


@contextmanager
def open_locked(path: Path, check_wanted: CheckWanted) -> Iterator[BinaryIO]:
    """Open a partial file for reading and writing. Another download of the same file waits while it is wanted, where
    the system has such locks.
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        if HAS_FILE_LOCKS:
            wait_for_lock(lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB), check_wanted)
        yield file


def fill(repository: Repository, file: HubFile, partial: BinaryIO, tally: Tally) -> str:
    """Write the rest of a file, with further attempts where the connection ends early, and return its digest.
    CheckpointError if the content is not the expected one; then nothing of it is kept."""
    digest = start_digest(file)
    at = 0
    if not file.digest:  # a part of an earlier download could not be compared with anything
        partial.truncate(0)
    while chunk := partial.read(CHUNK_BYTES):
        digest.update(chunk)
        at += len(chunk)
    failures = 0
    while at < file.size:
        began = at
        try:
            for chunk in read_remote(repository, file, at, tally):
                if at + len(chunk) > file.size:
                    raise wrong_content(file, partial)
                partial.write(chunk)
                digest.update(chunk)
                at += len(chunk)
                tally.add(len(chunk))
        except library_part("errors").HTTPError as error:
            failures = 0 if at > began else failures + 1
            if failures >= RETRIES or is_refusal(error):
                raise
            what = repository.label, show_value(file.name), truncate(str(error) or type(error).__name__)
            log.warning("%s: %s: %s; it is continued", *what)
            time.sleep(RETRY_SECONDS * 2**failures)
            continue
        if at < file.size:  # the connection ended as if the file did
            failures = 0 if at > began else failures + 1
            if failures >= RETRIES:
                break
    partial.flush()
    found: str = digest.hexdigest()
    if at != file.size or (file.digest and found != file.digest):
        raise wrong_content(file, partial)
    return found


def wrong_content(file: HubFile, partial: BinaryIO) -> CheckpointError:
    """The error for a content that is not the expected one, of which nothing is kept."""
    partial.truncate(0)
    return CheckpointError(f"the content of {file.name} is not the one that the hub lists; load it again")


def is_refusal(error: Exception) -> bool:
    """Whether an error is an answer of the hub that a further attempt does not change."""
    kinds = library_part("errors")
    return isinstance(error, kinds.HfHubHTTPError) and error.response.status_code < SERVER_ERROR


def start_digest(file: HubFile) -> Any:
    """The digest of an empty beginning: SHA-256, or git's, which hashes the size first. Where the hub names none, the
    blob is named by its SHA-256."""
    if len(file.digest) in (0, SHA256_DIGITS):
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def read_remote(repository: Repository, file: HubFile, start: int, tally: Tally) -> Iterator[bytes]:
    """The content of a file from byte `start` on. `tally` receives each piece that comes, those before `start`
    included. Raises as `open_answer` does."""
    url = huggingface_hub.hf_hub_url(repository.name, file.name, revision=repository.commit)
    with open_answer(url, start, tally.check_wanted) as answer:
        skipped = start if answer.status_code == 200 else 0  # a server that knows no ranges sends all again
        for chunk in answer.pieces():
            tally.receive(len(chunk))
            kept = chunk[skipped:]
            skipped = max(skipped - len(chunk), 0)
            if kept:
                yield kept


def link(path: Path, blob: Path) -> None:
    """Link a name of the snapshot to its content, as huggingface_hub does; where there are no links, copy it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.symlink_to(os.path.relpath(blob, path.parent))
    except FileExistsError:
        pass
    except OSError:
        shutil.copyfile(blob, path)


def remember_revision(repository: Repository, revision: str) -> None:
    """Keep which commit a branch or tag is, for a time without the hub."""
    path = repository.storage / "refs" / revision
    if revision == repository.commit:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        written.write_text(repository.commit)
        os.replace(written, path)
    except OSError:
        written.unlink(missing_ok=True)
        raise
