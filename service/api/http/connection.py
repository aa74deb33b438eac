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

from ...core.errors import PolyheadError, Unavailable, UnreadableRequest
from .connection_limits import ConnectionLimits
from .request_cycle import RequestResponseCycle, response_head
from .request_cycle import header_line as spelled
from .request_head import CRLF, REQUEST_ID_HEADERS, RequestHead, find_head_end, read_head

READ_AHEAD = 1 << 16  # bytes that are kept for whoever hasn't asked for them; more stay with the client
LINGER_SECONDS = (
    2.0  # seconds for which the rest of what was refused is read, so that its sender sees the answer, no reset
)
MAX_DISCARDED = 16 << 20  # bytes of it, at most
MIN_PROGRESS = 1 << 16  # bytes, or all that is left: what a client must read of its answer in `write_seconds`

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
        edge: ConnectionLimits,
    ) -> None:
        if not config.loaded:
            config.load()
        self.app, self.state, self.app_state, self.limits = config.loaded_app, server_state, app_state, edge
        self.loop = _loop or asyncio.get_running_loop()
        self.writable = asyncio.Event()
        self.writable.set()
        self.buffer = bytearray()
        self.searched_bytes = 0  # bytes of it in which there is no end of a head
        self.cycle: RequestResponseCycle | None = None
        self.closing = self.lingering = self.idle = False
        self.discard_left = MAX_DISCARDED
        self.unsent_bytes = 0  # bytes that the client hadn't taken when last looked at
        self.write_timer: asyncio.TimerHandle | None = None
        self.read_timer: asyncio.TimerHandle | None = None

    # asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # Writing pauses as soon as a byte waits: plain transports compare with >, those of TLS with >=.
        self.transport.set_write_buffer_limits(1 if self.scheme == "https" else 0, 0)
        room = self.limits.make_room(self.state.connections)
        self.state.connections.add(cast(Any, self))
        self.limits.silent_since[self] = time.monotonic()
        self.start_read_timer(self.limits.header_seconds, self.end_silent)
        if not room:
            self.send_error(
                UnreadableRequest(503, f"{self.limits.max_connections} connections are open, and all of them busy")
            )

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self.limits.read_buffer

    def buffer_updated(self, count: int) -> None:
        if self.lingering:
            self.discard_left -= count
            if self.discard_left < 0:
                self.transport.abort()
            return
        self.buffer += self.limits.read_buffer[:count]
        self.process_buffer()

    def take(self, data: bytes) -> None:
        """What came before this was the transport's protocol."""
        self.buffer += data
        self.process_buffer()

    def eof_received(self) -> None:
        """The transport closes itself."""

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.state.connections.discard(cast(Any, self))
        self.leave_queues()
        self.limits.start_queue.remove(self)
        self.stop_write_timer()
        self.stop_read_timer()
        self.writable.set()
        if self.cycle is not None:
            self.cycle.disconnect()

    def pause_writing(self) -> None:
        self.writable.clear()
        self.limits.mark_blocked(self)
        self.start_write_timer()

    def resume_writing(self) -> None:
        self.limits.blocked_since.pop(self, None)
        self.stop_write_timer()
        self.writable.set()
        if self.lingering:
            self.loop.call_soon(self.end_output)

    # what comes in

    def process_buffer(self) -> None:
        """As far as what has come allows."""
        try:
            while not (self.lingering or self.transport.is_closing()) and self.process_next():
                pass
        except UnreadableRequest as error:
            if self.cycle is not None:
                self.buffer.clear()
                self.cycle.fail(error)
            else:
                self.send_error(error)

    def process_next(self) -> bool:
        """Whether something was understood.  Raises Unreadable."""
        if self in self.limits.start_queue:
            self.pause_if_full(len(self.buffer))
            return False
        if self.cycle is None:
            return self.begin_request()
        if self.cycle.reader.complete or not self.buffer:
            self.pause_if_full(len(self.buffer))
            return False
        self.cycle.reader.consume(self.buffer, self.cycle.body)
        self.cycle.notify_body()
        if self.cycle.reader.is_paused:
            self.transport.pause_reading()
            self.loop.call_soon(self.continue_reading)
            return False
        self.pause_if_full(len(self.cycle.body))
        return self.cycle.reader.complete

    def begin_request(self) -> bool:
        """The next request, if its head is here."""
        while self.buffer.startswith(CRLF):  # some clients end a body with a line of its own
            del self.buffer[: len(CRLF)]
        if not self.buffer or self.buffer == b"\r":  # the LF may come in the next segment
            return False
        end = find_head_end(self.buffer, self.searched_bytes)
        self.searched_bytes = 0 if end else len(self.buffer)
        if not end:
            self.limit_header_time()
            self.limits.heads.keep(self, len(self.buffer))
            return False
        self.limits.heads.end(self)
        self.stop_read_timer()
        self.limits.silent_since.pop(self, None)
        if not self.limits.start_queue.try_start(self):
            self.pause_if_full(len(self.buffer))
            return False
        head = read_head(bytes(self.buffer[:end]))
        del self.buffer[:end]
        self.cycle = RequestResponseCycle(self, head)
        task = self.loop.create_task(self.run_app(self.cycle), context=contextvars.Context())
        self.state.tasks.add(task)
        task.add_done_callback(partial(self.finish_task, self.cycle))
        return True

    def continue_reading(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self.process_buffer()

    def resume_body(self) -> None:
        """The application wants more of the body, or of it there is less to keep."""
        if self.cycle is not None and not self.cycle.reader.is_paused:
            self.transport.resume_reading()

    def pause_if_full(self, kept: int) -> None:
        if kept > READ_AHEAD:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    # what goes out

    async def run_app(self, exchange: RequestResponseCycle) -> None:
        await self.app(cast(HTTPScope, self.build_scope(exchange.head)), exchange.receive, exchange.send)

    def build_scope(self, head: RequestHead) -> dict[str, Any]:
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
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return self.state.default_headers  # the date

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def finish_answer(self, exchange: RequestResponseCycle) -> None:
        """All of an answer was written."""
        self.state.total_requests += 1
        if self.transport.is_closing():
            return
        if not exchange.reader.complete:
            self.start_linger()
        elif exchange.closes_connection or self.closing:
            self.transport.close()
        else:
            self.cycle, self.idle = None, True
            self.limits.silent_since[self] = time.monotonic()
            self.start_read_timer(self.limits.keep_alive_seconds, self.transport.close)
            self.loop.call_soon(self.continue_reading)  # what came meanwhile

    def finish_task(self, exchange: RequestResponseCycle, task: asyncio.Task[None]) -> None:
        """The application has returned, or failed."""
        self.state.tasks.discard(task)
        cut = task.cancelled()
        error = None if cut else task.exception()
        if error is not None:
            log.error("a mistake of ours", exc_info=error)
        if exchange.is_over or exchange.is_client_gone:
            return
        if exchange.is_begun:
            self.transport.abort()
        elif cut:
            self.send_error(Unavailable("the server is shutting down", retry_after=1))
        else:
            self.send_error(PolyheadError("the server made a mistake; its log says more"))

    def send_error(self, error: PolyheadError) -> None:
        """Answer what the application never sees, and let nothing more in."""
        id, body = uuid.uuid4().hex, orjson.dumps(self.limits.write_error(error))
        fields = [
            *self.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *((name.lower().encode(), id.encode()) for name in REQUEST_ID_HEADERS),
        ]
        self.limits.count_refused(error.status)
        told = {"request_id": id, "status": error.status, "client": self.address}
        log.info("%d %s: %s [%s]", error.status, self.address, error.message, id, extra=told)
        self.write(response_head(error.status, map(spelled, fields)) + body)
        self.start_linger()

    # how it ends

    def start_read_timer(self, seconds: float, otherwise: Callable[[], None]) -> None:
        self.stop_read_timer()
        self.read_timer = self.loop.call_later(seconds, otherwise)

    def stop_read_timer(self) -> None:
        if self.read_timer is not None:
            self.read_timer.cancel()
            self.read_timer = None

    def limit_header_time(self) -> None:
        """The head has begun: it has its own time, which goes on if it had begun before."""
        if self.idle:
            self.idle = False
            self.start_read_timer(self.limits.header_seconds, self.end_silent)

    def end_silent(self) -> None:
        if self.buffer:
            message = f"the header was not complete within {self.limits.header_seconds:g} s"
            self.send_error(UnreadableRequest(408, message))
        else:
            self.transport.close()

    def start_linger(self) -> None:
        """Nothing more is said; what the client still sends is thrown away, so that it comes to read the answer."""
        if self.transport.is_closing():
            return
        self.lingering = True
        self.buffer.clear()
        self.limits.heads.end(self)
        self.limits.silent_since.pop(self, None)
        self.limits.lingering[self] = None
        self.transport.resume_reading()
        self.start_read_timer(LINGER_SECONDS, self.transport.close)
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
        if self in self.limits.blocked_since:
            self.limits.count_cut_off()
        self.leave_queues()
        self.state.connections.discard(cast(Any, self))
        self.transport.abort()

    def leave_queues(self) -> None:
        """It is not among those any more that may make room."""
        self.limits.heads.end(self)
        self.limits.silent_since.pop(self, None)
        self.limits.blocked_since.pop(self, None)
        self.limits.lingering.pop(self, None)

    def stop_keep_alive(self) -> None:
        """Asked by a server that leaves: the next answer is the last, and who asks for nothing may ask elsewhere."""
        self.closing = True
        if self.idle and self.cycle is None and not self.buffer:
            self.transport.close()

    def shutdown(self) -> None:
        """Asked by the server: the answer under way is the last, and a body that is not whole is waited for no more."""
        self.closing = True
        if self.cycle is None or self.lingering:
            self.transport.close()
        elif not self.cycle.reader.complete:
            self.cycle.fail(Unavailable("the server is shutting down", retry_after=1))

    # for as long as it takes what it is sent

    def start_write_timer(self) -> None:
        self.unsent_bytes = self.transport.get_write_buffer_size()
        self.write_timer = self.loop.call_later(self.limits.write_seconds, self.check_write_progress)

    def stop_write_timer(self) -> None:
        if self.write_timer is not None:
            self.write_timer.cancel()

    def check_write_progress(self) -> None:
        """Cut off a client that has taken less than `PROGRESS` bytes since, and less than all of what was left.  A few
        bytes now and then keep no connection open."""
        if self.transport.get_write_buffer_size() <= self.unsent_bytes - MIN_PROGRESS:
            self.limits.mark_blocked(self)
            self.start_write_timer()
            return
        seconds = self.limits.write_seconds
        log.warning("a client took too little of its answer in %g s, it is cut off: %s", seconds, self.address)
        self.limits.count_cut_off()
        self.transport.abort()

    @property
    def address(self) -> str:
        host, port, *_ = self.transport.get_extra_info("peername") or ("unknown", 0)
        return f"{host}:{port}"
