"""Reads an uploaded file: a form of the type multipart/form-data."""

import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from ....core.errors import BadRequest, ClientGone
from ...batches.file_store import MAX_NAME_CHARS
from .wire import KeptFor

FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
MAX_FIELD_BYTES = 1024
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
# Nothing else is given to the library: it parses parameters in quadratic time, and Python keeps each unknown charset.
FORM_TYPE = re.compile(
    r"""multipart/form-data[ \t]*;[ \t]*boundary=("?)(?P<boundary>[0-9A-Za-z'()+_,./:=?-]{1,70})\1"""
    r"""([ \t]*;[ \t]*charset=utf-8)?""",
    re.I,
)


class InMemoryParser(MultiPartParser):
    """Keeps the file in memory, where the body is counted; its library would write it to a temporary file.

    Raises MultiPartException for a form without an end, and for bytes behind it, which its library would ignore.
    """

    spool_max_size = 1 << 40

    def __init__(self, headers: Headers, body: AsyncGenerator[bytes, None], boundary: str) -> None:
        pieces, fields = self._check_end(body), len(FIELDS)
        super().__init__(headers, pieces, max_files=1, max_fields=fields, max_part_size=MAX_FIELD_BYTES)
        self._end, self._has_ended = f"\r\n--{boundary}--".encode(), False

    def on_end(self) -> None:
        self._has_ended = True

    async def _check_end(self, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Yield `pieces`; the parser has read a piece when it asks for the next one."""
        before = b"\r\n"  # where the end may begin
        async for piece in pieces:
            had_ended = self._has_ended
            yield piece
            if self._has_ended:
                behind = piece if had_ended else (before + piece).partition(self._end)[2]
                if behind.strip(b" \t\r\n"):
                    raise MultiPartException("there are bytes behind the end of the form")
            before = (before + piece)[-len(self._end) :]
        if not self._has_ended:
            raise MultiPartException("the form has no end")


@dataclass(frozen=True)
class Upload:
    filename: str
    content: bytes
    seconds: int = 0  # for which it is kept; 0: until it is deleted


async def read_upload(request: Request) -> Upload:
    """Raises BadRequest, and ClientGone."""
    found = FORM_TYPE.fullmatch(request.headers.get("content-type", ""))
    if not found:
        expected = "multipart/form-data; boundary=... (1 to 70 letters, digits or signs)"
        raise BadRequest(f"the body: must be a form with file and purpose, of the type {expected}")
    body = request.stream()
    try:
        try:
            form = await InMemoryParser(request.headers, body, found["boundary"]).parse()
        except MultiPartException as error:
            async for _ in body:  # whether there is room for the request is known at its end
                pass
            raise BadRequest(f"the body: {error.message}") from None
    except ClientDisconnect:
        raise ClientGone("the connection closed before the body was complete") from None
    try:
        return await read_form(form.multi_items())
    finally:
        await form.close()


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
