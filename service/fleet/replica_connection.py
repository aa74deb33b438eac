"""A connection to one replica, and what it says of itself.

Knows no request's meaning and no route.  The one idea: the line is kept as long as the replica is listed, and made
again when it breaks; whoever was asked over it hears at once that it did.
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
SILENCE_TIMEOUT_S = 15.0  # a replica says how it is twice a second; one that says nothing for so long is taken for lost
MAX_BLOCKS = 1 << 20  # of a replica's cache, as far as their names are remembered
PORT_COUNT = 1 << 16
MIN_RETRY_S, MAX_RETRY_S = 0.1, 2.0  # between two tries to reach one that is listed

Address = tuple[str, int]

# Types of what follows each word that a replica may say.
HELLO_FIELDS = row_validator(int, str, int, tuple[tuple[str, bytes], ...], dict[str, str], int, int)
EVENT_FIELDS = row_validator(tuple[tuple[int, Any], ...])
LOAD_FIELDS = row_validator(int, tuple[str, ...], tuple[str, ...] | None)
WATCHED_FIELDS = row_validator(int, PolyheadError | dict[str, tuple[int, int]])
NO_FIELDS = row_validator()

log = logging.getLogger("polyhead.fleet")


class ConnectionListener(Protocol):
    """Who hears what a replica says.  `Line.models` and the like are set before."""

    def on_connected(self, line: "ReplicaConnection") -> None: ...

    def on_events(self, line: "ReplicaConnection", events: Sequence[tuple[int, Any]]) -> None: ...

    def on_leaving(self, line: "ReplicaConnection") -> None:
        """It will leave."""

    def on_lost(self, line: "ReplicaConnection") -> None:
        """What was asked over it is not answered any more."""


@dataclass(frozen=True)
class ConnectionContext:
    """What all lines of a fleet share: the secret, who hears what is said, and models, each read once, by what they are
    made of: replicas of one model share it."""

    secret: str
    listener: ConnectionListener
    known_models: WeakValueDictionary[str, Model] = field(default_factory=WeakValueDictionary)

    def decode_model(self, mark: str, told: bytes) -> Model:
        """Raises FrameError for what is no model, or not the one that `mark` stands for."""
        if (known := self.known_models.get(mark)) is not None:
            return known
        model = unpack(told)
        if not isinstance(model, Model) or model_digest(model) != mark:
            raise FrameError("what it says of a model is not what the model's mark stands for")
        self.known_models[mark] = model
        return model


class ReplicaConnection:
    """Lives on the event loop thread.  `candidate` is what is known of the replica's queue and cache."""

    def __init__(self, name: str, address: Address, circle: ConnectionContext) -> None:
        self.name, self.address = name, address
        self.candidate = Candidate(name)
        self.models: Mapping[str, Model] = {}
        self.broken: Mapping[str, str] = {}  # models that it could not load, and why
        self.loaded_names: Collection[str] | None = None  # of its models those that are loaded; None: all
        self.metrics_address: Address = "", 0  # where its metrics are
        self.block_tokens = 0  # tokens in a block of its caches
        self.will_leave = False  # it will leave, and takes something new only while nobody else does
        self.is_retired = False  # it takes nothing new
        self.unready_reasons: Sequence[str] = ()  # why nothing should be sent there now
        self._context = circle
        self._writer: StreamWriter | None = None
        self._pending_calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count(1)
        self._is_listed, self._retry_pause_s = True, MIN_RETRY_S
        self._routes: Mapping[str, MessageRoute] = {
            "hello": (HELLO_FIELDS, self._on_hello),
            "said": (EVENT_FIELDS, partial(circle.listener.on_events, self)),
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
        """Whether new requests should be sent there."""
        return self.is_open and not self.is_retired and not self.unready_reasons

    def send(self, *words: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode_frame(words))

    async def call(self, way: str, *words: Any) -> Any:
        """What it answers; ConnectionError if it is lost before, or is not there."""
        if self._writer is None:
            raise ConnectionError(f"replica {self.name} is not connected")
        number = next(self._numbers)
        self._pending_calls[number] = asyncio.get_running_loop().create_future()
        self.send(way, number, *words)
        try:
            return await self._pending_calls[number]
        finally:
            del self._pending_calls[number]

    def unlist(self) -> None:
        """It is not to be had any more, once somebody else is."""
        self._is_listed, self.will_leave = False, True

    def retire(self) -> None:
        """Nothing new is asked there; once all is answered, and it is not listed, the line is closed."""
        if not self.is_retired:
            self.is_retired = True
            self.send("left")  # nothing new comes after this
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
            elif outcome is not None:  # it may be of another version, and be replaced
                log.error("replica %s at %s:%d says what is not known here: %s", self.name, *self.address, outcome)
            await asyncio.sleep(self._retry_pause_s)
            self._retry_pause_s = min(2 * self._retry_pause_s, MAX_RETRY_S)

    async def _run_connection(self) -> None:
        reader, self._writer = await self._connect()
        await self._read_messages(reader)

    async def _connect(self) -> tuple[StreamReader, StreamWriter]:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(*self.address)
            with ExitStack() as undo:
                undo.callback(writer.close)
                await self._authenticate(reader, writer)
                undo.pop_all()
        return reader, writer

    async def _authenticate(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Both show that they know the secret."""
        theirs, ours = await reader.readexactly(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        writer.write(ours + compute_proof(self._context.secret, "asks", theirs))
        if not hmac.compare_digest(
            await reader.readexactly(NONCE_BYTES), compute_proof(self._context.secret, "answers", ours)
        ):
            raise FrameError("it does not know the secret")

    async def _read_messages(self, reader: StreamReader) -> None:
        while True:
            async with asyncio.timeout(SILENCE_TIMEOUT_S):
                words = await read_frame(reader)
            dispatch_message(self._routes, words)
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

    # What it may say

    def _on_hello(self, version: int, name: str, seen: int, models: Sequence[tuple[str, bytes]], *told: Any) -> None:
        broken, kept, block = told
        if version != PROTOCOL_VERSION:
            raise FrameError(f"it speaks version {version}, and version {PROTOCOL_VERSION} is spoken here")
        if name != self.name:
            raise FrameError(f"another one answers there: {name}")
        if not (0 <= seen < PORT_COUNT and kept >= 0 and 0 <= block <= MAX_BLOCKS):
            raise FrameError(f"it says of itself what cannot be: port {seen}, {kept} blocks of {block} tokens")
        self._retry_pause_s = MIN_RETRY_S
        self.metrics_address = self.address[0], seen
        self.block_tokens = block
        self.candidate = Candidate(name, min(kept, MAX_BLOCKS))
        self.models = {model.name: model for model in (self._context.decode_model(*told) for told in models)}
        self.broken, self.is_retired, self.will_leave = broken, False, not self._is_listed
        self._context.listener.on_connected(self)

    def _on_load(self, elsewhere: int, reasons: Sequence[str], held: Sequence[str] | None) -> None:
        if elsewhere < 0:
            raise FrameError(f"it says that {elsewhere} tokens are queued there")
        self.candidate.queued_by_others, self.unready_reasons, self.loaded_names = elsewhere, reasons, held

    def has_loaded(self, name: str) -> bool:
        """Whether it need not be loaded first."""
        return self.loaded_names is None or name in self.loaded_names

    def _on_leaving(self) -> None:
        self.will_leave = True
        self._context.listener.on_leaving(self)

    def _on_watched(self, number: int, answer: PolyheadError | Mapping[str, tuple[int, int]]) -> None:
        if number in self._pending_calls and not self._pending_calls[number].done():
            self._pending_calls[number].set_result(answer)
