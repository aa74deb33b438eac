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
from .request_body import make_body_reader
from .request_head import RequestHead

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
BODILESS_STATUSES = frozenset({204, 304})
LINE_BREAK = re.compile(rb"[\r\n\0]")
WRITE_BYTES = 1 << 16  # bytes of an answer that are handed to the transport before it is waited for
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
AsgiMessage = Any  # ASGI's


class ClientConnection(Protocol):
    """What an exchange asks of its connection."""

    closing: bool
    writable: asyncio.Event

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """That every answer has."""

    def write(self, data: bytes) -> None: ...

    def resume_body(self) -> None: ...

    def finish_answer(self, exchange: "RequestResponseCycle") -> None: ...


class RequestResponseCycle:
    """`receive` and `send` are the application's; `heard`, `fail` and `leave` the connection's."""

    def __init__(self, line: ClientConnection, head: RequestHead) -> None:
        self.connection, self.head = line, head
        self.reader = make_body_reader(head.length)
        self.body = bytearray()  # that came and was not received yet
        self.is_begun = self.is_over = self.is_client_gone = False  # the answer; the client
        self.awaits_continue = head.expects_continue  # nobody has said that the body is wanted
        self.closes_connection = False  # of this connection, as the answer said
        self._body_delivered = False  # the application has all of the body
        self._body_error: PolyheadError | None = None
        self._changed = asyncio.Event()
        self._response_head = b""
        self._chunked = False
        self._sending = asyncio.Lock()

    # the connection's

    def notify_body(self) -> None:
        """Something of the body came, or the last of it."""
        self._changed.set()

    def fail(self, error: PolyheadError) -> None:
        """No more of the body is read."""
        self._body_error = error
        self._changed.set()

    def disconnect(self) -> None:
        """The client has gone."""
        self.is_client_gone = True
        self._changed.set()

    # the application's

    async def receive(self) -> AsgiMessage:
        """Raises what the connection said of a body that is not read to its end."""
        while not self._can_receive():
            self._request_body()
            self._changed.clear()
            await self._changed.wait()
        if self.is_client_gone or self.is_over:
            return {"type": "http.disconnect"}
        if self._body_error is not None:
            raise self._body_error
        self._body_delivered = self.reader.complete
        body, self.body = self.body, bytearray()
        self.connection.resume_body()
        return {"type": "http.request", "body": bytes(body), "more_body": not self._body_delivered}

    def _can_receive(self) -> bool:
        ended = self.is_client_gone or self.is_over or self._body_error is not None
        return ended or bool(self.body) or (self.reader.complete and not self._body_delivered)

    def _request_body(self) -> None:
        if self.awaits_continue and not self.is_begun and not self.reader.complete:
            self.connection.write(CONTINUE)
        self.awaits_continue = False
        self.connection.resume_body()

    async def send(self, message: AsgiMessage) -> None:
        """Waits until the client has taken what was sent before, and at the end until it has taken all."""
        async with self._sending:
            if await self._wait_sent():
                await self._send(message)

    async def _wait_sent(self) -> bool:
        """Wait until everything that was written is sent.  Whether the client is still there."""
        await self.connection.writable.wait()
        return not self.is_client_gone

    async def _send(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            assert not self.is_begun, "an answer begins once"
            self._response_head = self._build_head(message["status"], message["headers"])
        else:
            assert self._response_head or self.is_begun, "an answer has a beginning"
            assert not self.is_over, "an answer has one end"
            await self._write(message.get("body", b""), message.get("more_body", False))

    def _build_head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """The answer's head: sent with the first of its body, in one piece."""
        named = {name.lower() for name, _ in headers}
        lines = [header_line(pair) for pair in (*self.connection.default_headers, *headers)]
        if b"content-length" not in named and status not in BODILESS_STATUSES:
            self._chunked = self.head.is_http11
            lines += [b"transfer-encoding: chunked\r\n"] if self._chunked else []
        self.closes_connection = (
            self.head.closes or self.connection.closing or not self.reader.complete or b"connection" in named
        )
        lines += [b"connection: close\r\n"] if self.closes_connection and b"connection" not in named else []
        return response_head(status, lines)

    async def _write(self, body: bytes, more: bool) -> None:
        """In pieces, so that a client that reads slowly fills no buffer with all of it."""
        before, self._response_head, after = [self._response_head], b"", []
        body = b"" if self.head.method == "HEAD" else body
        if body and self._chunked:
            before.append(b"%x\r\n" % len(body))
            after.append(b"\r\n")
        if not more and self._chunked and self.head.method != "HEAD":
            after.append(b"0\r\n\r\n")
        self.is_begun = True
        rest = memoryview(body)
        while len(rest) > WRITE_BYTES:
            self.connection.write(b"".join((*before, rest[:WRITE_BYTES])))
            before, rest = [], rest[WRITE_BYTES:]
            await asyncio.sleep(0)  # a client that reads fast does not hold up the others
            if not await self._wait_sent():
                return
        self.connection.write(b"".join((*before, rest, *after)))
        if not more and await self._wait_sent():
            self.is_over = True
            self._changed.set()
            self.connection.finish_answer(self)


def response_head(status: int, lines: Iterable[bytes]) -> bytes:
    """Status line, `lines`, which are fields with their ends, and the empty line."""
    return b"".join([STATUS_LINES.get(status, b"HTTP/1.1 %d \r\n" % status), *lines, b"\r\n"])


def header_line(pair: tuple[bytes, bytes]) -> bytes:
    assert not LINE_BREAK.search(pair[1]), "a field of an answer is one line"
    return b"%s: %s\r\n" % pair
