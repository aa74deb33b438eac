"""A client's connection: what it may send and how long it may take, and for how long it takes what it is sent.

Knows no route.  The one idea: a client costs what it has asked for.  Until a head is whole there are a few kilobytes
and a timer for it, and of the clients that are silent or send a body the one that made progress longest ago makes room
when there are too many; what the kernel doesn't take stops whoever writes, at the first byte, and a client that takes
nothing of it for some time is cut off, so that a place in flight, cache blocks and a buffer are not held by somebody
who isn't there.
"""

import asyncio
import contextvars
import logging
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import orjson
import uvicorn
from uvicorn._types import HTTPScope
from uvicorn.server import ServerState

from ...core.errors import PolyheadError, Unavailable, Unreadable
from .connection_limits import Edge
from .exchange import Exchange, start_of
from .exchange import field as spelled
from .request_head import CRLF, IDS, Head, end_of, read_head

AHEAD = 1 << 16  # bytes that are kept for whoever hasn't asked for them; more stay with the client
LINGER = 2.0  # seconds for which the rest of what was refused is read, so that its sender sees the answer, no reset
SPILL = 16 << 20  # bytes of it, at most
PROGRESS = 1 << 16  # bytes, or all that is left: what a client must read of its answer in `write_seconds`

log = logging.getLogger("polyhead.http")


