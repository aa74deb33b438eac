"""Responses: JSON, server-sent events, JSON lines; and the abort of requests whose client has disconnected.

While an answer is computed, the connection is watched.  When it closes, the coroutine that computes the answer is
cancelled, or the generator closed, which aborts the engine requests.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import islice
from typing import Any, Self

import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...concurrency.outcome import as_exception, cancel_tasks
from ...concurrency.time_slices import split_in_slices
from ...core.errors import ClientGone, PolyheadError

JSON_LINES = "application/x-ndjson"
NO_HEADERS: Mapping[str, str] = {}
NUMPY_OPTION = orjson.OPT_SERIALIZE_NUMPY
KEEPALIVE_S = 10
SEND_BYTES = 1 << 18  # bytes of an answer that are sent at a time
MAX_NUMBERS, MAX_OBJECTS = 1 << 12, 16  # that are serialized in one call, which blocks other threads
CONTAINERS = (dict, list, tuple, np.ndarray, Iterator)  # of values that may be long
MAX_CHARACTERS = 1 << 10  # of a text that is serialized in one call, for which orjson takes up to 64 bytes each
MAX_INLINE_ITEMS = 64  # of a list inside an object that is serialized in one call


def as_float32(values: Sequence[float] | memoryview) -> NDArray[np.float32]:
    """As float32, which JSON writes with half of the digits of a double; it is parsed in half the time."""
    return np.asarray(values, np.float32)


class JsonResponse(Response):
    """A JSON response.  JSON has no infinite or NaN numbers; `service.text.detokenizer` lets none through."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=NUMPY_OPTION)


