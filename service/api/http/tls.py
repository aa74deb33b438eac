"""TLS: reads certificates, and runs handshakes and decryption within the limits of connections."""

import asyncio
import logging
import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Iterator
from typing import Any, cast

from uvicorn.server import ServerState

from .connection import LINGER_SECONDS, Connection
from .connection_limits import ConnectionLimits

RECEIVE_BYTES = 1 << 14  # encrypted bytes that are received in one call, and that wait while the application is busy
RECORD_HEADER_BYTES = 5
# Records without data for the application that a connection may send: those of the handshake, KeyUpdate messages and
# alerts.  A KeyUpdate costs the server 10 to 20 microseconds, and clients send one after gigabytes of data.
MAX_CONTROL_RECORDS = 64

log = logging.getLogger("polyhead.http")


def read_certificate(certificate: str, key: str) -> ssl.SSLContext:
    """A server's context for the PEM files of a certificate chain and its private key.

    Raises OSError or ssl.SSLError if they cannot be read or do not match, or if the key has a password.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.sslobject_class = CountingSSLObject
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(certificate, key or None, password=reject_password)
    return context


def reject_password() -> str:
    raise ssl.SSLError("the private key has a password; give one without")


class CountingSSLObject(ssl.SSLObject):
    """Counts the reads that returned data for the application; each returns data of one record."""

    data_reads = 0

    def read(self, len: int = 1024, buffer: Any = None) -> Any:
        found = super().read(len, buffer)
        self.data_reads += 1
        return found


class RecordCounter:
    """Counts the TLS records of a stream by their headers, which are not encrypted (RFC 8446, section 5.1)."""

    def __init__(self) -> None:
        self.count = 0  # records that have begun
        self._header = bytearray()  # the part of a header that was received
        self._left = 0  # bytes of the current record that are still to come

    def split(self, data: bytes) -> Iterator[bytes]:
        """Yield `data` in pieces in each of which at most MAX_CONTROL_RECORDS records begin; `count` goes along."""
        first = position = 0
        most = self.count + MAX_CONTROL_RECORDS
        while position < len(data):
            if self._left:
                step = min(self._left, len(data) - position)
                self._left -= step
                position += step
                continue
            if not self._header:
                if self.count == most:
                    yield data[first:position]
                    first, most = position, self.count + MAX_CONTROL_RECORDS
                self.count += 1
            part = data[position : position + RECORD_HEADER_BYTES - len(self._header)]
            self._header += part
            position += len(part)
            if len(self._header) == RECORD_HEADER_BYTES:
                self._left = int.from_bytes(self._header[3:], "big")
                self._header.clear()
        yield data[first:]


class NewConnection(asyncio.Protocol):
    """The protocol on top of a TLS transport until the handshake is complete; then `start` is called."""

    def __init__(self, start: Callable[[asyncio.Transport], None]) -> None:
        self.start = start

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.start(cast(asyncio.Transport, transport))


class TlsClient(asyncio.BufferedProtocol):
    """A client that connects over TLS, until its handshake is complete; then `connect` creates the protocol of its
    HTTP requests.

    It counts as one of the server's connections, may be closed to make room, and has `header_seconds`.  Until its first
    bytes came and it is their turn it costs a few kilobytes; its Handshake costs more, and there are few of them.  In
    each turn of the event loop a few handshakes go on: their signatures take milliseconds.
    """

    def __init__(
        self, context: ssl.SSLContext, connect: Callable[[], Connection], state: ServerState, edge: ConnectionLimits
    ) -> None:
        self.context, self.connect, self.state, self.limits = context, connect, state, edge
        self.handshake: Handshake | None = None
        self.postponed = b""  # bytes that wait for their turn

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # First of all, so that the connection is counted and has its timer whatever follows.
        self.state.connections.add(cast(Any, self))
        self.timer = asyncio.get_running_loop().call_later(self.limits.header_seconds, self.drop)
        if self.limits.make_room(self.state.connections):
            self.limits.silent_since[self] = time.monotonic()
        else:
            self.drop()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self.limits.read_buffer[:RECEIVE_BYTES]

    def buffer_updated(self, count: int) -> None:
        self.receive(bytes(self.limits.read_buffer[:count]))

    def receive(self, received: bytes) -> None:
        """Go on with the handshake if it is its turn; otherwise nothing more is read until it is."""
        if self.limits.handshake_queue.try_start(self):
            (self.handshake or self.begin_handshake()).process_records(received)
        else:
            self.postponed = received
            self.transport.pause_reading()

    def begin_handshake(self) -> "Handshake":
        self.handshake = Handshake(self)
        self.limits.add_handshake(self)
        self.transport.set_protocol(self.handshake)
        self.handshake.connection_made(self.transport)
        return self.handshake

    def continue_reading(self) -> None:
        """Go on with a handshake that waited for its turn."""
        if not self.transport.is_closing():
            self.transport.resume_reading()
            received, self.postponed = self.postponed, b""
            self.receive(received)

    def start_connection(self, transport: asyncio.Transport) -> None:
        """The handshake is complete: hand over to a connection."""
        self.leave_queues()
        connection = self.connect()
        transport.set_protocol(connection)
        connection.connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:  # noqa: ARG002
        self.leave_queues()
        self.limits.handshake_queue.remove(self)
        self.handshake = None  # so that its buffers are freed now: garbage is collected seldom

    def leave_queues(self) -> None:
        self.timer.cancel()
        self.limits.silent_since.pop(self, None)
        self.limits.handshakes.pop(self, None)
        self.state.connections.discard(cast(Any, self))

    def drop(self) -> None:
        """Close at once: another connection needs the room, or the time is over."""
        self.leave_queues()
        self.transport.abort()

    def stop_keep_alive(self) -> None:
        """Close: no request has begun."""
        self.drop()

    def shutdown(self) -> None:
        self.drop()


class Handshake(SSLProtocol):
    """The TLS layer of a connection, from the first bytes of `client` to the end of the connection.

    A client that sends more than MAX_CONTROL_RECORDS records without data is disconnected: OpenSSL processes all
    KeyUpdate messages that it has in one call, and that would hold the event loop.
    """

    max_size = 0  # asyncio's default is a buffer of 256 KiB per connection; all share one instead

    def __init__(self, client: TlsClient) -> None:
        edge = client.limits
        super().__init__(
            asyncio.get_running_loop(),
            NewConnection(self.start_connection),
            client.context,
            cast(Any, None),  # no future waits for the end of the handshake
            server_side=True,
            ssl_handshake_timeout=cast(Any, edge.header_seconds),  # seconds, may be a fraction; the client's ends first
            # The connection closes earlier, unless bytes of an answer are still unsent.
            ssl_shutdown_timeout=cast(Any, edge.write_seconds + LINGER_SECONDS),
        )
        # asyncio copies what was read from here before it reads anything else.
        self._ssl_buffer_view = edge.read_buffer[:RECEIVE_BYTES]
        self.client = client
        self.records = RecordCounter()
        self.tls_transport: asyncio.Transport | None = None  # None during the handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        super().connection_made(self.transport)
        self.transport.set_write_buffer_limits(0)  # so that bytes a client does not read are counted

    def start_connection(self, transport: asyncio.Transport) -> None:
        self.tls_transport = transport
        cast(Any, transport).set_read_buffer_limits(RECEIVE_BYTES)
        self.client.start_connection(transport)

    def _get_write_buffer_size(self) -> int:
        """What waits for the client, also encrypted: asyncio's does not have the bytes of the transport below."""
        encrypted = 0 if self.tls_transport is None else self.transport.get_write_buffer_size()
        return cast(int, cast(Any, super())._get_write_buffer_size()) + encrypted

    def get_buffer(self, n: int) -> memoryview:  # noqa: ARG002
        return self._ssl_buffer_view

    def buffer_updated(self, nbytes: int) -> None:
        received = bytes(self._ssl_buffer_view[:nbytes])
        if self.tls_transport is None:
            self.client.receive(received)
        else:
            self.process_records(received)

    def process_records(self, received: bytes) -> None:
        for piece in self.records.split(received):
            self._ssl_buffer_view[: len(piece)] = piece
            super().buffer_updated(len(piece))
            if self.count_control_records() > MAX_CONTROL_RECORDS:
                log.warning("client disconnected, it sent too many TLS records without data: %s", self.address)
                self.transport.abort()
                return

    def count_control_records(self) -> int:
        """The records without data until now; 0 while records with data may wait to be read."""
        transport = cast(Any, self.tls_transport)
        if transport is None:
            return self.records.count
        if not transport.is_closing() and (not transport.is_reading() or transport.get_read_buffer_size()):
            return 0
        return self.records.count - cast(CountingSSLObject, transport.get_extra_info("ssl_object")).data_reads

    def connection_lost(self, exc: BaseException | None) -> None:
        self.client.connection_lost(exc)
        super().connection_lost(exc)
        if self.tls_transport is not None:
            self.tls_transport.set_protocol(asyncio.BufferedProtocol())  # asyncio would go on to hold the connection
            self.tls_transport = None

    @property
    def address(self) -> str:
        host, port, *_ = self.transport.get_extra_info("peername") or ("unknown", 0)
        return f"{host}:{port}"
