"""A request's body as a JSON value.

Knows no wire object.  The one idea: what a parser costs is what it makes, not what it reads: twenty megabytes of text
are one string and take 20 ms, twenty megabytes of brackets are millions of lists and take seconds, in which nobody
else is answered.  So the values are counted before any is made.
"""

import asyncio
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from service.errors import BadRequest, ClientGone

MOST_VALUES = 1 << 19  # in one body: numbers, strings, lists, objects
SMALL = 1 << 20  # bytes in which there can't be too many
SLICE = 1 << 16  # bytes looked at in one go: others get a turn after each


async def parsed(request: Request) -> Any:
    """The JSON value in the body.  BadRequest if there is none or it is too much; ClientGone without a client."""
    return await value_of(await received(request))


async def received(request: Request) -> bytes:
    """The body as it is; ClientGone without a client."""
    try:
        return await request.body()
    except ClientDisconnect:
        raise ClientGone("the connection closed before the body was complete") from None


async def value_of(body: bytes) -> Any:
    """The JSON value in `body`.  Raises BadRequest."""
    if len(body) > SMALL:
        await asyncio.to_thread(check_values, body)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None


def check_values(body: bytes) -> None:
    """Raises BadRequest if there are more than MOST_VALUES in `body`; what is in strings is none."""
    found = start = inside = 0
    while start < len(body):
        part = body[start : start + SLICE]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:
            part = body[start : start + SLICE + 1]  # not between a backslash and what it escapes
        start += len(part)
        quoted = part.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        found += marks(b"".join(quoted[inside::2]))
        inside ^= len(quoted) % 2 == 0
        if found > MOST_VALUES:
            raise BadRequest(f"the body: has more than {MOST_VALUES} values, at most so many are read")


def marks(part: bytes) -> int:
    """Every value but the first stands after one of these."""
    return part.count(b",") + part.count(b"[") + part.count(b"{")
