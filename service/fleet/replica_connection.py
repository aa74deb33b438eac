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
from typing import Annotated, Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from pydantic import Field

from ..concurrency.outcome import run_on_daemon_thread, wait_for_error
from ..core.errors import PolyheadError
from ..core.model import Model
from .frames import (
    MAX_FRAME_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    FrameError,
    PackedModel,
    compute_proof,
    digest_bytes,
    encode_frame,
    row_validator,
    unpack_model,
)
from .messages import EVENTS_PER_FRAME, MAX_TEXT, MODELS_PER_FRAME, MessageRoute, read_message
from .routing import Candidate

CONNECT_TIMEOUT_S = 5.0
# A replica reports its load twice a second. It counts as lost after SILENT_WAITS such waits in a row without a message.
WAIT_S, SILENT_WAITS = 5.0, 3
MAX_UNREAD_BYTES = 1 << 26  # that a replica leaves unread when more is sent to it; then it counts as lost
MAX_BLOCKS = 1 << 20  # of a replica's cache whose keys are remembered, at most
MAX_LAYERS = 1 << 14  # or heads, that a layout states
PORT_COUNT = 1 << 16
CALL_SECONDS = 120.0  # in which a replica loads an explainer, which is a second network of the model, and answers
MIN_RETRY_S, MAX_RETRY_S = 0.1, 2.0  # between two attempts to connect
# The same after a frame that the protocol does not allow: each attempt may cost this process as much again.
MIN_FAULT_RETRY_S, MAX_FAULT_RETRY_S = 0.5, 30.0
FAULTLESS_S = 120.0  # after a connection of this length, the pause begins at its minimum again

Address = tuple[str, int]

# The fields of each message that a replica may send.
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Number = Annotated[int, Field(ge=0, le=MAX_LAYERS)]
Models = Annotated[tuple[PackedModel, ...], Field(max_length=MODELS_PER_FRAME)]
Failures = Annotated[dict[Text, Text], Field(max_length=MODELS_PER_FRAME)]
HELLO_FIELDS = row_validator(int, Text, int, Models, Failures, int, int)
EVENT_FIELDS = row_validator(Annotated[tuple[tuple[int, Any], ...], Field(max_length=EVENTS_PER_FRAME)])
LOAD_FIELDS = row_validator(int, tuple[Text, ...], tuple[Text, ...] | None)
WATCHED_FIELDS = row_validator(int, PolyheadError | Annotated[dict[Text, tuple[Number, Number]], Field(max_length=4)])
NO_FIELDS = row_validator()

log = logging.getLogger("polyhead.fleet")


Read = TypeVar("Read")


