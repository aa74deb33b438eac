"""All batches, ended or not, with the files that they read and write."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import chain

from ...core.errors import InsufficientStorage, NotFound, TooMany
from .batch import Batch, Status
from .file_store import FileStore
from .record_folder import RecordFolder

MAX_KEPT_BYTES = 32 << 20  # of all batches together, by `Batch.kept_bytes`: more than ten thousand ordinary ones
MAX_UNFINISHED = 64  # of one owner

log = logging.getLogger("polyhead.batches")


class BatchStore:
    """Every batch belongs to the key that made it.  Lives on the event loop thread; `open` must be called first."""

    def __init__(self, files: FileStore, clock: Callable[[], float] = time.time) -> None:
        self.files, self.clock = files, clock
        self._records = RecordFolder(files.folder / "batches", Batch, files.disk)
        self._batches: dict[str, Batch] = {}
        self._bytes = Counter[str]()  # by owner: what its batches take

    async def open(self) -> None:
        """Read what is known of all batches, after the files.  A batch with files that are not its own is left where it
        is, and logged; then no output is removed, since it may be that of such a batch.
        """
        is_complete = True
        for batch in await self._records.read_all():
            uses = (batch.input_file, "batch"), (batch.output_file, "batch_output"), (batch.error_file, "batch_output")
            if foreign := [file for file, purpose in uses if not self.files.may_use(file, batch.owner, purpose)]:
                path = self._records.path(batch.id)
                log.warning("%s is not read: %s is not such a file of its key", path, foreign[0])
                is_complete = False
                continue
            self._set(batch)
        for batch in self.unfinished():
            self.files.hold(batch.input_file)
        if is_complete and not self._records.has_unread:
            outputs = ((batch.output_file, batch.error_file) for batch in self._batches.values())
            await self.files.remove_unfinished(set(chain.from_iterable(outputs)))

    def __getitem__(self, batch_id: str) -> Batch:
        return self._batches[batch_id]

    def unfinished(self) -> list[Batch]:
        """The oldest first."""
        return [batch for batch in self._batches.values() if not batch.has_ended]

    def find(self, batch_id: str, owner: str) -> Batch:
        """Raises NotFound."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise NotFound(f"there is no batch {batch_id[:60]!r}")
        return batch

    def list_batches(self, owner: str) -> Iterator[Batch]:
        """The newest first."""
        return (batch for batch in reversed(self._batches.values()) if batch.owner == owner)

    async def add(self, batch: Batch) -> None:
        """Raises NotFound if there is no such file, TooMany, and InsufficientStorage."""
        self.files.find(batch.input_file, batch.owner)
        if sum(other.owner == batch.owner for other in self.unfinished()) >= MAX_UNFINISHED:
            raise TooMany(f"{MAX_UNFINISHED} batches of this key have not ended, at most so many are accepted")
        self.files.hold(batch.input_file)
        self._set(batch)  # before anything is awaited, so that it counts at once
        with ExitStack() as undo:
            undo.callback(self.files.release, batch.input_file)
            undo.callback(self._drop, batch.id)
            await self._make_room(batch.owner)
            await self._records.write(batch)
            undo.pop_all()

    async def _make_room(self, new_owner: str) -> None:
        """Forget batches that have ended until the others fit: each time the oldest of the key whose batches take most,
        so that no key loses batches by what another keeps.  It is work of `new_owner`.  Raises InsufficientStorage.
        """
        while self._bytes.total() > MAX_KEPT_BYTES:
            ended = Counter[str]()
            for batch in self._batches.values():
                ended[batch.owner] += batch.has_ended
            owner = max((owner for owner in ended if ended[owner]), key=self._bytes.__getitem__, default=None)
            if owner is None:
                raise InsufficientStorage("there are as many batches as the server keeps, and none of them has ended")
            oldest = next(batch for batch in self._batches.values() if batch.owner == owner and batch.has_ended)
            self._drop(oldest.id)
            with suppress(InsufficientStorage):  # it is logged; the next server finds the batch again
                await self._records.remove(oldest.id, new_owner)

    def _set(self, batch: Batch) -> None:
        before = self._batches.get(batch.id)
        self._bytes[batch.owner] += batch.kept_bytes - (before.kept_bytes if before else 0)
        self._batches[batch.id] = batch

    def _drop(self, batch_id: str) -> None:
        batch = self._batches.pop(batch_id)
        self._bytes[batch.owner] -= batch.kept_bytes

    async def save(self, batch: Batch) -> Batch:
        self._set(batch)
        await self._records.write(batch)
        return batch

    async def set_status(self, batch_id: str, status: Status, **changes: object) -> Batch:
        """Change the status, and other fields with it.  With a status that ends the batch its input is let go.

        If the disk is full, the next server finds the batch with its last status, and goes on with it.
        """
        batch = self._batches[batch_id].model_copy(update=changes).with_status(status, self.clock())
        self._set(batch)
        if batch.has_ended:
            self.files.release(batch.input_file)
        with suppress(InsufficientStorage):
            await self._records.write(batch)
        return batch

    def update(self, batch_id: str, **changes: object) -> Batch:
        """Change fields in memory only."""
        batch = self._batches[batch_id].model_copy(update=changes)
        self._set(batch)
        return batch
