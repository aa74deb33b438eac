"""One request and its response, between a connection and the ASGI application.

A response that starts before the body is complete is the last one of its connection, and says so (`Connection: close`);
the rest of the body is discarded.
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
WRITE_BYTES = 1 << 16  # bytes that are written before waiting for the client
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# In a message with a part of the body: how many bytes of the memory for requests are claimed for its request.
CLAIMED_BYTES = "polyhead.claimed_bytes"
AsgiMessage = Any


class ClientConnection(Protocol):
    """What a request-response cycle needs of its connection."""

    closing: bool
    writable: asyncio.Event

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Header fields of every response."""

    def write(self, data: bytes) -> None: ...

    def resume_body(self) -> None: ...

    def count_unsent(self) -> None: ...

    def finish_answer(self, cycle: "RequestResponseCycle") -> None: ...


class RequestResponseCycle:
    """One request and its response.  Its head has `head_bytes` as it was sent.

    `receive` and `send` are called by the application; `notify_body`, `fail` and `disconnect` by the connection.
    """

    def __init__(self, connection: ClientConnection, head: RequestHead, head_bytes: int = 0) -> None:
        self.connection, self.head, self.head_bytes = connection, head, head_bytes
        self.unclaimed_bytes = 0  # unwritten bytes of the answer for which no memory is claimed
        self.reader = make_body_reader(head.length)
        self.body = bytearray()  # bytes that were read and not yet received by the application
        self.is_begun = self.is_over = self.is_client_gone = False
        self.awaits_continue = head.expects_continue  # the client waits for "100 Continue"
        self.closes_connection = False  # the response says that it is the last of the connection
        self._body_delivered = False  # the application has received the whole body
        self._body_error: PolyheadError | None = None
        self._changed = asyncio.Event()
        self._response_head = b""
        self._chunked = False
        self._sending = asyncio.Lock()

    # Called by the connection

    def notify_body(self) -> None:
        """More of the body came, or its end."""
        self._changed.set()

    def fail(self, error: PolyheadError) -> None:
        """Stop reading the body: `receive` raises `error`."""
        self._body_error = error
        self._changed.set()

    def disconnect(self) -> None:
        """The client has disconnected."""
        self.is_client_gone = True
        self._changed.set()

    # Called by the application

    async def receive(self) -> AsgiMessage:
        """ASGI `receive`.  Raises the error with which the connection stopped reading the body."""
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
        """ASGI `send`.  Waits until earlier data was sent, and at the end until everything was sent.

        A part of the body may state `CLAIMED_BYTES`, which are claimed for it.
        """
        async with self._sending:
            self.unclaimed_bytes = max(len(message.get("body", b"")) - message.get(CLAIMED_BYTES, 0), 0)
            if not self.connection.writable.is_set():
                self.connection.count_unsent()
            if await self._wait_sent():
                await self._send(message)

    async def _wait_sent(self) -> bool:
        """Wait until everything that was written is sent.  Returns whether the client is still connected."""
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
        """The head of the response, which is sent together with the first bytes of its body."""
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
        """Write the body in pieces, so that no buffer holds all of it while the client reads slowly."""
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
            self.unclaimed_bytes = min(self.unclaimed_bytes, len(rest))
            await asyncio.sleep(0)  # let others run while a client reads fast
            if not await self._wait_sent():
                return
        self.connection.write(b"".join((*before, rest, *after)))
        self.unclaimed_bytes = 0
        if not more and await self._wait_sent():
            self.is_over = True
            self._changed.set()
            self.connection.finish_answer(self)


def response_head(status: int, lines: Iterable[bytes]) -> bytes:
    """The status line, then `lines`, which are fields with their line ends, then the empty line."""
    return b"".join([STATUS_LINES.get(status, b"HTTP/1.1 %d \r\n" % status), *lines, b"\r\n"])


def header_line(pair: tuple[bytes, bytes]) -> bytes:
    assert not LINE_BREAK.search(pair[1]), "a field of an answer is one line"
    return b"%s: %s\r\n" % pair