class Connection(asyncio.BufferedProtocol):
    """An end of the client's side ends the connection: nobody is computed for who may not be there."""

    transport: asyncio.Transport

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        edge: Edge,
    ) -> None:
        if not config.loaded:
            config.load()
        self.app, self.state, self.app_state, self.edge = config.loaded_app, server_state, app_state, edge
        self.loop = _loop or asyncio.get_running_loop()
        self.writable = asyncio.Event()
        self.writable.set()
        self.buffer = bytearray()
        self.searched = 0  # bytes of it in which there is no end of a head
        self.exchange: Exchange | None = None
        self.closing = self.lingering = self.idle = False
        self.spill = SPILL
        self.unread = 0  # bytes that the client hadn't taken when last looked at
        self.patience: asyncio.TimerHandle | None = None
        self.timer: asyncio.TimerHandle | None = None

    # asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # Writing pauses as soon as a byte waits: plain transports compare with >, those of TLS with >=.
        self.transport.set_write_buffer_limits(1 if self.scheme == "https" else 0, 0)
        room = self.edge.make_room(self.state.connections)
        self.state.connections.add(cast(Any, self))
        self.edge.silent[self] = time.monotonic()
        self.expect(self.edge.header_seconds, self.too_late)
        if not room:
            self.refuse(Unreadable(503, f"{self.edge.most} connections are open, and all of them busy"))

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self.edge.inbox

    def buffer_updated(self, count: int) -> None:
        if self.lingering:
            self.spill -= count
            if self.spill < 0:
                self.transport.abort()
            return
        self.buffer += self.edge.inbox[:count]
        self.advance()

    def take(self, data: bytes) -> None:
        """What came before this was the transport's protocol."""
        self.buffer += data
        self.advance()

    def eof_received(self) -> None:
        """The transport closes itself."""

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.state.connections.discard(cast(Any, self))
        self.forget()
        self.edge.turns.leave(self)
        self.rest()
        self.expect_nothing()
        self.writable.set()
        if self.exchange is not None:
            self.exchange.leave()

    def pause_writing(self) -> None:
        self.writable.clear()
        self.edge.blocked(self)
        self.wait()

    def resume_writing(self) -> None:
        self.edge.writing.pop(self, None)
        self.rest()
        self.writable.set()
        if self.lingering:
            self.loop.call_soon(self.end_output)

    # what comes in

    def advance(self) -> None:
        """As far as what has come allows."""
        try:
            while not (self.lingering or self.transport.is_closing()) and self.step():
                pass
        except Unreadable as error:
            if self.exchange is not None:
                self.buffer.clear()
                self.exchange.fail(error)
            else:
                self.refuse(error)

    def step(self) -> bool:
        """Whether something was understood.  Raises Unreadable."""
        if self in self.edge.turns:
            self.hold_back(len(self.buffer))
            return False
        if self.exchange is None:
            return self.begin()
        if self.exchange.reader.complete or not self.buffer:
            self.hold_back(len(self.buffer))
            return False
        self.exchange.reader.take(self.buffer, self.exchange.body)
        self.exchange.heard()
        if self.exchange.reader.busy:
            self.transport.pause_reading()
            self.loop.call_soon(self.resume)
            return False
        self.hold_back(len(self.exchange.body))
        return self.exchange.reader.complete

    def begin(self) -> bool:
        """The next request, if its head is here."""
        while self.buffer.startswith(CRLF):  # some clients end a body with a line of its own
            del self.buffer[: len(CRLF)]
        if not self.buffer or self.buffer == b"\r":  # the LF may come in the next segment
            return False
        end = end_of(self.buffer, self.searched)
        self.searched = 0 if end else len(self.buffer)
        if not end:
            self.hurry()
            self.edge.heads.keep(self, len(self.buffer))
            return False
        self.edge.heads.end(self)
        self.expect_nothing()
        self.edge.silent.pop(self, None)
        if not self.edge.turns.enter(self):
            self.hold_back(len(self.buffer))
            return False
        head = read_head(bytes(self.buffer[:end]))
        del self.buffer[:end]
        self.exchange = Exchange(self, head)
        task = self.loop.create_task(self.answer(self.exchange), context=contextvars.Context())
        self.state.tasks.add(task)
        task.add_done_callback(partial(self.done, self.exchange))
        return True

    def resume(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self.advance()

    def read_on(self) -> None:
        """The application wants more of the body, or of it there is less to keep."""
        if self.exchange is not None and not self.exchange.reader.busy:
            self.transport.resume_reading()

    def hold_back(self, kept: int) -> None:
        if kept > AHEAD:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    # what goes out

    async def answer(self, exchange: Exchange) -> None:
        await self.app(cast(HTTPScope, self.scope(exchange.head)), exchange.receive, exchange.send)

    def scope(self, head: Head) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "server": self.transport.get_extra_info("sockname")[:2],
            "client": self.transport.get_extra_info("peername")[:2],
            "scheme": self.scheme,
            "method": head.method,
            "root_path": "",
            "path": head.path,
            "raw_path": head.raw_path,
            "query_string": head.query,
            "headers": head.fields,
            "state": self.app_state.copy(),
        }

    @property
    def scheme(self) -> str:
        return "https" if self.transport.get_extra_info("sslcontext") else "http"

    @property
    def fields(self) -> list[tuple[bytes, bytes]]:
        return self.state.default_headers  # the date

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def answered(self, exchange: Exchange) -> None:
        """All of an answer was written."""
        self.state.total_requests += 1
        if self.transport.is_closing():
            return
        if not exchange.reader.complete:
            self.linger()
        elif exchange.last or self.closing:
            self.transport.close()
        else:
            self.exchange, self.idle = None, True
            self.edge.silent[self] = time.monotonic()
            self.expect(self.edge.keep_alive_seconds, self.transport.close)
            self.loop.call_soon(self.resume)  # what came meanwhile

    def done(self, exchange: Exchange, task: asyncio.Task[None]) -> None:
        """The application has returned, or failed."""
        self.state.tasks.discard(task)
        cut = task.cancelled()
        error = None if cut else task.exception()
        if error is not None:
            log.error("a mistake of ours", exc_info=error)
        if exchange.over or exchange.gone:
            return
        if exchange.begun:
            self.transport.abort()
        elif cut:
            self.refuse(Unavailable("the server is shutting down", retry_after=1))
        else:
            self.refuse(PolyheadError("the server made a mistake; its log says more"))

    def refuse(self, error: PolyheadError) -> None:
        """Answer what the application never sees, and let nothing more in."""
        id, body = uuid.uuid4().hex, orjson.dumps(self.edge.words(error))
        fields = [
            *self.fields,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *((name.lower().encode(), id.encode()) for name in IDS),
        ]
        self.edge.refused(error.status)
        told = {"request_id": id, "status": error.status, "client": self.address}
        log.info("%d %s: %s [%s]", error.status, self.address, error.message, id, extra=told)
        self.write(start_of(error.status, map(spelled, fields)) + body)
        self.linger()

    # how it ends

    def expect(self, seconds: float, otherwise: Callable[[], None]) -> None:
        self.expect_nothing()
        self.timer = self.loop.call_later(seconds, otherwise)

    def expect_nothing(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def hurry(self) -> None:
        """The head has begun: it has its own time, which goes on if it had begun before."""
        if self.idle:
            self.idle = False
            self.expect(self.edge.header_seconds, self.too_late)

    def too_late(self) -> None:
        if self.buffer:
            message = f"the header was not complete within {self.edge.header_seconds:g} s"
            self.refuse(Unreadable(408, message))
        else:
            self.transport.close()

    def linger(self) -> None:
        """Nothing more is said; what the client still sends is thrown away, so that it comes to read the answer."""
        if self.transport.is_closing():
            return
        self.lingering = True
        self.buffer.clear()
        self.edge.heads.end(self)
        self.edge.silent.pop(self, None)
        self.edge.lingering[self] = None
        self.transport.resume_reading()
        self.expect(LINGER, self.transport.close)
        if self.writable.is_set():
            self.end_output()

    def end_output(self) -> None:
        """Shut down the writing side, once everything is sent.  A client that has reset the connection is gone.

        A TLS connection has no such half: its timer closes it.
        """
        try:
            if self.transport.can_write_eof():
                self.transport.write_eof()
        except OSError:
            self.transport.abort()

    def drop(self) -> None:
        """Somebody else needs the room."""
        if self in self.edge.writing:
            self.edge.cut()
        self.forget()
        self.state.connections.discard(cast(Any, self))
        self.transport.abort()

    def forget(self) -> None:
        """It is not among those any more that may make room."""
        self.edge.heads.end(self)
        self.edge.silent.pop(self, None)
        self.edge.writing.pop(self, None)
        self.edge.lingering.pop(self, None)

    def part(self) -> None:
        """Asked by a server that leaves: the next answer is the last, and who asks for nothing may ask elsewhere."""
        self.closing = True
        if self.idle and self.exchange is None and not self.buffer:
            self.transport.close()

    def shutdown(self) -> None:
        """Asked by the server: the answer under way is the last, and a body that is not whole is waited for no more."""
        self.closing = True
        if self.exchange is None or self.lingering:
            self.transport.close()
        elif not self.exchange.reader.complete:
            self.exchange.fail(Unavailable("the server is shutting down", retry_after=1))

    # for as long as it takes what it is sent

    def wait(self) -> None:
        self.unread = self.transport.get_write_buffer_size()
        self.patience = self.loop.call_later(self.edge.write_seconds, self.look)

    def rest(self) -> None:
        if self.patience is not None:
            self.patience.cancel()

    def look(self) -> None:
        """Cut off a client that has taken less than `PROGRESS` bytes since, and less than all of what was left.  A few
        bytes now and then keep no connection open."""
        if self.transport.get_write_buffer_size() <= self.unread - PROGRESS:
            self.edge.blocked(self)
            self.wait()
            return
        seconds = self.edge.write_seconds
        log.warning("a client took too little of its answer in %g s, it is cut off: %s", seconds, self.address)
        self.edge.cut()
        self.transport.abort()

    @property
    def address(self) -> str:
        host, port, *_ = self.transport.get_extra_info("peername") or ("unknown", 0)
        return f"{host}:{port}"
