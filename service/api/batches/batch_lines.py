"""The lines of a batch's files: requests, and answers."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from ...core.errors import BadRequest
from ..access.own_calls import OwnAnswer
from .batch import BatchError
from .record_folder import open_regular

MAX_LINES = 50_000  # with a request
MAX_READ_LINES = 2 * MAX_LINES  # with empty ones
MAX_ERRORS = 20  # of lines that are reported
ReadRequest = Callable[[int, bytes], tuple[str, bytes]]  # custom_id and body of a line; raises BadRequest


@dataclass(frozen=True)
class BatchLine:
    """A request of a batch: where its line is in the file, and what the client calls it."""

    number: int  # from 1
    custom_id: str
    start: int  # in bytes
    size: int


def read_lines(path: Path, read_request: ReadRequest) -> tuple[list[BatchLine], list[BatchError]]:
    """The requests in a file, and what is wrong with it: the first MAX_ERRORS lines that cannot be read."""
    lines, errors, seen = list[BatchLine](), list[BatchError](), dict[str, int]()
    for number, start, content in numbered_lines(path):
        if len(lines) >= MAX_LINES or number > MAX_READ_LINES:
            most = f"{MAX_LINES} requests, or {MAX_READ_LINES} lines with empty ones"
            errors.append(BatchError(code="too_many", message=f"the file has more than {most}"))
            break
        try:
            custom_id, _ = read_request(number, content)
            if custom_id in seen:
                message = f"custom_id: {custom_id[:60]!r} stands on line {seen[custom_id]}, too; each stands once"
                raise BadRequest(message, param="custom_id")
        except BadRequest as error:
            errors.append(BatchError(code=error.code, message=error.message, line=number, param=error.param))
            if len(errors) >= MAX_ERRORS:
                break
            continue
        seen[custom_id] = number
        lines.append(BatchLine(number, custom_id, start, len(content)))
    if not lines and not errors:
        errors.append(BatchError(code="empty_file", message="the file has no requests"))
    return lines, errors


def numbered_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(number, position, content) of each line that is not empty, and of the one after MAX_READ_LINES."""
    start = 0
    with open(path, "rb", opener=open_regular) as file:
        for number, content in enumerate(file, 1):
            if content.strip() or number > MAX_READ_LINES:
                yield number, start, content
            start += len(content)


def read_body(path: Path, line: BatchLine, read_request: ReadRequest) -> bytes:
    """The body of the request on a line that `read_lines` has read."""
    with open(path, "rb", opener=open_regular) as file:
        file.seek(line.start)
        _, body = read_request(line.number, file.read(line.size))
    return body


def write_answer(line: BatchLine, answer: OwnAnswer) -> list[bytes | bytearray]:
    """The parts of a line.  The body is one of them as it is: a copy would take memory that nobody has claimed."""
    names = orjson.dumps(write_names(line))
    response = orjson.dumps({"status_code": answer.status, "request_id": answer.request_id})
    before = names[:-1] + b',"response":' + response[:-1] + b',"body":'
    return [before, answer.body, b'},"error":null}\n']


def write_expired(line: BatchLine) -> bytes:
    message = "the batch has expired before this request was answered"
    error = {"code": "batch_expired", "message": message}
    return orjson.dumps(write_names(line) | {"response": None, "error": error}, option=orjson.OPT_APPEND_NEWLINE)


def write_names(line: BatchLine) -> dict[str, str]:
    return {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": line.custom_id}


def answered_id(line: bytes) -> str:
    """The custom_id of a line of an answer.  Raises ValueError."""
    value = orjson.loads(line)
    if not isinstance(value, dict) or not isinstance(value.get("custom_id"), str):
        raise ValueError("the line is no answer")
    return str(value["custom_id"])
