"""Reads an uploaded file: a form of the type multipart/form-data."""

import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from ....concurrency.time_slices import TakeTurn
from ....core.errors import BadRequest
from ...batches.file_store import MAX_NAME_CHARS
from ...shared.json_body import receive_body
from .wire import KeptFor

FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
MAX_FIELD_BYTES = 1024
MAX_LINES = len(FIELDS) + 1  # that are the boundary: one before each field, and the end
PIECE_BYTES = 1 << 16  # of a form that are parsed in one turn of the event loop
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
# Nothing else is given to the library: it parses parameters in quadratic time, and Python keeps each unknown charset.
FORM_TYPE = re.compile(
    r"""multipart/form-data[ \t]*;[ \t]*boundary=("?)(?P<boundary>[0-9A-Za-z'()+_,./:=?-]{1,70})\1"""
    r"""([ \t]*;[ \t]*charset=utf-8)?""",
    re.I,
)


class InMemoryParser(MultiPartParser):
    """Keeps the file in memory, where the body is counted; its library would write it to a temporary file."""

    spool_max_size = 1 << 40
    has_ended = False

    def __init__(self, headers: Headers, pieces: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers, pieces, max_files=1, max_fields=len(FIELDS), max_part_size=MAX_FIELD_BYTES)

    def on_end(self) -> None:
        self.has_ended = True


@dataclass(frozen=True)
class Upload:
    filename: str
    content: bytes
    seconds: int = 0  # for which it is kept; 0: until it is deleted


async def read_upload(request: Request, take_turn: TakeTurn) -> Upload:
    """Receive and parse a form; `take_turn` is awaited between pieces of it.  Raises BadRequest, and ClientGone."""
    found = FORM_TYPE.fullmatch(request.headers.get("content-type", ""))
    if not found:
        expected = "multipart/form-data; boundary=... (1 to 70 letters, digits or signs)"
        raise BadRequest(f"the body: must be a form with file and purpose, of the type {expected}")
    body = await receive_body(request)  # whether there is room for the request is known at its end
    parser = InMemoryParser(request.headers, split_form(body, f"\r\n--{found['boundary']}".encode(), take_turn))
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise BadRequest(f"the body: {error.message}") from None
    try:
        if not parser.has_ended:
            raise BadRequest("the body: the form has no end")
        return await read_form(form.multi_items())
    finally:
        await form.close()


async def split_form(body: bytearray, boundary: bytes, take_turn: TakeTurn) -> AsyncGenerator[bytes, None]:
    """Yield the form in `body` up to its end, in pieces.  `boundary` begins with the line break before it.

    The parser takes long where a line begins with the boundary and goes on, which no form may have (RFC 2046), and
    ignores what is behind the end: both raise MultiPartException, as do more such lines than there are fields.
    """
    lines = 0
    for start in range(0, len(body), PIECE_BYTES):
        await take_turn()
        stop = start + PIECE_BYTES
        found = count_starts(body, boundary, start, stop)
        lines += found
        if found != sum(count_starts(body, boundary + rest, start, stop) for rest in (b"\r\n", b"--")):
            raise MultiPartException("a line begins with the boundary and goes on; choose another boundary")
        if lines > MAX_LINES:
            raise MultiPartException(f"more than {MAX_LINES} lines are the boundary; there are {len(FIELDS)} fields")
        closing = boundary + b"--"
        closed = body.find(closing, start, stop + len(closing) - 1)
        if closed < 0:
            yield bytes(body[start:stop])
            continue
        end = closed + len(closing)
        behind = body[end : end + MAX_FIELD_BYTES + 1]
        if len(behind) > MAX_FIELD_BYTES or behind.strip(b" \t\r\n"):
            raise MultiPartException("there are bytes behind the end of the form")
        yield bytes(body[start:end])
        return


def count_starts(body: bytearray, text: bytes, start: int, stop: int) -> int:
    """How often `text` is in `body` with its first byte from `start` to `stop`."""
    return body.count(text, start, stop + len(text) - 1)


async def read_form(items: list[tuple[str, str | UploadFile]]) -> Upload:
    fields: dict[str, Any] = {}
    for name, value in items:
        if name not in FIELDS:
            raise BadRequest(f"{name[:60]}: is not a known field; there are {', '.join(FIELDS)}", param=name[:60])
        if name in fields:
            raise BadRequest(f"{name}: is there twice", param=name)
        fields[name] = value
    file, purpose = fields.get("file"), fields.get("purpose")
    if not isinstance(file, UploadFile):
        raise BadRequest("file: is required, as a file with a name", param="file")
    if purpose != "batch":
        got = "nothing" if purpose is None else f"{str(purpose)[:60]!r}"
        raise BadRequest(f"purpose: must be 'batch', the only use of files here, got {got}", param="purpose")
    filename = file.filename or ""
    if not 0 < len(filename) <= MAX_NAME_CHARS or UNPRINTABLE.search(filename):
        raise BadRequest(f"file: its name must have 1 to {MAX_NAME_CHARS} printable characters", param="file")
    return Upload(filename, await file.read(), read_kept(fields))


def read_kept(fields: dict[str, Any]) -> int:
    """The seconds for which a file is kept; 0: until it is deleted."""
    given = {name: fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds")}
    if not any(given.values()):
        return 0
    seconds = str(given["seconds"])
    given["seconds"] = int(seconds) if seconds.isascii() and seconds.isdecimal() and len(seconds) < 10 else seconds
    try:
        return KeptFor.read(given).seconds
    except BadRequest as error:
        raise BadRequest(f"expires_after.{error.message}", param=f"expires_after.{error.param}") from None
