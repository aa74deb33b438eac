"""Runs batches in the background: those of one key one after the other, those of several keys beside each other."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from ...concurrency.outcome import cancel_tasks, wait_for_error
from ...core.errors import PolyheadError
from .batch import Batch
from .batch_lines import LineRoom
from .batch_run import BatchRun, CallServer
from .batch_store import BatchStore

CLEANUP_S = 60.0  # between two searches for expired files

log = logging.getLogger("polyhead.batches")


ReadLine = Callable[[str, int, bytes], tuple[str, bytes]]  # of an endpoint; see `ReadRequest`


class BatchRunner:
    """Lives on the event loop thread."""

    def __init__(self, store: BatchStore, call: CallServer, read_line: ReadLine, room: LineRoom) -> None:
        self.store, self._call, self._read_line, self._room = store, call, read_line, room
        self._waiting: dict[str, deque[str]] = {}  # by owner: batches that have not begun
        self._workers: dict[str, asyncio.Task[None]] = {}  # by owner
        self._runs: dict[str, BatchRun] = {}  # by batch: those that run

    async def open(self) -> None:
        """Read what is known of all files and batches.  Raises InsufficientStorage if the folder cannot be read."""
        await self.store.files.open()
        await self.store.open()

    async def run(self) -> None:
        """Go on with all batches that have not ended, and run new ones, until this is cancelled."""
        for batch in self.store.unfinished():
            self._enqueue(batch)
        try:
            while True:
                await asyncio.sleep(CLEANUP_S)
                await self.store.files.remove_expired()
        finally:
            await cancel_tasks(*self._workers.values())
            self.store.files.close()

    async def begin(self, batch: Batch) -> Batch:
        """Raises NotFound if there is no such file, TooMany, and InsufficientStorage."""
        await self.store.add(batch)
        self._enqueue(batch)
        return batch

    async def cancel(self, batch_id: str, owner: str) -> Batch:
        """Begin no more requests of a batch, and abort those that run.  A batch that has ended stays as it is."""
        batch = self.store.find(batch_id, owner)
        if batch.status not in ("validating", "in_progress"):
            return batch
        batch = await self.store.set_status(batch_id, "cancelling")
        if batch_id in self._runs:
            self._runs[batch_id].stop.set()
        return batch

    def _enqueue(self, batch: Batch) -> None:
        self._waiting.setdefault(batch.owner, deque()).append(batch.id)
        if batch.owner not in self._workers:
            self._workers[batch.owner] = asyncio.create_task(self._work(batch.owner))

    async def _work(self, owner: str) -> None:
        """Run the batches of an owner until there are none."""
        waiting = self._waiting[owner]
        try:
            while waiting:
                batch_id = waiting.popleft()
                read_request = partial(self._read_line, self.store[batch_id].endpoint)
                run = self._runs[batch_id] = BatchRun(self.store, batch_id, self._call, read_request, self._room)
                try:
                    error = await wait_for_error(run.run())
                    if isinstance(error, Exception):
                        log.error("%s cannot be answered", batch_id, exc_info=error)
                        await run.fail(PolyheadError("the server made a mistake; its log says more"))
                    elif error is not None:
                        raise error
                finally:
                    del self._runs[batch_id]
        finally:
            del self._workers[owner], self._waiting[owner]
