"""All batches, ended or not, with the files that they read and write."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from ...core.errors import InsufficientStorage, NotFound, TooMany
from .batch import Batch, Status
from .file_store import FileStore
from .record_folder import RecordFolder

MAX_BATCHES = 10_000
MAX_UNFINISHED = 64  # of one owner


class BatchStore:
    """Every batch belongs to the key that made it.  Lives on the event loop thread; `open` must be called first."""

    def __init__(self, files: FileStore, clock: Callable[[], float] = time.time) -> None:
        self.files, self.clock = files, clock
        self._records = RecordFolder(files.folder / "batches", Batch)
        self._batches: dict[str, Batch] = {}

    async def open(self) -> None:
        self._batches = {batch.id: batch for batch in await self._records.read_all()}
        for batch in self.unfinished():
            self.files.hold(batch.input_file)

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
        """Raises NotFound if there is no such file, and TooMany."""
        self.files.find(batch.input_file, batch.owner)
        if sum(other.owner == batch.owner for other in self.unfinished()) >= MAX_UNFINISHED:
            raise TooMany(f"{MAX_UNFINISHED} batches of this key have not ended, at most so many are accepted")
        oldest = next((each for each in self._batches.values() if each.has_ended), None)
        if len(self._batches) >= MAX_BATCHES and oldest is None:
            raise TooMany(f"{MAX_BATCHES} batches have not ended, at most so many are accepted")
        self.files.hold(batch.input_file)
        try:
            await self.save(batch)
            if len(self._batches) > MAX_BATCHES and oldest is not None:
                await self._records.remove(self._batches.pop(oldest.id).id)
        except InsufficientStorage:
            self._batches.pop(batch.id, None)
            self.files.release(batch.input_file)
            raise

    async def save(self, batch: Batch) -> Batch:
        self._batches[batch.id] = batch
        await self._records.write(batch)
        return batch

    async def set_status(self, batch_id: str, status: Status, **changes: object) -> Batch:
        """Change the status, and other fields with it.  With a status that ends the batch its input is let go.

        If the disk is full, the next server finds the batch with its last status, and goes on with it.
        """
        batch = self._batches[batch_id].model_copy(update=changes).with_status(status, self.clock())
        self._batches[batch_id] = batch
        if batch.has_ended:
            self.files.release(batch.input_file)
        with suppress(InsufficientStorage):
            await self._records.write(batch)
        return batch

    def update(self, batch_id: str, **changes: object) -> Batch:
        """Change fields in memory only."""
        batch = self._batches[batch_id] = self._batches[batch_id].model_copy(update=changes)
        return batch
