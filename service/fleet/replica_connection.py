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

from ..concurrency.outcome import outcome_of
from ..core.errors import PolyheadError
from ..core.model import Model
from .frames import NONCE, VERSION, FrameError, Way, checked, followed, frame, mark_of, proof, read, unpacked
from .routing import Candidate

CONNECT_S = 5.0
SILENCE_S = 15.0  # a replica says how it is twice a second; one that says nothing for so long is taken for lost
MOST_BLOCKS = 1 << 20  # of a replica's cache, as far as their names are remembered
PORTS = 1 << 16
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0  # between two tries to reach one that is listed

Address = tuple[str, int]

# Types of what follows each word that a replica may say.
HELLO = checked(int, str, int, tuple[tuple[str, bytes], ...], dict[str, str], int, int)
SAID = checked(tuple[tuple[int, Any], ...])
LOAD = checked(int, tuple[str, ...], tuple[str, ...] | None)
WATCHED = checked(int, PolyheadError | dict[str, tuple[int, int]])
NOTHING = checked()

log = logging.getLogger("polyhead.fleet")


class Listener(Protocol):
    """Who hears what a replica says.  `Line.models` and the like are set before."""

    def joined(self, line: "Line") -> None: ...

    def said(self, line: "Line", events: Sequence[tuple[int, Any]]) -> None: ...

    def parts(self, line: "Line") -> None:
        """It will leave."""

    def lost(self, line: "Line") -> None:
        """What was asked over it is not answered any more."""


@dataclass(frozen=True)
class Circle:
    """What all lines of a fleet share: the secret, who hears what is said, and models, each read once, by what they are
    made of: replicas of one model share it."""

    secret: str
    listener: Listener
    kept: WeakValueDictionary[str, Model] = field(default_factory=WeakValueDictionary)

    def model(self, mark: str, told: bytes) -> Model:
        """Raises FrameError for what is no model, or not the one that `mark` stands for."""
        if (known := self.kept.get(mark)) is not None:
            return known
        model = unpacked(told)
        if not isinstance(model, Model) or mark_of(model) != mark:
            raise FrameError("what it says of a model is not what the model's mark stands for")
        self.kept[mark] = model
        return model


