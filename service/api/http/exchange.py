"""One request and its answer, between a connection and the application (ASGI).

Knows no route and no timer.  The one idea: an answer whose beginning was sent while the body was still to come is the
last one of its connection, and says so; whatever else of the body comes is nobody's.
"""

import asyncio
import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, Protocol

from ...core.errors import PolyheadError
from .request_body import body_of
from .request_head import Head

STATUS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
BODILESS = frozenset({204, 304})
FORGED = re.compile(rb"[\r\n\0]")
PIECE = 1 << 16  # bytes of an answer that are handed to the transport before it is waited for
GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"
Message = Any  # ASGI's


class Line(Protocol):
    """What an exchange asks of its connection."""

    closing: bool
    writable: asyncio.Event

    @property
    def fields(self) -> list[tuple[bytes, bytes]]:
        """That every answer has."""

    def write(self, data: bytes) -> None: ...

    def read_on(self) -> None: ...

    def answered(self, exchange: "Exchange") -> None: ...


class Exchange:
    """`receive` and `send` are the application's; `heard`, `fail` and `leave` the connection's."""

    def __init__(self, line: Line, head: Head) -> None:
        self.line, self.head = line, head
        self.reader = body_of(head.length)
        self.body = bytearray()  # that came and was not received yet
        self.begun = self.over = self.gone = False  # the answer; the client
        self.expected = head.expects  # nobody has said that the body is wanted
        self.last = False  # of this connection, as the answer said
        self._told = False  # the application has all of the body
        self._wrong: PolyheadError | None = None
        self._news = asyncio.Event()
        self._start = b""
        self._chunked = False
        self._sending = asyncio.Lock()

    # the connection's

    def heard(self) -> None:
        """Something of the body came, or the last of it."""
        self._news.set()

    def fail(self, error: PolyheadError) -> None:
        """No more of the body is read."""
        self._wrong = error
        self._news.set()

    def leave(self) -> None:
        """The client has gone."""
        self.gone = True
        self._news.set()

    # the application's

    async def receive(self) -> Message:
        """Raises what the connection said of a body that is not read to its end."""
        while not self._ready():
            self._ask()
            self._news.clear()
            await self._news.wait()
        if self.gone or self.over:
            return {"type": "http.disconnect"}
        if self._wrong is not None:
            raise self._wrong
        self._told = self.reader.complete
        body, self.body = self.body, bytearray()
        self.line.read_on()
        return {"type": "http.request", "body": bytes(body), "more_body": not self._told}

    def _ready(self) -> bool:
        ended = self.gone or self.over or self._wrong is not None
        return ended or bool(self.body) or (self.reader.complete and not self._told)

    def _ask(self) -> None:
        if self.expected and not self.begun and not self.reader.complete:
            self.line.write(GO_ON)
        self.expected = False
        self.line.read_on()

    async def send(self, message: Message) -> None:
        """Waits until the client has taken what was sent before, and at the end until it has taken all."""
        async with self._sending:
            if await self._taken():
                await self._send(message)

    async def _taken(self) -> bool:
        """Wait until everything that was written is sent.  Whether the client is still there."""
        await self.line.writable.wait()
        return not self.gone

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            assert not self.begun, "an answer begins once"
            self._start = self._beginning(message["status"], message["headers"])
        else:
            assert self._start or self.begun, "an answer has a beginning"
            assert not self.over, "an answer has one end"
            await self._write(message.get("body", b""), message.get("more_body", False))

    def _beginning(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """The answer's head: sent with the first of its body, in one piece."""
        named = {name.lower() for name, _ in headers}
        lines = [field(pair) for pair in (*self.line.fields, *headers)]
        if b"content-length" not in named and status not in BODILESS:
            self._chunked = self.head.modern
            lines += [b"transfer-encoding: chunked\r\n"] if self._chunked else []
        self.last = self.head.closes or self.line.closing or not self.reader.complete or b"connection" in named
        lines += [b"connection: close\r\n"] if self.last and b"connection" not in named else []
        return start_of(status, lines)

    async def _write(self, body: bytes, more: bool) -> None:
        """In pieces, so that a client that reads slowly fills no buffer with all of it."""
        before, self._start, after = [self._start], b"", []
        body = b"" if self.head.method == "HEAD" else body
        if body and self._chunked:
            before.append(b"%x\r\n" % len(body))
            after.append(b"\r\n")
        if not more and self._chunked and self.head.method != "HEAD":
            after.append(b"0\r\n\r\n")
        self.begun = True
        rest = memoryview(body)
        while len(rest) > PIECE:
            self.line.write(b"".join((*before, rest[:PIECE])))
            before, rest = [], rest[PIECE:]
            await asyncio.sleep(0)  # a client that reads fast does not hold up the others
            if not await self._taken():
                return
        self.line.write(b"".join((*before, rest, *after)))
        if not more and await self._taken():
            self.over = True
            self._news.set()
            self.line.answered(self)


def start_of(status: int, lines: Iterable[bytes]) -> bytes:
    """Status line, `lines`, which are fields with their ends, and the empty line."""
    return b"".join([STATUS.get(status, b"HTTP/1.1 %d \r\n" % status), *lines, b"\r\n"])


def field(pair: tuple[bytes, bytes]) -> bytes:
    assert not FORGED.search(pair[1]), "a field of an answer is one line"
    return b"%s: %s\r\n" % pair
