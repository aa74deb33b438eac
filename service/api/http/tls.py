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


class Handshake(SSLProtocol):
    """The TLS layer of a connection; after the handshake, `connect` creates the protocol of its HTTP requests.

    During the handshake it counts as one of the server's connections, may be closed to make room, and has
    `header_seconds`. In each turn of the event loop a few handshakes go on: their signatures take milliseconds.

    A client that sends more than MAX_CONTROL_RECORDS records without data is disconnected: OpenSSL processes all
    KeyUpdate messages that it has in one call, and that would hold the event loop.
    """

    max_size = RECEIVE_BYTES  # asyncio's default is a buffer of 256 KiB per connection

    def __init__(
        self, context: ssl.SSLContext, connect: Callable[[], Connection], state: ServerState, edge: ConnectionLimits
    ) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            NewConnection(self.start_connection),
            context,
            cast(Any, None),  # no future waits for the end of the handshake
            server_side=True,
            ssl_handshake_timeout=cast(Any, edge.header_seconds),  # seconds, may be a fraction
            # The connection closes earlier, unless bytes of an answer are still unsent.
            ssl_shutdown_timeout=cast(Any, edge.write_seconds + LINGER_SECONDS),
        )
        self.connect, self.state, self.limits = connect, state, edge
        self.records = RecordCounter()
        self.tls_transport: asyncio.Transport | None = None  # None during the handshake
        self.postponed = b""  # bytes of the handshake that wait for their turn

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # First of all, so that the connection is counted and has its timer whatever follows.
        self.state.connections.add(cast(Any, self))
        super().connection_made(self.transport)
        self.transport.set_write_buffer_limits(0)  # so that bytes a client does not read are counted
        if self.limits.make_room(self.state.connections):
            self.limits.silent_since[self] = time.monotonic()
        else:
            self.drop()

    def start_connection(self, transport: asyncio.Transport) -> None:
        """The handshake is complete: hand over to a connection."""
        self.leave_queues()
        self.tls_transport = transport
        cast(Any, transport).set_read_buffer_limits(RECEIVE_BYTES)
        connection = self.connect()
        transport.set_protocol(connection)
        connection.connection_made(transport)

    def buffer_updated(self, nbytes: int) -> None:
        self.process_records(bytes(self.get_buffer(nbytes)[:nbytes]))

    def process_records(self, received: bytes) -> None:
        if self.tls_transport is None and not self.limits.handshake_queue.try_start(self):
            self.postponed = received
            self.transport.pause_reading()
            return
        for piece in self.records.split(received):
            self.get_buffer(len(piece))[: len(piece)] = piece
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
        self.leave_queues()
        self.limits.handshake_queue.remove(self)
        super().connection_lost(exc)

    @property
    def address(self) -> str:
        host, port, *_ = self.transport.get_extra_info("peername") or ("unknown", 0)
        return f"{host}:{port}"

    def drop(self) -> None:
        """Close at once: another connection needs the room."""
        self.leave_queues()
        self.transport.abort()

    def continue_reading(self) -> None:
        """Go on with a handshake that waited for its turn."""
        if not self.transport.is_closing():
            self.transport.resume_reading()
            received, self.postponed = self.postponed, b""
            self.process_records(received)

    def leave_queues(self) -> None:
        self.limits.silent_since.pop(self, None)
        self.state.connections.discard(cast(Any, self))

    def stop_keep_alive(self) -> None:
        """Close: no request has begun."""
        self.drop()

    def shutdown(self) -> None:
        self.drop()