class Line:
    """Lives on the event loop thread.  `candidate` is what is known of the replica's queue and cache."""

    def __init__(self, name: str, address: Address, circle: Circle) -> None:
        self.name, self.address = name, address
        self.candidate = Candidate(name)
        self.models: Mapping[str, Model] = {}
        self.broken: Mapping[str, str] = {}  # models that it could not load, and why
        self.held: Collection[str] | None = None  # of its models those that are loaded; None: all
        self.page: Address = "", 0  # where its metrics are
        self.block = 0  # tokens in a block of its caches
        self.parting = False  # it will leave, and takes something new only while nobody else does
        self.leaving = False  # it takes nothing new
        self.reasons: Sequence[str] = ()  # why nothing should be sent there now
        self._circle = circle
        self._writer: StreamWriter | None = None
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count(1)
        self._listed, self._pause = True, FIRST_PAUSE_S
        self._ways: Mapping[str, Way] = {
            "hello": (HELLO, self._hello),
            "said": (SAID, partial(circle.listener.said, self)),
            "load": (LOAD, self._load),
            "leaving": (NOTHING, self._leave),
            "watched": (WATCHED, self._watched),
        }
        self._task = asyncio.create_task(self._keep())

    @property
    def open(self) -> bool:
        return self._writer is not None

    @property
    def fit(self) -> bool:
        """Whether new requests should be sent there."""
        return self.open and not self.leaving and not self.reasons

    def tell(self, *words: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(words))

    async def ask(self, way: str, *words: Any) -> Any:
        """What it answers; ConnectionError if it is lost before, or is not there."""
        if self._writer is None:
            raise ConnectionError(f"replica {self.name} is not connected")
        number = next(self._numbers)
        self._asked[number] = asyncio.get_running_loop().create_future()
        self.tell(way, number, *words)
        try:
            return await self._asked[number]
        finally:
            del self._asked[number]

    def unlist(self) -> None:
        """It is not to be had any more, once somebody else is."""
        self._listed, self.parting = False, True

    def part(self) -> None:
        """Nothing new is asked there; once all is answered, and it is not listed, the line is closed."""
        if not self.leaving:
            self.leaving = True
            self.tell("left")  # nothing new comes after this
        if not self._listed and not self.candidate.open:
            self._task.cancel()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _keep(self) -> None:
        while self._listed:
            try:
                outcome = await outcome_of(self._met())
            finally:
                self._hang_up()
            if isinstance(outcome, OSError | TimeoutError | asyncio.IncompleteReadError):
                log.warning("replica %s at %s:%d: %s", self.name, *self.address, outcome or type(outcome).__name__)
            elif outcome is not None:  # it may be of another version, and be replaced
                log.error("replica %s at %s:%d says what is not known here: %s", self.name, *self.address, outcome)
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    async def _met(self) -> None:
        reader, self._writer = await self._connected()
        await self._hear(reader)

    async def _connected(self) -> tuple[StreamReader, StreamWriter]:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(*self.address)
            with ExitStack() as undo:
                undo.callback(writer.close)
                await self._introduced(reader, writer)
                undo.pop_all()
        return reader, writer

    async def _introduced(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Both show that they know the secret."""
        theirs, ours = await reader.readexactly(NONCE), secrets.token_bytes(NONCE)
        writer.write(ours + proof(self._circle.secret, "asks", theirs))
        if not hmac.compare_digest(await reader.readexactly(NONCE), proof(self._circle.secret, "answers", ours)):
            raise FrameError("it does not know the secret")

    async def _hear(self, reader: StreamReader) -> None:
        while True:
            async with asyncio.timeout(SILENCE_S):
                words = await read(reader)
            followed(self._ways, words)
            if self.leaving and not self._listed and not self.candidate.open:
                return

    def _hang_up(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer, self.reasons = None, ()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(ConnectionError(f"replica {self.name} was lost"))
        self._circle.listener.lost(self)
        self.candidate = Candidate(self.name)

    # What it may say

    def _hello(self, version: int, name: str, seen: int, models: Sequence[tuple[str, bytes]], *told: Any) -> None:
        broken, kept, block = told
        if version != VERSION:
            raise FrameError(f"it speaks version {version}, and version {VERSION} is spoken here")
        if name != self.name:
            raise FrameError(f"another one answers there: {name}")
        if not (0 <= seen < PORTS and kept >= 0 and 0 <= block <= MOST_BLOCKS):
            raise FrameError(f"it says of itself what cannot be: port {seen}, {kept} blocks of {block} tokens")
        self._pause = FIRST_PAUSE_S
        self.page = self.address[0], seen
        self.block = block
        self.candidate = Candidate(name, min(kept, MOST_BLOCKS))
        self.models = {model.name: model for model in (self._circle.model(*told) for told in models)}
        self.broken, self.leaving, self.parting = broken, False, not self._listed
        self._circle.listener.joined(self)

    def _load(self, elsewhere: int, reasons: Sequence[str], held: Sequence[str] | None) -> None:
        if elsewhere < 0:
            raise FrameError(f"it says that {elsewhere} tokens are queued there")
        self.candidate.elsewhere, self.reasons, self.held = elsewhere, reasons, held

    def holds(self, name: str) -> bool:
        """Whether it need not be loaded first."""
        return self.held is None or name in self.held

    def _leave(self) -> None:
        self.parting = True
        self._circle.listener.parts(self)

    def _watched(self, number: int, answer: PolyheadError | Mapping[str, tuple[int, int]]) -> None:
        if number in self._asked and not self._asked[number].done():
            self._asked[number].set_result(answer)
