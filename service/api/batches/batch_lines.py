"""The lines of a batch's files: requests, and answers."""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import orjson

from ...concurrency.thread_pool import ThreadPool, WorkInfo
from ...core.errors import BadRequest, PolyheadError
from ...resources.request_memory import BYTES_PER_BODY_BYTE, UNBOUNDED_HEADROOM, Headroom, MemoryClaim
from ..access.own_calls import OwnAnswer
from ..shared.json_body import claim_values, count_json
from ..shared.openai_errors import write_openai_error
from .batch import BatchError
from .record_folder import open_regular

MAX_LINES = 50_000  # with a request
MAX_READ_LINES = 2 * MAX_LINES  # with empty ones
MAX_ERRORS = 20  # of lines that are reported
LONG_LINE_BYTES = 1 << 14  # of a line for which memory is claimed; the values of a shorter one take 1 MiB at most
BYTES_PER_LINE_BYTE = 1 + BYTES_PER_BODY_BYTE  # of a long line: what a body takes, and the body that is written of it
PART_BYTES = 1 << 20  # of a file that are read in one piece of work
ReadRequest = Callable[[int, bytes], tuple[str, bytes]]  # custom_id and body of a line; raises BadRequest


@dataclass(frozen=True)
class BatchLine:
    """A request of a batch: where its line is in the file, and what the client calls it."""

    number: int  # from 1
    custom_id: str
    start: int  # in bytes
    size: int

    @property
    def is_long(self) -> bool:
        return self.size > LONG_LINE_BYTES


class LineReader:
    """Reads the requests in a file into `lines`, and what is wrong with it into `errors`: the first MAX_ERRORS lines
    that cannot be read.

    Short lines are read where `read_part` is called; for a long one memory must be claimed before.
    """

    def __init__(self, path: Path, read_request: ReadRequest) -> None:
        self.path, self.read_request = path, read_request
        self.lines, self.errors = list[BatchLine](), list[BatchError]()
        self.is_complete = False
        self._position = self._count = 0  # bytes and lines that were seen
        self._numbers = dict[str, int]()  # by custom_id

    def read_part(self) -> BatchLine | None:
        """Read about PART_BYTES of short lines.  A long line ends them, and is returned without its custom_id: the
        caller reads it, and calls `add` or `fail`.
        """
        end = self._position + PART_BYTES
        with open(self.path, "rb", opener=open_regular) as file:
            file.seek(self._position)
            while self._position < end and not self.is_complete:
                content = file.readline(LONG_LINE_BYTES)
                size, is_blank = measure_line(file, content)
                line = BatchLine(self._count + 1, "", self._position, size)
                self._position, self._count = self._position + line.size, line.number
                if not content:
                    self._finish()
                elif is_blank and line.number <= MAX_READ_LINES:
                    continue
                elif len(self.lines) >= MAX_LINES or line.number > MAX_READ_LINES:
                    most = f"{MAX_LINES} requests, or {MAX_READ_LINES} lines with empty ones"
                    self.errors.append(BatchError(code="too_many", message=f"the file has more than {most}"))
                    self.is_complete = True
                elif line.is_long:
                    return line
                else:
                    self._read(line, content)
        return None

    def _read(self, line: BatchLine, content: bytes) -> None:
        try:
            custom_id, _ = self.read_request(line.number, content)
        except BadRequest as error:
            self.fail(line, error)
        else:
            self.add(line, custom_id)

    def add(self, line: BatchLine, custom_id: str) -> None:
        if custom_id in self._numbers:
            message = f"custom_id: {custom_id[:60]!r} stands on line {self._numbers[custom_id]}, too; each stands once"
            self.fail(line, BadRequest(message, param="custom_id"))
            return
        self._numbers[custom_id] = line.number
        self.lines.append(replace(line, custom_id=custom_id))

    def fail(self, line: BatchLine, error: PolyheadError) -> None:
        """The line cannot be read."""
        self.errors.append(BatchError(code=error.code, message=error.message, line=line.number, param=error.param))
        self.is_complete |= len(self.errors) >= MAX_ERRORS

    def _finish(self) -> None:
        self.is_complete = True
        if not self.lines and not self.errors:
            self.errors.append(BatchError(code="empty_file", message="the file has no requests"))


def measure_line(file: BinaryIO, begin: bytes) -> tuple[int, bool]:
    """Bytes of the line whose first LONG_LINE_BYTES, or all of them, are `begin`, and whether it has only white space.
    The rest is read, and not kept.
    """
    size, is_blank = len(begin), not begin.strip()
    while begin and not begin.endswith(b"\n"):
        begin = file.readline(LONG_LINE_BYTES)
        size += len(begin)
        is_blank &= not begin.strip()
    return size, is_blank


@dataclass(frozen=True)
class LineRoom:
    """Where long lines are parsed, as bodies of requests are: their memory is claimed from `headroom` before it is
    taken, and keys take turns on `threads`.  Many threads that parse megabytes would each keep as much in an arena of
    the allocator.
    """

    headroom: Headroom = UNBOUNDED_HEADROOM
    threads: ThreadPool = field(default_factory=lambda: ThreadPool(1, "lines", math.inf))

    async def parse(
        self, line: BatchLine, content: bytes, claim: MemoryClaim, read_request: ReadRequest
    ) -> tuple[str, bytes]:
        """What `read_request` returns for a long line.  Raises as it does, Overloaded and BodyTooLarge."""
        what = f"line {line.number}"

        def parse() -> tuple[str, bytes]:
            claim_values(claim, count_json(content), what)
            return read_request(line.number, content)

        return await self.threads.run(parse, WorkInfo(f"reading {what}", self.threads, claim.owner, line.size))


def write_answer(line: BatchLine, answer: OwnAnswer) -> list[bytes | bytearray]:
    """The parts of a line.  The body is one of them as it is: a copy would take memory that nobody has claimed."""
    names = orjson.dumps(write_names(line))
    response = orjson.dumps({"status_code": answer.status, "request_id": answer.request_id})
    before = names[:-1] + b',"response":' + response[:-1] + b',"body":'
    return [before, answer.body, b'},"error":null}\n']


def refuse_line(error: PolyheadError) -> OwnAnswer:
    """The response to a request for which there is no memory, as the server gives it."""
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else {}
    return OwnAnswer(error.status, bytearray(orjson.dumps(write_openai_error(error))), headers=headers)


def write_expired(line: BatchLine) -> bytes:
    message = "the batch has expired before this request was answered"
    error = {"code": "batch_expired", "message": message}
    return orjson.dumps(write_names(line) | {"response": None, "error": error}, option=orjson.OPT_APPEND_NEWLINE)


def write_names(line: BatchLine) -> dict[str, str]:
    return {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": line.custom_id}


def answered_id(begin: bytes) -> str:
    """The custom_id of a line that `write_answer` or `write_expired` has written, from its beginning: the answer may
    take many times its size when it is parsed.  Raises ValueError.
    """
    names, separator, _ = begin.partition(b',"response":')  # not within a string, where quotes are escaped
    value = orjson.loads(names + b"}") if separator else None
    if not isinstance(value, dict) or not isinstance(value.get("custom_id"), str):
        raise ValueError("the line is no answer")
    return str(value["custom_id"])
