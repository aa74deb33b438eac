"""The side that computes: an engine and its models, for whoever asks from another process.

Knows no HTTP and no Ray.  The one idea: whoever asks keeps one connection, on which all its requests come and all
that is said to them goes back, the events of a step in one frame; so a token costs microseconds wherever its reader is,
and when the connection breaks everything asked over it is over.
"""

import asyncio
import hmac
import logging
import secrets
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..api.access.access_log import UNTRACED
from ..api.access.auth import follow
from ..config.settings import Settings
from ..core.errors import AnswerTooLarge, PolyheadError, Unavailable
from ..core.guide import Asked
from ..core.model import Model, concerning
from ..core.request import Done, Duty, Event, Failed, Generate, Request, Token
from ..engine.engine import Engine, Stream
from ..engine.worker import Ended, StepReport
from ..metrics import Metrics
from ..resources.process_info import beside
from ..runtime.loader import Executed
from ..runtime.placement import placed
from ..runtime.registry import Registry
from ..server.assembly import unchanged
from ..server.process import TAKEN, WAITING, Books
from .frames import (
    LEFT_S,
    NONCE,
    VERSION,
    Begun,
    FrameError,
    Way,
    checked,
    followed,
    frame,
    mark_of,
    packed,
    proof,
    read,
)
from .model_pool import Pool
from .replica_http import Window
from .routing import Ask, Candidate
from .unauthenticated import Strangers

BEAT_S = 0.5  # how often whoever is connected hears how much is queued, if nothing else
HELLO_S = 10.0  # a stranger has so long to show that it knows the secret
# Types of what follows each word that may be asked.
ASK = checked(str, int, tuple[tuple[int, int, Any], ...])
DROP = checked(int, bool)
TICKET = checked(int)
WATCH = checked(int, str)
NOTHING = checked()

log = logging.getLogger("polyhead.replica")


@dataclass(frozen=True)
class Steps:
    """What the page of a replica counts: steps.  Requests are counted where they came in, or they would count twice."""

    metrics: Metrics

    def step(self, report: StepReport) -> None:
        self.metrics.step(report)

    def ended(self, ended: Ended) -> None:
        """See above."""

    def rested(self, model: str, task: Duty) -> None:
        self.metrics.rested(model, task)


