"""One HTTP/1.1 connection: reads requests, runs the application, and limits what a client may cost.

Until a request head is complete, a connection costs a few kilobytes and a timer.  If there are too many connections,
the client that has made no progress for the longest time is closed, among those that are silent, send a body, or do not
read their answer.  Writing stops as soon as the kernel's send buffer is full, and a client that reads nothing for some
time is disconnected, so that a permit, cache blocks and buffers are not held for a client that is gone.  What such
clients hold together is bounded, too: unsent bytes, their requests, and what the kernel buffers for them.
"""

import asyncio
import contextlib
import contextvars
import logging
import socket
import struct
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
from .connection_limits import SHORT_READ_BYTES, ConnectionLimits
from .request_cycle import RequestResponseCycle, header_line, response_head
from .request_head import CRLF, REQUEST_ID_HEADERS, RequestHead, find_head_end, read_head

# Bytes that are buffered; more are left to the client.
READ_AHEAD = 1 << 16  # of a body, before the application reads them
PIPELINE_AHEAD = 4 << 10  # behind a request that is not answered, or has not started
# The rest of a rejected request is discarded for so long, so that the client reads the answer and sees no reset.
LINGER_SECONDS = 2.0
MAX_DISCARDED = 16 << 20  # bytes that are discarded at most
MAX_EMPTY_LINES = 2  # before a request: some clients send one after a body
MIN_PROGRESS = 1 << 16  # bytes that a client must read of its answer in `write_seconds`, unless less is left
# Bytes of a request whose answer is not read, beside its head and the unsent bytes: 32 KiB that the kernel has of the
# answer (`service.server.process.UNSENT_LOW_WATER`), and 16 of the application's objects.
BLOCKED_BYTES = 48 << 10
CLOSE_BY_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what the kernel has for the client is discarded

log = logging.getLogger("polyhead.http")