class UnreadError(ConnectionError):
    """A replica does not read what it is sent."""


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
    decoding: dict[str, asyncio.Task[Model]] = field(default_factory=dict)  # models that are being decoded, by digest

    async def decode_model(self, digest: str, data: bytes, created: int) -> Model:
        """Decode a model on a thread, or return the known one with this digest.  Raises FrameError if the data is no
        model or has another digest.
        """
        if (known_model := self.known_models.get(digest)) is not None:
            return known_model
        # The digest is checked first: the connections that wait for the model of a digest have received the same bytes.
        if await run_on_daemon_thread(partial(digest_bytes, data)) != digest:
            raise FrameError("the data of a model does not match its digest")
        if (known_model := self.known_models.get(digest)) is not None:
            return known_model
        task = self.decoding.get(digest)
        if task is None:
            task = asyncio.create_task(run_on_daemon_thread(partial(unpack_model, data, created)))
            self.decoding[digest] = task
            task.add_done_callback(partial(self._on_decoded, digest))
        return await asyncio.shield(task)  # it is completed for other connections even if this one is closed

    def _on_decoded(self, digest: str, task: asyncio.Task[Model]) -> None:
        del self.decoding[digest]
        if not task.cancelled() and task.exception() is None:
            self.known_models[digest] = task.result()


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
        self._fault: UnreadError | None = None  # why the connection is being closed
        self._pending_calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count(1)
        self._is_listed, self._retry_pause_s, self._fault_pause_s = True, MIN_RETRY_S, MIN_FAULT_RETRY_S
        self._opened_at = 0.0  # of the newest connection, on the clock of the event loop
        self._routes: Mapping[str, MessageRoute] = {
            "hello": MessageRoute(HELLO_FIELDS, self._on_hello, MAX_FRAME_BYTES),
            "said": MessageRoute(EVENT_FIELDS, partial(context.listener.on_events, self), MAX_FRAME_BYTES),
            "load": MessageRoute(LOAD_FIELDS, self._on_load),
            "leaving": MessageRoute(NO_FIELDS, self._on_leaving),
            "watched": MessageRoute(WATCHED_FIELDS, self._on_watched),
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
        self.send_frame(encode_frame(fields))

    def send_frame(self, frame: bytes) -> None:
        """Send a frame, unless the replica leaves too much unread: then the connection is closed instead."""
        if self._writer is None or self._writer.is_closing():
            return
        unread = self._writer.transport.get_write_buffer_size()
        if unread > MAX_UNREAD_BYTES:
            self._fault = UnreadError(f"it reads nothing: {unread} bytes wait for it, {MAX_UNREAD_BYTES} are the most")
            self._writer.transport.abort()
        else:
            self._writer.write(frame)

    async def call(self, message: str, *fields: Any) -> Any:
        """Send a message and return its answer.  Raises ConnectionError if the replica is not connected or is lost
        meanwhile, and TimeoutError if it does not answer within CALL_SECONDS.
        """
        if self._writer is None:
            raise ConnectionError(f"replica {self.name} is not connected")
        number = next(self._numbers)
        self._pending_calls[number] = asyncio.get_running_loop().create_future()
        self.send(message, number, *fields)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await self._pending_calls[number]
        except TimeoutError:
            raise TimeoutError(f"replica {self.name} has not answered in {CALL_SECONDS:.0f} s") from None
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
            outcome, self._fault = self._fault or outcome, None
            pause, self._retry_pause_s = self._retry_pause_s, min(2 * self._retry_pause_s, MAX_RETRY_S)
            if isinstance(outcome, OSError | TimeoutError | asyncio.IncompleteReadError):
                log.warning("replica %s at %s:%d: %s", self.name, *self.address, str(outcome) or type(outcome).__name__)
                if isinstance(outcome, UnreadError):  # until then it took memory and requests
                    pause = self._next_fault_pause()
            elif outcome is not None:  # it may have another version and be replaced soon
                log.error(
                    "replica %s at %s:%d sent what the protocol does not allow: %s", self.name, *self.address, outcome
                )
                pause = self._next_fault_pause()
            del outcome  # its traceback holds the frame
            await asyncio.sleep(pause)

    def _next_fault_pause(self) -> float:
        """Return the seconds to wait after a frame that the protocol does not allow: twice those of the last time."""
        if asyncio.get_running_loop().time() - self._opened_at > FAULTLESS_S:
            self._fault_pause_s = MIN_FAULT_RETRY_S
        pause, self._fault_pause_s = self._fault_pause_s, min(2 * self._fault_pause_s, MAX_FAULT_RETRY_S)
        return pause

    async def _run_connection(self) -> None:
        self._opened_at = asyncio.get_running_loop().time()
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
            call_route = await wait_unless_silent(asyncio.create_task(read_message(reader, self._routes)))
            if (work := call_route()) is not None:
                await work
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

    async def _on_hello(
        self, version: int, name: str, http_port: int, models: Sequence[PackedModel], *rest: Any
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
        decoded = [await self._context.decode_model(*each) for each in models]
        self._retry_pause_s = MIN_RETRY_S
        self.metrics_address = self.address[0], http_port
        self.block_tokens = block_tokens
        self.candidate = Candidate(name, min(cache_blocks, MAX_BLOCKS))
        self.models = {model.name: model for model in decoded}
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


async def wait_unless_silent(reading: asyncio.Task[Read]) -> Read:
    """Return the result of `reading`.  Raises TimeoutError after several waits in a row, each with a timer of its own.

    If this process was paused or had no processor, only one of the timers has expired, and what arrived meanwhile is
    read before the replica counts as lost.
    """
    try:
        for _ in range(SILENT_WAITS):
            if (await asyncio.wait({reading}, timeout=WAIT_S))[0]:
                return reading.result()
    finally:
        reading.cancel()
    raise TimeoutError(f"no message for {SILENT_WAITS * WAIT_S:.0f} s")
