"""TLS: reads certificates, and runs handshakes within the limits of connections."""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any, cast

from uvicorn.server import ServerState

from .connection import Connection
from .connection_limits import ConnectionLimits


def read_certificate(certificate: str, key: str) -> ssl.SSLContext:
    """A server's context for the PEM files of a certificate chain and its private key.

    Raises OSError or ssl.SSLError if they cannot be read or do not match, or if the key has a password.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(certificate, key or None, password=reject_password)
    return context


def reject_password() -> str:
    raise ssl.SSLError("the private key has a password; give one without")


class Handshake(asyncio.Protocol):
    """The protocol of a connection during its TLS handshake; `connect` creates the one that replaces it.

    It counts as one of the server's connections, may be closed to make room, and has `header_seconds`.
    """

    transport: asyncio.Transport

    def __init__(
        self, context: ssl.SSLContext, connect: Callable[[], Connection], state: ServerState, edge: ConnectionLimits
    ) -> None:
        self.context, self.connect, self.state, self.limits = context, connect, state, edge
        self.early = bytearray()  # bytes of the first request that were decrypted during the handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(0)  # so that bytes a client does not read are counted
        room = self.limits.make_room(self.state.connections)
        self.state.connections.add(cast(Any, self))
        self.limits.silent_since[self] = time.monotonic()
        if not room:
            self.drop()
            return
        task = asyncio.get_running_loop().create_task(self.upgrade())
        self.state.tasks.add(task)
        task.add_done_callback(self.state.tasks.discard)

    def data_received(self, data: bytes) -> None:
        self.early += data

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.leave_queues()

    async def upgrade(self) -> None:
        """Run the handshake, then hand over to a connection; if it fails, disconnect."""
        loop, seconds = asyncio.get_running_loop(), self.limits.header_seconds
        try:
            transport = await loop.start_tls(
                self.transport, self, self.context, server_side=True, ssl_handshake_timeout=seconds
            )
        except OSError:  # also the base of ssl.SSLError, TimeoutError and ConnectionError
            transport = None
        self.leave_queues()
        if transport is None or transport.is_closing():
            self.transport.abort()
            return
        connection = self.connect()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        connection.add_early_bytes(bytes(self.early))

    def drop(self) -> None:
        """Close at once: another connection needs the room."""
        self.leave_queues()
        self.transport.abort()

    def continue_reading(self) -> None:
        """Does nothing: no request of it can be queued."""

    def leave_queues(self) -> None:
        self.limits.silent_since.pop(self, None)
        self.state.connections.discard(cast(Any, self))

    def stop_keep_alive(self) -> None:
        """Close: no request has begun."""
        self.drop()

    def shutdown(self) -> None:
        self.drop()
