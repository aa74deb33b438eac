"""Responses: JSON, server-sent events, JSON lines; and the abort of requests whose client has disconnected.

While an answer is computed, the connection is watched.  When it closes, the coroutine that computes the answer is
cancelled, or the generator closed, which aborts the engine requests.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Self, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...concurrency.outcome import as_exception, cancel_tasks
from ...concurrency.thread_pool import OwnerThreads
from ...concurrency.time_slices import LazySequence, split_in_slices
from ...core.errors import ClientGone, PolyheadError

JSON_LINES = "application/x-ndjson"
NO_HEADERS: Mapping[str, str] = {}
NUMPY_OPTION = orjson.OPT_SERIALIZE_NUMPY
KEEPALIVE_S = 10
SEND_BYTES = 1 << 18  # bytes of an answer that are sent at a time
MAX_NUMBERS, MAX_TEXTS, MAX_OBJECTS = 1 << 12, 256, 16  # that are serialized in one call, which blocks other threads
LISTS = (list, np.ndarray, LazySequence)
CONTAINERS = (dict, *LISTS, tuple, Iterator)  # of values that may be long
MAX_CHARACTERS = 1 << 10  # of a text that is serialized in one call, for which orjson takes up to 64 bytes each
MAX_INLINE_ITEMS = 64  # of a list inside an object that is serialized in one call
Frame = Callable[[Any], tuple[bytes, bytes]]
T = TypeVar("T")
CHUNK_BYTES = 1 << 16  # of a long text that are copied in one call
INLINE_BYTES = 1 << 16  # of an event that is written on the event loop; more are written on a thread
LAZY_ITEM_BYTES = 1 << 10  # of an item of a lazy sequence as JSON, such as a token and the likeliest in its place
NUMBER_BYTES = 8  # of a number as JSON


def as_float32(values: Sequence[float] | memoryview) -> NDArray[np.float32]:
    """As float32, which JSON writes with half of the digits of a double; it is parsed in half the time."""
    return np.asarray(values, np.float32)


def list_items(content: Any) -> list[Any]:
    """The items of an iterator or of a lazy sequence, which orjson writes as a list."""
    if isinstance(content, Iterator | LazySequence):
        return list(content)
    raise TypeError(f"{type(content).__name__} is not JSON")


def dumps(content: Any) -> bytes:
    """Serialize in one call, which blocks all other threads."""
    return orjson.dumps(content, default=list_items, option=NUMPY_OPTION)


class JsonResponse(Response):
    """A JSON response.  JSON has no infinite or NaN numbers; `service.text.detokenizer` lets none through."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


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
    """Serialize in small parts, since orjson blocks all other threads while it runs."""
    return b"".join(gather_parts(dump_parts(content)))


def dump_chunks(content: Any, before: bytes = b"", after: bytes = b"") -> list[bytes]:
    """The same between `before` and `after`, in chunks of about CHUNK_BYTES: a copy of a long text as a whole would
    block other threads, too.
    """
    return list(gather_parts(chain((before,), dump_parts(content), (after,))))