class Replica:
    """Lives on the event loop thread.  `secret` is what both ends know."""

    def __init__(self, settings: Settings, name: str, secret: str, executed: Executed = unchanged) -> None:
        self.name, self._secret = name, secret
        self._drain = settings.drain_seconds
        books, place = Books.of(settings), placed(settings)
        self.engine = Engine(Steps(books.metrics), name=place.device.type, threads=place.torch_threads)
        self.registry = Registry(self.engine, settings, told=books.metrics, executed=executed)
        self.server = books.server(settings, self.registry, self.engine, UNTRACED, self.registry.held)
        self.pool = Pool(self.registry, settings.models, settings.pool_models, self._drain) if settings.pools else None
        self._visitors: set[Visitor] = set()
        self._strangers = Strangers()

    @property
    def queued(self) -> int:
        """Tokens that are still to be computed of all that was asked."""
        return sum(visitor.ledger.queued for visitor in self._visitors)

    async def start(self, host: str, ports: Iterable[int] = (0,)) -> int:
        """Load, then listen on the first of `ports` that is free, and for whoever looks on the next; the first.

        Raises Unavailable where no model could be loaded, OSError where no port is free.
        """
        self.engine.start()
        if self.pool:
            self.registry.defer()
            await self.pool.start()
        else:
            await self.registry.load_all()
        if not self.models:
            raise Unavailable("; ".join(f"{name}: {why}" for name, why in self.broken.items()))
        asked, seen = listening(host, ports), listening(host, ports)
        # Some turns of the loop take TAKEN connections each before the first can be closed; others wait in the kernel.
        self._listener = await asyncio.start_server(self._visited, sock=asked, backlog=TAKEN)
        asked.listen(WAITING)
        self._seen = int(seen.getsockname()[1])
        self._window = Window(self.server, seen)
        await self._window.open()
        self._aside = [beside(self._beat()), beside(follow(self.server.keys))]
        log.info("%s answers on %s:%d, its metrics are on %s:%d", self.name, *asked.getsockname(), *seen.getsockname())
        return int(asked.getsockname()[1])

    def failing(self) -> list[str]:
        """Why it should be replaced."""
        return self.server.dying() + [f"{model} cannot compute any more" for model in self.engine.failing()]

    @property
    def models(self) -> Sequence[Model]:
        """All that may be asked for."""
        return list(self.pool.models.values()) if self.pool else self.registry.models()

    @property
    def broken(self) -> Mapping[str, str]:
        states = self.registry.states().items()
        return self.pool.broken if self.pool else {name: one.why for name, one in states if one.phase == "broken"}

    async def model(self, name: str) -> Model:
        """The one that is meant, loaded."""
        if self.pool:
            return await self.pool.model(name)
        for model in self.registry.models():
            if model.name == name:
                return model
        raise Unavailable(f"{name} is not on this replica any more; send it again", retry_after=1)

    async def close(self) -> None:
        """Leave, once whoever is connected has somebody else to ask and what is in flight has had its time."""
        self.server.admission.close()
        self._listener.close()
        visitors = list(self._visitors)
        for visitor in visitors:
            visitor.tell("leaving")
        if visitors:  # what they asked before they heard of it is on its way
            await asyncio.wait([asyncio.create_task(visitor.left.wait()) for visitor in visitors], timeout=LEFT_S)
        await self.engine.close(self._drain)
        await asyncio.sleep(0)  # what was said last is on its way
        for task in self._aside:
            task.cancel()
        await self._window.close()
        for visitor in list(self._visitors):
            await visitor.close()
        self.server.text.close()

    def hello(self) -> tuple[Any, ...]:
        """What a replica says of itself.  Models are told apart by what they are made of, wherever they are loaded."""
        models = tuple((mark_of(model), packed(model)) for model in self.models)
        kept, size = self.registry.cache()
        return ("hello", VERSION, self.name, self._seen, models, dict(self.broken), kept, size)

    async def _visited(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._strangers.enter(writer)
        try:
            async with asyncio.timeout(HELLO_S):
                await admit(self._secret, reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, FrameError) as error:
            self._strangers.refused(error)
            writer.close()
            return
        finally:
            self._strangers.leave(writer)
        visitor = Visitor(self, writer)
        self._visitors.add(visitor)
        writer.write(frame(self.hello()))
        try:
            await visitor.hear(reader)
        finally:
            visitor.left.set()
            self._visitors.discard(visitor)
            await visitor.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            reasons, held = tuple(self.server.unready()), self.pool.held if self.pool else None
            for visitor in self._visitors:
                visitor.tell("load", self.queued - visitor.ledger.queued, reasons, held)


def listening(host: str, ports: Iterable[int]) -> socket.socket:
    """A socket on the first port that is free.  Raises OSError where none is."""
    taken: OSError | None = None
    for port in ports:
        # The protocol is named because asyncio looks for it before it switches off Nagle's algorithm.  Without that a
        # frame waits for the acknowledgement of the one before, some 40 ms, and tokens come in bursts.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(WAITING)
        except OSError as error:
            listener.close()
            taken = error
        else:
            return listener
    raise OSError(f"no port is free on {host}: {taken}")


async def admit(secret: str, reader: StreamReader, writer: StreamWriter) -> None:
    """Both show that they know the secret.  Raises FrameError.  Nothing of a stranger's is looked into before."""
    ours = secrets.token_bytes(NONCE)
    writer.write(ours)
    theirs, shown = await reader.readexactly(NONCE), await reader.readexactly(NONCE)
    if not hmac.compare_digest(shown, proof(secret, "asks", ours)):
        raise FrameError("it does not know the secret")
    writer.write(proof(secret, "answers", theirs))


class Visitor:
    """One who asks.  `ledger` is what it asked and what of that is left to compute."""

    def __init__(self, replica: Replica, writer: StreamWriter) -> None:
        self.ledger, self.left = Candidate(""), asyncio.Event()
        self._replica, self._writer = replica, writer
        self._wanted: set[int] = set()  # tickets, of which some may not be submitted yet
        self._streams: dict[int, Stream] = {}
        self._held: dict[int, asyncio.Event] = {}
        self._said: list[tuple[int, Event | Begun]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._ways: Mapping[str, Way] = {
            "ask": (ASK, self._ask),
            "drop": (DROP, self._drop),
            "hold": (TICKET, self._hold),
            "resume": (TICKET, self._resume),
            "watch": (WATCH, self._watch),
            "left": (NOTHING, self.left.set),
        }

    async def hear(self, reader: StreamReader) -> None:
        """Until it goes."""
        try:
            while True:
                followed(self._ways, await read(reader))
        except (OSError, asyncio.IncompleteReadError):
            pass  # it is gone, and what it asked with it
        except FrameError as error:
            log.error("a connection is given up: what came over it is not known here: %s", error)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for stream in list(self._streams.values()):
            stream.close()
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    def tell(self, *words: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame(words))

    # What it may say

    def _ask(self, name: str, answer: int, requests: Sequence[tuple[int, int, Request]]) -> None:
        for ticket, left, request in requests:
            if not isinstance(request, Request) or ticket in self._wanted:
                raise FrameError("it asks what is no request, or has a number that is in use")
            if not (answer >= 0 and 0 <= left <= request.prompt_tokens):
                raise FrameError(
                    f"{left} tokens are left to compute of {request.prompt_tokens}, and {answer} to answer"
                )
            self._wanted.add(ticket)
            self.ledger.take(ticket, Ask(left, answer))
        self._go(self._submit(name, [(ticket, request) for ticket, _, request in requests]))

    def _drop(self, ticket: int, answered: bool) -> None:
        self._over(ticket)
        if stream := self._streams.pop(ticket, None):
            stream.close(answered=answered)

    def _hold(self, ticket: int) -> None:
        if ticket in self._wanted:
            self._held[ticket] = asyncio.Event()

    def _resume(self, ticket: int) -> None:
        if held := self._held.pop(ticket, None):
            held.set()

    def _watch(self, number: int, name: str) -> None:
        self._go(self._watched(number, name))

    # What is done about it

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._gone)

    def _gone(self, task: "asyncio.Task[None]") -> None:
        """A fault of ours leaves nobody waiting: with the connection all that was asked over it is over."""
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("a connection is given up", exc_info=fault)
            self._writer.transport.abort()

    async def _submit(self, name: str, requests: Sequence[tuple[int, Request]]) -> None:
        try:
            model = await self._replica.model(name)
            guided = [await self._guided(model, request) for _, request in requests]
            model = await self._replica.model(name)  # it may have had to make room meanwhile
            ready = [replace(request, adapter=model.adapter) for request in guided]  # its number is this replica's own
            streams = self._replica.registry.submit(model, ready)
        except PolyheadError as error:
            for ticket, _ in requests:
                self._say(ticket, Failed(error))
            return
        for (ticket, _), stream in zip(requests, streams, strict=True):
            if ticket in self._wanted:
                self._streams[ticket] = stream
                self._go(self._follow(ticket, stream))
            else:  # whoever asked has left meanwhile
                stream.close()

    async def _guided(self, model: Model, request: Request) -> Request:
        """With its guide, if it has one, compiled here."""
        if isinstance(request, Generate) and isinstance(asked := request.guide, Asked):
            with concerning(model):
                text = self._replica.server.text
                guide = await text.guide(model, asked.grammar, asked.thinking, request.terms)
            return replace(request, guide=guide)
        return request

    async def _follow(self, ticket: int, stream: Stream) -> None:
        begun = False
        async for event in stream:
            if not begun and stream.course.begun:
                begun = True
                self._say(ticket, Begun(stream.course.begun - stream.submitted))
            self._say(ticket, event)
            if held := self._held.get(ticket):
                await held.wait()
            await self._writer.drain()  # at once, unless what was said before is not taken
        self._streams.pop(ticket, None)

    def _say(self, ticket: int, event: Event | Begun) -> None:
        """With whatever else is said in this round of the loop: all of a step is one frame."""
        match event:
            case Token():
                self.ledger.said(ticket)
            case Done() | Failed():
                self._over(ticket)
            case _:
                pass
        if not self._said:
            asyncio.get_running_loop().call_soon(self._send)
        self._said.append((ticket, event))

    def _over(self, ticket: int) -> None:
        self._wanted.discard(ticket)
        self.ledger.end(ticket)
        self._resume(ticket)

    def _send(self) -> None:
        said, self._said = tuple(self._said), []
        try:
            self.tell("said", said)
        except FrameError as error:
            for ticket in {ticket for ticket, _ in said}:
                self._drop(ticket, answered=False)
                self.tell("said", ((ticket, Failed(AnswerTooLarge(f"it cannot be told: {error}"))),))

    async def _watched(self, number: int, name: str) -> None:
        try:
            layout = await self._replica.registry.watch(await self._replica.model(name))
        except PolyheadError as error:
            self.tell("watched", number, error)
        else:
            self.tell("watched", number, dict(layout))
