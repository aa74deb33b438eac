"""The lines of a batch's files: requests, and answers."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from ...core.errors import BadRequest
from ..access.own_calls import OwnAnswer
from .batch import BatchError

MAX_LINES = 50_000
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
        if len(lines) >= MAX_LINES:
            errors.append(BatchError(code="too_many", message=f"the file has more than {MAX_LINES} requests"))
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
    """(number, position, content) of each line that is not empty."""
    start = 0
    with path.open("rb") as file:
        for number, content in enumerate(file, 1):
            if content.strip():
                yield number, start, content
            start += len(content)


def read_body(path: Path, line: BatchLine, read_request: ReadRequest) -> bytes:
    """The body of the request on a line that `read_lines` has read."""
    with path.open("rb") as file:
        file.seek(line.start)
        _, body = read_request(line.number, file.read(line.size))
    return body


def write_answer(line: BatchLine, answer: OwnAnswer) -> bytes:
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": orjson.Fragment(answer.body),
    }
    return write_line(line, response, None)


def write_expired(line: BatchLine) -> bytes:
    message = "the batch has expired before this request was answered"
    return write_line(line, None, {"code": "batch_expired", "message": message})


def write_line(line: BatchLine, response: object, error: object) -> bytes:
    written = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": line.custom_id}
    return orjson.dumps(written | {"response": response, "error": error}, option=orjson.OPT_APPEND_NEWLINE)


def answered_id(line: bytes) -> str:
    """The custom_id of a line that `write_line` has written.  Raises ValueError."""
    value = orjson.loads(line)
    if not isinstance(value, dict) or not isinstance(value.get("custom_id"), str):
        raise ValueError("the line is no answer")
    return str(value["custom_id"])
