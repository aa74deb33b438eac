"""Answers the requests of one batch, several at a time, each as a request over HTTP is answered."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Protocol, TypeVar

from ...concurrency.outcome import cancel_tasks
from ...core.errors import (
    BadRequest,
    BodyTooLarge,
    InsufficientStorage,
    NotFound,
    Overloaded,
    PolyheadError,
    Unavailable,
)
from ...resources.request_memory import MemoryClaim
from ..access.own_calls import OwnAnswer
from .batch import Batch, BatchError, Status
from .batch_lines import (
    BYTES_PER_LINE_BYTE,
    PART_BYTES,
    BatchLine,
    LineReader,
    LineRoom,
    ReadRequest,
    answered_id,
    refuse_line,
    write_answer,
    write_expired,
)
from .batch_store import BatchStore
from .record_folder import read_part

CALLS_AHEAD = 16  # requests of one batch at a time
BUSY, NOT_READY = 429, 503  # statuses after which a request is tried again
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 30.0  # before that
MAX_NOT_READY_S = 900.0  # for which a request is tried again whose model is not there
T = TypeVar("T")

log = logging.getLogger("polyhead.batches")


class CallServer(Protocol):
    """Sends a request to the server itself, in the name of a key."""

    async def __call__(self, owner: str, path: str, body: bytes) -> OwnAnswer:
        """Raises NotFound if there is no such key any more."""


class BatchRun:
    """One run of a batch.  A batch of which a server has answered a part is continued by the next one."""

    def __init__(
        self, store: BatchStore, batch_id: str, call: CallServer, read_request: ReadRequest, room: LineRoom
    ) -> None:
        self.store, self.files, self.id = store, store.files, batch_id
        self._call, self._read_request, self._room = call, read_request, room
        self.stop = asyncio.Event()  # set when the batch is cancelled
        if self.batch.status == "cancelling":
            self.stop.set()

    @property
    def batch(self) -> Batch:
        return self.store[self.id]

    async def run(self) -> None:
        """Answer all requests, unless the batch is cancelled or expires before."""
        try:
            if not self.files.contains(self.batch.input_file):  # it was deleted in the folder
                raise NotFound(f"there is no file {self.batch.input_file!r}")
            reader = await self._read_lines()
            if reader.errors:
                await self._end("failed", reader.errors)
                return
            remaining = await self._open_outputs(reader.lines)
            await self._end(await self._answer(remaining))
        except (NotFound, InsufficientStorage, Overloaded, Unavailable) as error:  # no key, disk, memory or thread
            await self.fail(error)

    async def fail(self, error: PolyheadError) -> None:
        """End the batch as failed, also if the disk is full."""
        await self._end("failed", [BatchError(code=error.code, message=error.message)])

    async def _read_lines(self) -> LineReader:
        """Read the requests, up to the end of the file unless the batch is cancelled.  Raises Overloaded if there is no
        memory for a line until the batch expires, Unavailable if there is no thread.
        """
        reader = LineReader(self.files.content_path(self.batch.input_file), self._read_request)
        while not (reader.is_complete or self.stop.is_set()):
            line = await self._try_until_expiry(partial(self._use_disk, reader.read_part, PART_BYTES))
            if line is not None:
                await self._read_long_line(reader, line)
        return reader

    async def _try_until_expiry(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """The result of `work`, which is tried again where there is no memory or no thread for it; None if the batch is
        cancelled.
        """
        pause = MIN_PAUSE_S
        while not self.stop.is_set():
            try:
                return await work()
            except (Overloaded, Unavailable):
                if self._seconds_left() <= 0:
                    raise
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), pause)
            pause = min(2 * pause, MAX_PAUSE_S)
        return None

    async def _read_long_line(self, reader: LineReader, line: BatchLine) -> None:
        """Read a line once there is memory for it; one that can never have it is an error of the file."""

        async def read_id() -> str:
            with closing(self._open_claim()) as claim:
                custom_id, _ = await self._read_line(line, claim)
            return custom_id

        try:
            custom_id = await self._try_until_expiry(read_id)
        except (BadRequest, BodyTooLarge) as error:
            reader.fail(line, error)
        else:
            if custom_id is not None:
                reader.add(line, custom_id)

    async def _read_line(self, line: BatchLine, claim: MemoryClaim) -> tuple[str, bytes]:
        """The custom_id and the body of a request.  The memory of a long line is claimed before it is taken.

        Raises Overloaded and BodyTooLarge where there is none, Unavailable where there is no thread.
        """
        read = partial(read_part, self.files.content_path(self.batch.input_file), line.start, line.size)
        if not line.is_long:
            return await self._use_disk(lambda: self._read_request(line.number, read()), line.size)
        claim.grow(BYTES_PER_LINE_BYTE * line.size, f"line {line.number}")
        return await self._room.parse(line, await self._use_disk(read, line.size), claim, self._read_request)

    def _open_claim(self) -> MemoryClaim:
        return MemoryClaim(self._room.headroom, self.batch.owner)

    async def _use_disk(self, work: Callable[[], T], size: int) -> T:
        return await self.files.disk.run(self.batch.owner, work, size)

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
        pause, clock = MIN_PAUSE_S, asyncio.get_running_loop().time
        given_up = clock() + MAX_NOT_READY_S
        while True:
            answer = await self._send_line(line)
            if answer.status == BUSY:
                given_up = clock() + MAX_NOT_READY_S
            elif answer.status != NOT_READY or clock() > given_up:
                return answer
            answer.release()
            advised = answer.headers.get("retry-after", "")
            await asyncio.sleep(min(max(pause, float(advised) if advised.isdecimal() else 0.0), MAX_PAUSE_S))
            pause = min(2 * pause, MAX_PAUSE_S)

    async def _send_line(self, line: BatchLine) -> OwnAnswer:
        """Send a request once.  Its body is read each time: nothing of it is kept while it waits to be sent again."""
        try:
            return await self._call(self.batch.owner, self.batch.endpoint, await self._read_body(line))
        except (Overloaded, Unavailable, BodyTooLarge) as error:
            return refuse_line(error)

    async def _read_body(self, line: BatchLine) -> bytes:
        """The body of a request.  Its claim ends with this: the call claims as much in the next turn of the event loop,
        and would never have it beside this claim where it takes all that a key may have.
        """
        with closing(self._open_claim()) as claim:
            _, body = await self._read_line(line, claim)
        return body

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