def gather_parts(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Join neighbouring `parts` to chunks of about CHUNK_BYTES."""
    gathered, size = list[bytes](), 0
    for part in parts:
        gathered.append(part)
        size += len(part)
        if size >= CHUNK_BYTES:
            yield b"".join(gathered)
            gathered, size = [], 0
    if size:
        yield b"".join(gathered)


def dump_parts(content: Any) -> Iterator[bytes]:
    """The JSON of `content` in small parts.

    An iterator or a lazy sequence is written as a list; each of its items is dropped once it is written.
    """
    match content:
        case Iterator():
            yield from dump_items(iter(lambda: list(islice(content, MAX_OBJECTS)), []))
        case LazySequence():
            items = iter(content)
            some = list(islice(items, 1))
            is_nested = any(is_long(each) or isinstance(each, LISTS) for each in some)
            yield from (dump_each if is_nested else dump_parts)(chain(some, items))
        case str() if len(content) > MAX_CHARACTERS:
            yield b'"'
            for start in range(0, len(content), MAX_CHARACTERS):
                yield dumps(content[start : start + MAX_CHARACTERS])[1:-1]
            yield b'"'
        case dict() if len(content) > MAX_NUMBERS or not is_flat(content):
            before = b"{"
            for key, value in content.items():
                yield before + dumps(key) + b":"
                yield from dump_parts(value)
                before = b","
            yield b"}"
        case np.ndarray() if content.ndim > 1 and content.size > MAX_NUMBERS:
            yield from dump_each(content)
        case np.ndarray(ndim=1) if content.size > MAX_NUMBERS:
            starts = range(0, content.size, MAX_NUMBERS)
            yield from dump_items(content[start : start + MAX_NUMBERS] for start in starts)
        case [first, *_] if isinstance(first, LISTS):
            yield from dump_each(content)
        case [dict() | str(), *_] if any(map(is_long, content)):
            yield from dump_each(content)
        case [first, *_]:
            size = MAX_OBJECTS if isinstance(first, dict) else MAX_TEXTS if isinstance(first, str) else MAX_NUMBERS
            yield from dump_items(split_in_slices(content, size))
        case _:
            yield dumps(content)


def dump_each(content: Iterable[Any]) -> Iterator[bytes]:
    """A list whose items are written one by one."""
    before = b"["
    for each in content:
        yield before
        yield from dump_parts(each)
        before = b","
    yield b"]" if before == b"," else b"[]"


def dump_items(slices: Iterable[Any]) -> Iterator[bytes]:
    """A list of the items of all `slices`, each of which is written in one call."""
    before = b"["
    for each in slices:
        yield before + dumps(each)[1:-1]
        before = b","
    yield b"]" if before == b"," else b"[]"


def json_weight(content: Any, most: int) -> int:
    """Approximate bytes of `content` as JSON.  Counting ends once there are more than `most`.

    Called for every event of a stream, so it compares types: `isinstance` takes ten times as long for a sequence.
    """
    kind = type(content)
    if kind is str:
        return len(content)
    size = NUMBER_BYTES
    if kind is dict:
        for key, value in content.items():
            size += len(key) + json_weight(value, most - size)
            if size > most:
                break
    elif kind is list or kind is tuple:
        for value in content:
            size += json_weight(value, most - size)
            if size > most:
                break
    elif kind is LazySequence:
        size += LAZY_ITEM_BYTES * len(content)
    return size


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
        case list() | tuple() | LazySequence():
            return len(content) > MAX_INLINE_ITEMS or any(map(is_long, content))
        case _:
            return False


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`.  If the client disconnects first, `work` is cancelled and ClientGone raised.

    The body must have been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(wait_disconnect(request.receive))
    error = None
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
        del task, error  # an error's traceback holds this frame: such a cycle keeps all that was read


async def wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def frame_event(content: Any) -> tuple[bytes, bytes]:  # noqa: ARG001
    """What stands before and after the JSON of a server-sent event.  JSON has no line breaks, so it is one line."""
    return b"data: ", b"\n\n"


def frame_named_event(content: Any) -> tuple[bytes, bytes]:
    """The same with a line `event:` that repeats its `type`, for clients that use it."""
    return f"event: {content['type']}\ndata: ".encode(), b"\n\n"


def frame_line(content: Any) -> tuple[bytes, bytes]:  # noqa: ARG001
    """The same of a JSON line."""
    return b"", b"\n"


def encode_item(content: Any, frame: Frame) -> bytes:
    """One event or line of a stream."""
    before, after = frame(content)
    return before + dumps(content) + after


@dataclass(frozen=True)
class StreamWriter:
    """How a dialect writes the items of a stream, and an `error` after the first of them.

    `threads` write items of more than INLINE_BYTES.  `last` is sent at the end.
    """

    threads: OwnerThreads
    error: Callable[[PolyheadError], Mapping[str, Any]]
    frame: Frame = frame_event
    last: bytes = b""

    async def encode(self, item: Any) -> Sequence[bytes]:
        """An item in parts.  A list of bytes was written before."""
        if isinstance(item, list):
            return item
        size = json_weight(item, INLINE_BYTES)
        if size <= INLINE_BYTES:
            return (encode_item(item, self.frame),)
        return await self.threads.run(size, partial(dump_chunks, item, *self.frame(item)))


async def encode_events(items: AsyncGenerator[Any, None], writer: StreamWriter) -> AsyncGenerator[bytes, None]:
    """Encode `items` as events or lines.

    An error after the first item is sent in the stream and ends it.  An error before that is raised, so that the
    response can still have its status.
    """
    has_begun = False
    async with aclosing(items):
        try:
            async for item in items:
                has_begun = True
                for part in await writer.encode(item):
                    yield part
        except PolyheadError as failure:
            if not has_begun:
                raise
            for part in await writer.encode(writer.error(failure)):
                yield part
            return
    yield writer.last


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