class PartsResponse(Response):
    """A body that was written in `parts`.  They are sent as the client reads them, and never joined."""

    def __init__(
        self, parts: Sequence[bytes], media_type: str = "application/json", headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        size = sum(map(len, parts))
        self.parts = [b"".join(parts)] if size <= SEND_BYTES else parts
        self.status_code, self.background = 200, None
        self.media_type = media_type
        self.init_headers({"content-length": str(size), **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self.parts:
            for start in range(0, len(part), SEND_BYTES):
                await send({"type": "http.response.body", "body": part[start : start + SEND_BYTES], "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def dumps_sliced(content: Any) -> bytes:
    """Serialize in small parts, since orjson blocks all other threads while it runs.

    An iterator is written as a list; each of its items is dropped once it is written.
    """
    match content:
        case Iterator():
            parts = iter(lambda: list(islice(content, MAX_OBJECTS)), [])
            return b"[%s]" % b",".join(orjson.dumps(each, option=NUMPY_OPTION)[1:-1] for each in parts)
        case str() if len(content) > MAX_CHARACTERS:
            texts = (content[start : start + MAX_CHARACTERS] for start in range(0, len(content), MAX_CHARACTERS))
            return b"".join((b'"', *(orjson.dumps(each)[1:-1] for each in texts), b'"'))
        case dict() if len(content) <= MAX_NUMBERS and is_flat(content):
            return orjson.dumps(content, option=NUMPY_OPTION)
        case dict():
            return b"{%s}" % b",".join(orjson.dumps(key) + b":" + dumps_sliced(value) for key, value in content.items())
        case np.ndarray(ndim=2) if content.size > MAX_NUMBERS:
            return dumps_sliced(list(content))
        case np.ndarray(ndim=1) if content.size > MAX_NUMBERS:
            pieces = (content[start : start + MAX_NUMBERS] for start in range(0, content.size, MAX_NUMBERS))
            return b"[%s]" % b",".join(orjson.dumps(each, option=NUMPY_OPTION)[1:-1] for each in pieces)
        case [list() | np.ndarray(), *_]:
            return b"[%s]" % b",".join(map(dumps_sliced, content))
        case [dict() | str(), *_] if any(map(is_long, content)):
            return b"[%s]" % b",".join(map(dumps_sliced, content))
        case [first, *_]:
            some = split_in_slices(content, MAX_OBJECTS if isinstance(first, dict) else MAX_NUMBERS)
            return b"[%s]" % b",".join(orjson.dumps(each, option=NUMPY_OPTION)[1:-1] for each in some)
        case _:
            return orjson.dumps(content, option=NUMPY_OPTION)


def is_flat(content: Mapping[str, Any]) -> bool:
    """Whether no value of it is a list, an object or a long text."""
    return not any(isinstance(each, CONTAINERS) or is_long(each) for each in content.values())


def is_long(content: Any) -> bool:
    """Whether it contains a list of more than MAX_INLINE_ITEMS items, or is a text of more than MAX_CHARACTERS."""
    match content:
        case str():
            return len(content) > MAX_CHARACTERS
        case dict():
            return any(map(is_long, content.values()))
        case list() | tuple():
            return len(content) > MAX_INLINE_ITEMS or any(map(is_long, content))
        case _:
            return False


async def run_while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The result of `work`.  If the client disconnects first, `work` is cancelled and ClientGone raised.

    The body must have been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(wait_disconnect(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client has left")
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Exception):
            raise as_exception(error)
        return task.result()
    finally:
        await cancel_tasks(task, gone)


async def wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def encode_event(content: Any) -> bytes:
    """One server-sent event.  JSON has no line breaks, so it is one line of data."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


def encode_named_event(content: Any) -> bytes:
    """The same with a line `event:` that repeats its `type`, for clients that use it."""
    return f"event: {content['type']}\n".encode() + encode_event(content)


def encode_line(content: Any) -> bytes:
    """One JSON line; bytes are JSON already."""
    return (content if isinstance(content, bytes) else orjson.dumps(content, option=NUMPY_OPTION)) + b"\n"


async def encode_events(
    items: AsyncGenerator[Any, None],
    error: Callable[[PolyheadError], Mapping[str, Any]],
    last: bytes = b"",
    encode: Callable[[Any], bytes] = encode_event,
) -> AsyncGenerator[bytes, None]:
    """Encode `items`, by default as server-sent events, then send `last`.

    An error after the first item is sent in the stream and ends it.  An error before that is raised, so that the
    response can still have its status.
    """
    has_begun = False
    async with aclosing(items):
        try:
            async for item in items:
                has_begun = True
                yield encode(item)
        except PolyheadError as failure:
            if not has_begun:
                raise
            yield encode(error(failure))
            return
    yield last


class EventStream(Response):
    """Sends `chunks` as they come, waits for a slow client, and closes them when the client disconnects.

    `keepalive` is sent whenever nothing was sent for KEEPALIVE_S, for proxies and clients that drop a silent
    connection.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, chunks: AsyncGenerator[bytes, None], keepalive: bytes = b"") -> None:
        self.first, self.chunks, self.keepalive = first, chunks, keepalive
        self.last_sent = math.inf  # when the last chunk was sent, by `time.monotonic`; infinity while sending
        self.status_code, self.background = 200, None
        # proxies must not buffer events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    @classmethod
    async def open(cls, chunks: AsyncGenerator[bytes, None], keepalive: bytes = b"") -> Self:
        """Wait for the first chunk; raises what is raised before it."""
        return cls(await anext(chunks), chunks, keepalive)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        sending = asyncio.create_task(self.send(send))
        gone = asyncio.create_task(wait_disconnect(receive))
        pause = KEEPALIVE_S / 2 if self.keepalive else None
        try:
            while not (await asyncio.wait((sending, gone), timeout=pause, return_when=asyncio.FIRST_COMPLETED))[0]:
                if time.monotonic() - self.last_sent >= KEEPALIVE_S:
                    await self.send_chunk(send, self.keepalive)
            if sending.done():
                sending.result()
        finally:
            await cancel_tasks(sending, gone)
            await self.chunks.aclose()

    async def send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self.send_chunk(send, self.first)
        async for chunk in self.chunks:
            await self.send_chunk(send, chunk)
        self.last_sent = math.inf
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_chunk(self, send: Send, chunk: bytes) -> None:
        self.last_sent = math.inf
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self.last_sent = time.monotonic()


class LineStream(EventStream):
    """A stream of JSON lines."""

    media_type = JSON_LINES
