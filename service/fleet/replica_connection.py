"""The connection from an ingress to one replica: handshake, messages, and reconnecting while the replica is listed.

It does not interpret requests.  If the connection breaks, the listener is told at once.
"""

import asyncio
import hmac
import logging
import secrets
from asyncio import StreamReader, StreamWriter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

from ..concurrency.outcome import wait_for_error
from ..core.errors import PolyheadError
from ..core.model import Model
from .frames import (
    NONCE_BYTES,
    PROTOCOL_VERSION,
    FrameError,
    MessageRoute,
    compute_proof,
    dispatch_message,
    encode_frame,
    model_digest,
    read_frame,
    row_validator,
    unpack,
)
from .routing import Candidate

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 15.0  # a replica reports its load twice a second; after this silence it counts as lost
MAX_BLOCKS = 1 << 20  # of a replica's cache whose keys are remembered, at most
PORT_COUNT = 1 << 16
MIN_RETRY_S, MAX_RETRY_S = 0.1, 2.0  # between two attempts to connect

Address = tuple[str, int]

# The fields of each message that a replica may send.
HELLO_FIELDS = row_validator(int, str, int, tuple[tuple[str, bytes], ...], dict[str, str], int, int)
EVENT_FIELDS = row_validator(tuple[tuple[int, Any], ...])
LOAD_FIELDS = row_validator(int, tuple[str, ...], tuple[str, ...] | None)
WATCHED_FIELDS = row_validator(int, PolyheadError | dict[str, tuple[int, int]])
NO_FIELDS = row_validator()

log = logging.getLogger("polyhead.fleet")


class ConnectionListener(Protocol):
    """Receives what replicas send.  The attributes of the connection are updated before each call."""

    def on_connected(self, connection: "ReplicaConnection") -> None: ...

    def on_events(self, connection: "ReplicaConnection", events: Sequence[tuple[int, Any]]) -> None: ...

    def on_leaving(self, connection: "ReplicaConnection") -> None:
        """The replica will leave."""

    def on_lost(self, connection: "ReplicaConnection") -> None:
        """The connection is lost; its open requests are not answered."""


@dataclass(frozen=True)
class ConnectionContext:
    """What all connections of a fleet share: the secret, the listener, and the models by their digest.

    Replicas of one model share one Model object.
    """

    secret: str
    listener: ConnectionListener
    known_models: WeakValueDictionary[str, Model] = field(default_factory=WeakValueDictionary)

    def decode_model(self, digest: str, data: bytes) -> Model:
        """Decode a model, or return the known one with this digest.  Raises FrameError if the data is no model or has
        another digest.
        """
        if (known_model := self.known_models.get(digest)) is not None:
            return known_model
        model = unpack(data)
        if not isinstance(model, Model) or model_digest(model) != digest:
            raise FrameError("the data of a model does not match its digest")
        self.known_models[digest] = model
        return model


