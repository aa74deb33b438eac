"""Answers the requests of one batch, several at a time, each as a request over HTTP is answered."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from ...concurrency.outcome import cancel_tasks
from ...core.errors import InsufficientStorage, NotFound, PolyheadError
from ..access.own_calls import OwnAnswer
from .batch import Batch, BatchError, Status
from .batch_lines import (
    BatchLine,
    ReadRequest,
    answered_id,
    read_body,
    read_lines,
    write_answer,
    write_expired,
)
from .batch_store import BatchStore

CALLS_AHEAD = 16  # requests of one batch at a time
BUSY, NOT_READY = 429, 503  # statuses after which a request is tried again
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 30.0  # before that
MAX_NOT_READY_S = 900.0  # for which a request is tried again whose model is not there

log = logging.getLogger("polyhead.batches")


class CallServer(Protocol):
    """Sends a request to the server itself, in the name of a key."""

    async def __call__(self, owner: str, path: str, body: bytes) -> OwnAnswer:
        """Raises NotFound if there is no such key any more."""


class BatchRun:
    """One run of a batch.  A batch of which a server has answered a part is continued by the next one."""

    def __init__(self, store: BatchStore, batch_id: str, call: CallServer, read_request: ReadRequest) -> None:
        self.store, self.files, self.id = store, store.files, batch_id
        self._call, self._read_request = call, read_request
        self.stop = asyncio.Event()  # set when the batch is cancelled
        if self.batch.status == "cancelling":
            self.stop.set()

    @property
    def batch(self) -> Batch:
        return self.store[self.id]

    async def run(self) -> None:
        """Answer all requests, unless the batch is cancelled or expires before."""
        path = self.files.content_path(self.batch.input_file)
        try:
            if not self.files.contains(self.batch.input_file):  # it was deleted in the folder
                raise NotFound(f"there is no file {self.batch.input_file!r}")
            read = partial(read_lines, path, self._read_request)
            lines, errors = await self.files.disk.run(self.batch.owner, read, self.files.size(self.batch.input_file))
            if errors:
                await self._end("failed", errors)
                return
            remaining = await self._open_outputs(lines)
            await self._end(await self._answer(remaining))
        except (NotFound, InsufficientStorage) as error:  # the key is gone; the disk cannot be used
            await self.fail(error)

    async def fail(self, error: PolyheadError) -> None:
        """End the batch as failed, also if the disk is full."""
        await self._end("failed", [BatchError(code=error.code, message=error.message)])

    async def _open_outputs(self, lines: Sequence[BatchLine]) -> list[BatchLine]:
        """Open the files of answers and errors, and return the requests that are in neither."""
        known = set[str]()
        for field, count, name in (("output_file", "completed", "output"), ("error_file", "failed", "errors")):
            file = getattr(self.batch, field)
            if not self.files.contains(file):
                file = await self.files.start_output(self.batch.owner, f"{self.id}_{name}.jsonl")
            answered = await self.files.continue_output(file, answered_id)
            known.update(answered)
            self.store.update(self.id, **{field: file, count: len(answered)})
        self.store.update(self.id, total=len(lines))
        if self.batch.status == "validating":
            await self.store.set_status(self.id, "in_progress")
        else:
            await self.store.save(self.batch)
        return [line for line in lines if line.custom_id not in known]

    async def _answer(self, lines: Sequence[BatchLine]) -> Status:
        """Answer `lines`.  Returns the status with which the batch ends."""
        waiting, running = list(reversed(lines)), dict[asyncio.Task[OwnAnswer], BatchLine]()
        stopped = asyncio.create_task(self.stop.wait())
        try:
            while (waiting or running) and not self.stop.is_set() and (left := self._seconds_left()) > 0:
                while waiting and len(running) < CALLS_AHEAD:
                    line = waiting.pop()
                    running[asyncio.create_task(self._answer_line(line))] = line
                done, _ = await asyncio.wait({stopped, *running}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in running if task in done]:
                    answer = task.result()
                    await self._write(running.pop(task), answer)
        finally:
            await cancel_tasks(stopped, *running)
            for task in running:  # some of them have an answer, which is not written
                if not task.cancelled() and task.exception() is None:
                    task.result().release()
        if self.stop.is_set():
            return "cancelled"
        unanswered = [*running.values(), *reversed(waiting)]
        expired = await self.files.disk.run(self.batch.owner, lambda: list(map(write_expired, unanswered)))
        await self.files.append(self.batch.error_file, expired)
        self.store.update(self.id, failed=self.batch.failed + len(unanswered))
        return "expired" if unanswered else "completed"

    async def _answer_line(self, line: BatchLine) -> OwnAnswer:
        """The response to one request.  Where there is no room, or the model is not ready, it is sent again."""
        path = self.files.content_path(self.batch.input_file)
        read = partial(read_body, path, line, self._read_request)
        body = await self.files.disk.run(self.batch.owner, read, line.size)
        pause, clock = MIN_PAUSE_S, asyncio.get_running_loop().time
        given_up = clock() + MAX_NOT_READY_S
        while True:
            answer = await self._call(self.batch.owner, self.batch.endpoint, body)
            if answer.status == BUSY:
                given_up = clock() + MAX_NOT_READY_S
            elif answer.status != NOT_READY or clock() > given_up:
                return answer
            answer.release()
            advised = answer.headers.get("retry-after", "")
            await asyncio.sleep(min(max(pause, float(advised) if advised.isdecimal() else 0.0), MAX_PAUSE_S))
            pause = min(2 * pause, MAX_PAUSE_S)

    async def _write(self, line: BatchLine, answer: OwnAnswer) -> None:
        file, count = ("output_file", "completed") if answer.is_success else ("error_file", "failed")
        try:
            await self.files.append(getattr(self.batch, file), write_answer(line, answer))
        finally:
            answer.release()
        self.store.update(self.id, **{count: getattr(self.batch, count) + 1})

    async def _end(self, status: Status, errors: Sequence[BatchError] = ()) -> None:
        if status == "completed":
            await self.store.set_status(self.id, "finalizing")
        kept = {}
        for field in ("output_file", "error_file"):
            file = getattr(self.batch, field)
            has_lines = self.files.contains(file) and await self.files.finish_output(file, self.batch.output_seconds)
            kept[field] = file if has_lines else ""
        batch = await self.store.set_status(self.id, status, errors=list(errors), **kept)
        log.info("%s: %s, %d of %d requests answered", batch.id, status, batch.completed, batch.total)

    def _seconds_left(self) -> float:
        return self.batch.expires_at - self.store.clock()