class Connection(asyncio.BufferedProtocol):
    """The asyncio protocol of one connection.

    If the client closes its side, the connection ends: nothing is computed for a client that may be gone.
    """

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
        self.empty_lines = 0  # that came before the next request
        self.searched_bytes = 0  # bytes of the buffer that contain no end of a head
        self.cycle: RequestResponseCycle | None = None
        self.closing = self.lingering = self.idle = False
        self.discard_left = MAX_DISCARDED
        self.unsent_bytes = 0  # bytes in the write buffer at the last check
        self.unread_bytes = 0  # the same at the last call of `has_read`
        self.write_timer: asyncio.TimerHandle | None = None
        self.read_timer: asyncio.TimerHandle | None = None

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # Read now: a TLS transport has no addresses once its socket is lost.
        self.client = (transport.get_extra_info("peername") or ("unknown", 0))[:2]
        self.server = (transport.get_extra_info("sockname") or ("unknown", 0))[:2]
        self.scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        # First of all, so that the connection is counted and has its timer whatever follows.
        self.state.connections.add(cast(Any, self))
        self.start_read_timer(self.limits.header_seconds, self.end_silent)
        # Writing pauses as soon as a byte waits: plain transports compare with >, those of TLS with >=.
        self.transport.set_write_buffer_limits(1 if self.scheme == "https" else 0, 0)
        room = self.limits.make_room(self.state.connections)
        self.limits.silent_since[self] = time.monotonic()
        if not room:
            self.send_error(
                UnreadableRequest(503, f"{self.limits.max_connections} connections are open, and all of them busy")
            )

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Where the next bytes are read to: many at a time only of a body.

        What comes behind a request waits until it is answered.  A read of TLS is a few records, which are short.
        """
        is_short = self.scheme == "http" and not self.expects_body
        return self.limits.read_buffer[:SHORT_READ_BYTES] if is_short else self.limits.read_buffer

    def buffer_updated(self, count: int) -> None:
        if self.is_discarding:
            self.discard_left -= count
            if self.discard_left < 0:
                self.transport.abort()
            return
        self.buffer += self.limits.read_buffer[:count]
        self.process_buffer()

    @property
    def is_discarding(self) -> bool:
        """Whether further input is discarded: after a fault in the body nothing can be read as a request."""
        return self.lingering or (self.cycle is not None and self.cycle.reader.is_broken)

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
        self.unread_bytes = self.transport.get_write_buffer_size()
        self.start_write_timer()
        self.loop.call_soon(self.limit_input)  # not inside of a write: it may close this connection

    def resume_writing(self) -> None:
        self.limits.blocked_since.pop(self, None)
        self.limits.unsent_answers.remove(self)  # now: it may be blocked again before its input is limited
        self.stop_write_timer()
        self.writable.set()
        self.loop.call_soon(self.limit_input)
        if self.lingering:
            self.loop.call_soon(self.end_output)

    # Input

    def process_buffer(self) -> None:
        """Process the bytes that were received, as far as they go."""
        try:
            while not (self.lingering or self.transport.is_closing()) and self.process_next():
                pass
        except UnreadableRequest as error:
            if self.cycle is not None:
                self.cycle.fail(error)
            else:
                self.send_error(error)
        self.limit_input()

    def process_next(self) -> bool:
        """Process the next part of the buffer.  Returns whether there may be more to do.  Raises UnreadableRequest."""
        if self in self.limits.start_queue:
            return False
        if self.cycle is None:
            return self.begin_request()
        if self.cycle.reader.complete or not self.buffer:
            return False
        self.cycle.reader.consume(self.buffer, self.cycle.body)
        self.cycle.notify_body()
        if self.cycle.reader.is_paused:
            self.loop.call_soon(self.continue_reading)
            return False
        return self.cycle.reader.complete

    def begin_request(self) -> bool:
        """Start the next request if its head is complete.  Returns whether it was started."""
        while self.buffer.startswith(CRLF):
            self.empty_lines += 1
            if self.empty_lines > MAX_EMPTY_LINES:
                raise UnreadableRequest(400, f"more than {MAX_EMPTY_LINES} empty lines come before the request")
            del self.buffer[: len(CRLF)]
        if not self.buffer or self.buffer == b"\r":  # the LF may come in the next segment
            return False
        end = find_head_end(self.buffer, self.searched_bytes)
        self.searched_bytes = 0 if end else len(self.buffer)
        if not end:
            self.limit_header_time()
            return False
        self.limits.buffered_input.remove(self)
        self.stop_read_timer()
        self.limits.silent_since.pop(self, None)
        if not self.limits.start_queue.try_start(self, end):
            return False
        head = read_head(bytes(self.buffer[:end]))
        del self.buffer[:end]
        self.empty_lines = 0
        self.cycle = RequestResponseCycle(self, head, end)
        task = self.loop.create_task(self.run_app(self.cycle), context=contextvars.Context())
        self.state.tasks.add(task)
        task.add_done_callback(partial(self.finish_task, self.cycle))
        return True

    def continue_reading(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self.process_buffer()

    def resume_body(self) -> None:
        """Read more of the body: the application waits for it, or the buffer has room again."""
        if self.cycle is not None:
            self.limit_input()

    @property
    def expects_body(self) -> bool:
        """Whether the request under way has more of a body to come."""
        return self.cycle is not None and not self.cycle.reader.complete

    def limit_input(self) -> None:
        """Count the bytes that are kept, and read no more if there are many.

        The parts of a body are not counted here while the application receives them, nor what waits for a few turns of
        the event loop until a request starts.
        """
        if self.transport.is_closing():
            return
        self.limit_reading()
        self.count_unsent()

    def limit_reading(self) -> None:
        if self.is_discarding:
            self.transport.resume_reading()
            return
        if self.cycle is not None and self.cycle.reader.is_paused:
            self.transport.pause_reading()
            return
        is_blocked, waits_to_start = not self.writable.is_set(), self in self.limits.start_queue
        is_received = self.expects_body and not is_blocked
        kept, most = len(self.buffer), READ_AHEAD if is_received else PIPELINE_AHEAD
        if self.cycle is not None and (is_blocked or is_received):
            kept += len(self.cycle.body)
        self.limits.buffered_input.set_size(self, 0 if is_received or waits_to_start else kept)
        if kept > most and (self.cycle is not None or waits_to_start):  # an incomplete head has limits of its own
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    # Output

    def count_unsent(self) -> None:
        """Count what is held for a client that does not read its answer.  May close this connection.

        Not counted is what the application has claimed of the memory for requests.
        """
        size = 0
        if not self.writable.is_set():
            size = BLOCKED_BYTES + self.transport.get_write_buffer_size()
            size += 0 if self.cycle is None else self.cycle.head_bytes + self.cycle.unclaimed_bytes
            size += 0 if self.transport.is_reading() else self.receive_buffer_bytes
        self.limits.unsent_answers.set_size(self, size)

    @property
    def receive_buffer_bytes(self) -> int:
        """Bytes that the kernel may receive while nothing is read."""
        open_socket = self.transport.get_extra_info("socket")
        return 0 if open_socket is None else open_socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    def has_read(self) -> bool:
        """Whether the client has read some of its answer since the last call."""
        before, self.unread_bytes = self.unread_bytes, self.transport.get_write_buffer_size()
        return self.unread_bytes < before

    async def run_app(self, cycle: RequestResponseCycle) -> None:
        await self.app(cast(HTTPScope, self.build_scope(cycle.head)), cycle.receive, cycle.send)

    def build_scope(self, head: RequestHead) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "server": self.server,
            "client": self.client,
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
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return self.state.default_headers  # the date

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def finish_answer(self, cycle: RequestResponseCycle) -> None:
        """The response is written completely: keep the connection, close it, or linger."""
        self.state.total_requests += 1
        if self.transport.is_closing():
            return
        if not cycle.reader.complete:
            self.start_linger()
        elif cycle.closes_connection or self.closing:
            self.close()
        else:
            self.cycle, self.idle = None, True
            self.limits.silent_since[self] = time.monotonic()
            self.start_read_timer(self.limits.keep_alive_seconds, self.close)
            self.loop.call_soon(self.continue_reading)  # process what came meanwhile

    def finish_task(self, cycle: RequestResponseCycle, task: asyncio.Task[None]) -> None:
        """The application's task has ended; answer the request if the application did not."""
        self.state.tasks.discard(task)
        is_cancelled = task.cancelled()
        error = None if is_cancelled else task.exception()
        if error is not None:
            log.error("bug in the application", exc_info=error)
        if cycle.is_client_gone:
            self.cycle = None  # so that both are freed now: garbage is collected seldom
        if cycle.is_over or cycle.is_client_gone:
            return
        if cycle.is_begun:
            self.transport.abort()
        elif is_cancelled:
            self.send_error(Unavailable("the server is shutting down", retry_after=1))
        else:
            self.send_error(PolyheadError("the server made a mistake; its log says more"))

    def send_error(self, error: PolyheadError) -> None:
        """Send an error that the application never sees, and read nothing more."""
        self.start_read_timer(LINGER_SECONDS, self.close)  # first, so that the connection ends whatever follows
        id, body = uuid.uuid4().hex, orjson.dumps(self.limits.write_error(error))
        fields = [
            *self.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *((name.lower().encode(), id.encode()) for name in REQUEST_ID_HEADERS),
        ]
        self.limits.count_refused(error.status)
        log_fields = {"request_id": id, "status": error.status, "client": self.address}
        log.info("%d %s: %s [%s]", error.status, self.address, error.message, id, extra=log_fields)
        self.write(response_head(error.status, map(header_line, fields)) + body)
        self.start_linger()

    # The end of a connection

    def start_read_timer(self, seconds: float, otherwise: Callable[[], None]) -> None:
        self.stop_read_timer()
        self.read_timer = self.loop.call_later(seconds, otherwise)

    def stop_read_timer(self) -> None:
        if self.read_timer is not None:
            self.read_timer.cancel()
            self.read_timer = None

    def limit_header_time(self) -> None:
        """The head has begun: start its own timer, unless the timer runs already."""
        if self.idle:
            self.idle = False
            self.start_read_timer(self.limits.header_seconds, self.end_silent)

    def end_silent(self) -> None:
        if self.buffer:
            message = f"the header was not complete within {self.limits.header_seconds:g} s"
            self.send_error(UnreadableRequest(408, message))
        else:
            self.close()

    def close(self) -> None:
        """Close once everything is sent.

        A TLS client has LINGER_SECONDS to answer the closing message, unless another connection needs the room.
        """
        if self.transport.is_closing():
            return
        self.stop_read_timer()
        if self.scheme == "https":
            self.leave_queues()
            self.limits.lingering[self] = None
            self.start_read_timer(LINGER_SECONDS, self.abort_if_sent)
        self.transport.close()

    def abort_if_sent(self) -> None:
        """Abort a TLS connection that is closing; while bytes are unsent, `check_write_progress` limits the wait."""
        if self.writable.is_set():
            self.transport.abort()
        else:
            self.start_read_timer(LINGER_SECONDS, self.abort_if_sent)

    def start_linger(self) -> None:
        """Discard what the client still sends for a while, so that the client reads the answer and sees no reset."""
        if self.transport.is_closing():
            return
        self.lingering = True
        self.buffer.clear()
        self.limits.buffered_input.remove(self)
        self.limits.silent_since.pop(self, None)
        self.limits.lingering[self] = None
        self.transport.resume_reading()
        self.start_read_timer(LINGER_SECONDS, self.close)
        if self.writable.is_set():
            self.end_output()

    def end_output(self) -> None:
        """Shut down the writing side, once everything is sent.  If the client has reset the connection, abort.

        A TLS connection cannot be half closed: its timer closes it.
        """
        try:
            if self.transport.can_write_eof():
                self.transport.write_eof()
        except OSError:
            self.transport.abort()

    def drop(self) -> None:
        """Close at once: another connection needs the room."""
        if self in self.limits.blocked_since:
            self.limits.count_cut_off()
        self.leave_queues()
        self.state.connections.discard(cast(Any, self))
        self.abort()

    def abort(self) -> None:
        """Close at once.  If the client does not read its answer, what the kernel has for it is discarded, which it
        would otherwise keep for minutes after the connection has ended.
        """
        if not self.writable.is_set() and (open_socket := self.transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):
                open_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, CLOSE_BY_RESET)
        self.transport.abort()

    def leave_queues(self) -> None:
        """Remove this connection from those that may be closed to make room."""
        self.limits.buffered_input.remove(self)
        self.limits.unsent_answers.remove(self)
        self.limits.silent_since.pop(self, None)
        self.limits.blocked_since.pop(self, None)
        self.limits.lingering.pop(self, None)

    def stop_keep_alive(self) -> None:
        """Close when idle; the answer under way is the last.  Called when the server leaves a load balancer."""
        self.closing = True
        if self.idle and self.cycle is None and not self.buffer:
            self.close()

    def shutdown(self) -> None:
        """Called by the server: the answer under way is the last, and an incomplete body is not waited for."""
        self.closing = True
        if self.cycle is None or self.lingering:
            self.close()
        elif not self.cycle.reader.complete:
            self.cycle.fail(Unavailable("the server is shutting down", retry_after=1))

    # Clients that do not read

    def start_write_timer(self) -> None:
        self.unsent_bytes = self.transport.get_write_buffer_size()
        self.write_timer = self.loop.call_later(self.limits.write_seconds, self.check_write_progress)

    def stop_write_timer(self) -> None:
        if self.write_timer is not None:
            self.write_timer.cancel()

    def check_write_progress(self) -> None:
        """Disconnect a client that has made too little progress since the last check.

        It has to read MIN_PROGRESS bytes, or all that was left: a few bytes now and then keep no connection open.
        """
        if self.transport.get_write_buffer_size() <= self.unsent_bytes - MIN_PROGRESS:
            self.limits.mark_blocked(self)
            self.start_write_timer()
            return
        seconds = self.limits.write_seconds
        log.warning("client disconnected, it read too little of its answer in %g s: %s", seconds, self.address)
        self.limits.count_cut_off()
        self.abort()

    @property
    def address(self) -> str:
        return "{}:{}".format(*self.client)