class ReplicaConnection:
    """A connection to a replica.  It lives on the event loop thread.

    `candidate` is what is known of the replica's queue and cache, for routing.
    """

    def __init__(self, name: str, address: Address, context: ConnectionContext) -> None:
        self.name, self.address = name, address
        self.candidate = Candidate(name)
        self.models: Mapping[str, Model] = {}
        self.broken: Mapping[str, str] = {}  # models that it could not load, and why
        self.loaded_names: Collection[str] | None = None  # the models in its memory; None: all of them
        self.metrics_address: Address = "", 0  # host and port of its metrics
        self.block_tokens = 0  # tokens in a block of its caches
        self.will_leave = False  # it gets new requests only while no other replica can take them
        self.is_retired = False  # it gets no new requests
        self.unready_reasons: Sequence[str] = ()  # why it should get no requests now
        self._context = context
        self._writer: StreamWriter | None = None
        self._pending_calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count(1)
        self._is_listed, self._retry_pause_s = True, MIN_RETRY_S
        self._routes: Mapping[str, MessageRoute] = {
            "hello": (HELLO_FIELDS, self._on_hello),
            "said": (EVENT_FIELDS, partial(context.listener.on_events, self)),
            "load": (LOAD_FIELDS, self._on_load),
            "leaving": (NO_FIELDS, self._on_leaving),
            "watched": (WATCHED_FIELDS, self._on_watched),
        }
        self._task = asyncio.create_task(self._keep_connected())

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    @property
    def is_ready(self) -> bool:
        """Whether new requests should be sent to this replica."""
        return self.is_open and not self.is_retired and not self.unready_reasons

    def send(self, *fields: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode_frame(fields))

    async def call(self, message: str, *fields: Any) -> Any:
        """Send a message and return its answer.  Raises ConnectionError if the replica is not connected or is lost
        meanwhile.
        """
        if self._writer is None:
            raise ConnectionError(f"replica {self.name} is not connected")
        number = next(self._numbers)
        self._pending_calls[number] = asyncio.get_running_loop().create_future()
        self.send(message, number, *fields)
        try:
            return await self._pending_calls[number]
        finally:
            del self._pending_calls[number]

    def unlist(self) -> None:
        """Mark the replica as no longer listed: it is retired when another one can take its requests."""
        self._is_listed, self.will_leave = False, True

    def retire(self) -> None:
        """Send no new requests.  The connection is closed once all requests are answered and the replica is not
        listed.
        """
        if not self.is_retired:
            self.is_retired = True
            self.send("left")  # no requests follow this message
        if not self._is_listed and not self.candidate.open_requests:
            self._task.cancel()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _keep_connected(self) -> None:
        while self._is_listed:
            try:
                outcome = await wait_for_error(self._run_connection())
            finally:
                self._disconnect()
            if isinstance(outcome, OSError | TimeoutError | asyncio.IncompleteReadError):
                log.warning("replica %s at %s:%d: %s", self.name, *self.address, outcome or type(outcome).__name__)
            elif outcome is not None:  # it may have another version and be replaced soon
                log.error(
                    "replica %s at %s:%d sent what the protocol does not allow: %s", self.name, *self.address, outcome
                )
            await asyncio.sleep(self._retry_pause_s)
            self._retry_pause_s = min(2 * self._retry_pause_s, MAX_RETRY_S)

    async def _run_connection(self) -> None:
        reader, self._writer = await self._connect()
        await self._read_messages(reader)

    async def _connect(self) -> tuple[StreamReader, StreamWriter]:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(*self.address)
            with ExitStack() as cleanup:
                cleanup.callback(writer.close)
                await self._authenticate(reader, writer)
                cleanup.pop_all()
        return reader, writer

    async def _authenticate(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Prove to each other that both know the secret.  Raises FrameError."""
        peer_nonce, own_nonce = await reader.readexactly(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        writer.write(own_nonce + compute_proof(self._context.secret, "asks", peer_nonce))
        if not hmac.compare_digest(
            await reader.readexactly(NONCE_BYTES), compute_proof(self._context.secret, "answers", own_nonce)
        ):
            raise FrameError("it does not know the secret")

    async def _read_messages(self, reader: StreamReader) -> None:
        while True:
            async with asyncio.timeout(SILENCE_TIMEOUT_S):
                message = await read_frame(reader)
            dispatch_message(self._routes, message)
            if self.is_retired and not self._is_listed and not self.candidate.open_requests:
                return

    def _disconnect(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer, self.unready_reasons = None, ()
        for future in self._pending_calls.values():
            if not future.done():
                future.set_exception(ConnectionError(f"replica {self.name} was lost"))
        self._context.listener.on_lost(self)
        self.candidate = Candidate(self.name)

    # Messages of the replica

    def _on_hello(
        self, version: int, name: str, http_port: int, models: Sequence[tuple[str, bytes]], *rest: Any
    ) -> None:
        broken, cache_blocks, block_tokens = rest
        if version != PROTOCOL_VERSION:
            raise FrameError(f"it has protocol version {version}, this process has {PROTOCOL_VERSION}")
        if name != self.name:
            raise FrameError(f"another replica answers at its address: {name}")
        if not (0 <= http_port < PORT_COUNT and cache_blocks >= 0 and 0 <= block_tokens <= MAX_BLOCKS):
            raise FrameError(
                f"impossible values in its hello: port {http_port}, {cache_blocks} blocks of {block_tokens} tokens"
            )
        self._retry_pause_s = MIN_RETRY_S
        self.metrics_address = self.address[0], http_port
        self.block_tokens = block_tokens
        self.candidate = Candidate(name, min(cache_blocks, MAX_BLOCKS))
        self.models = {model.name: model for model in (self._context.decode_model(*each) for each in models)}
        self.broken, self.is_retired, self.will_leave = broken, False, not self._is_listed
        self._context.listener.on_connected(self)

    def _on_load(self, elsewhere: int, reasons: Sequence[str], loaded: Sequence[str] | None) -> None:
        if elsewhere < 0:
            raise FrameError(f"its load message has {elsewhere} queued tokens")
        self.candidate.queued_by_others, self.unready_reasons, self.loaded_names = elsewhere, reasons, loaded

    def has_loaded(self, name: str) -> bool:
        """Whether the model is in the replica's memory."""
        return self.loaded_names is None or name in self.loaded_names

    def _on_leaving(self) -> None:
        self.will_leave = True
        self._context.listener.on_leaving(self)

    def _on_watched(self, number: int, answer: PolyheadError | Mapping[str, tuple[int, int]]) -> None:
        if number in self._pending_calls and not self._pending_calls[number].done():
            self._pending_calls[number].set_result(answer)
