"""Forms with a file: where they end, and what is said first of a form that cannot be read."""

import asyncio

import pytest
from fastapi import Request
from starlette.types import Message

from polyhead.service.api.dialects.batches.upload import read_upload
from polyhead.service.core.errors import BadRequest, Overloaded, PolyheadError

PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx--b--y\r\n'


def read(form: bytes, size: int, error: PolyheadError | None = None) -> bytes:
    """The content of the file in `form`, which comes in pieces of `size` bytes, and then `error`."""
    pieces = [form[start : start + size] for start in range(0, len(form), size)]

    async def receive() -> Message:
        if not pieces:
            assert error is not None
            raise error
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces) or error is not None}

    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    return asyncio.run(read_upload(Request({"type": "http", "headers": headers}, receive))).content


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_bytes_behind_the_end_are_refused(size: int) -> None:
    for end in (b"", b"\r\n", b" \r\n\r\n"):
        assert read(PURPOSE + FILE + b"--b--" + end, size) == b"x--b--y"
    for end in (b"z", b"\r\nz", b"\r\n" + FILE):
        with pytest.raises(BadRequest, match="there are bytes behind the end of the form"):
            read(PURPOSE + FILE + b"--b--" + end, size)
    with pytest.raises(BadRequest, match="the form has no end"):
        read(PURPOSE + FILE + b"--b\r\n", size)


@pytest.mark.parametrize("form", [b"no form" * 9, FILE + b"--b--" + FILE])
def test_a_form_that_cannot_be_read_is_refused_once_its_body_has_room(form: bytes) -> None:
    with pytest.raises(BadRequest):
        read(form, 7)
    with pytest.raises(Overloaded):
        read(form, 7, Overloaded("no room", retry_after=1))
