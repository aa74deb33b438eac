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

from ..api.access.access_log import NO_TRACING
from ..api.access.auth import watch_keys_file
from ..config.settings import Settings
from ..core.errors import AnswerTooLarge, PolyheadError, Unavailable
from ..core.guide import GuideSpec
from ..core.model import Model, name_model_in_errors
from ..core.request import Done, Event, Failed, Generate, GeneratedToken, Request, WorkerTask
from ..engine.engine import Engine, Stream
from ..engine.worker import RequestEnd, StepReport
from ..metrics import Metrics
from ..resources.process_info import start_background_task
from ..runtime.loader import ExecutorHook
from ..runtime.placement import choose_placement
from ..runtime.registry import ModelRegistry
from ..server.assembly import keep_executor
from ..server.process import ACCEPT_BATCH, LISTEN_BACKLOG, Telemetry
from .frames import (
    LEAVE_TIMEOUT_S,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    FrameError,
    MessageRoute,
    RequestStarted,
    compute_proof,
    dispatch_message,
    encode_frame,
    model_digest,
    pack,
    read_frame,
    row_validator,
)
from .model_pool import ModelPool
from .replica_http import ReplicaHttpServer
from .routing import Candidate, RoutingRequest
from .unauthenticated import UnauthenticatedConnections

LOAD_INTERVAL_S = 0.5  # how often whoever is connected hears how much is queued, if nothing else
AUTHENTICATION_TIMEOUT_S = 10.0  # a stranger has so long to show that it knows the secret
# Types of what follows each word that may be asked.
ASK_FIELDS = row_validator(str, int, tuple[tuple[int, int, Any], ...])
DROP_FIELDS = row_validator(int, bool)
NUMBER_FIELDS = row_validator(int)
WATCH_FIELDS = row_validator(int, str)
NO_FIELDS = row_validator()

log = logging.getLogger("polyhead.replica")


@dataclass(frozen=True)
class StepObserver:
    """What the page of a replica counts: steps.  Requests are counted where they came in, or they would count twice."""

    metrics: Metrics

    def record_step(self, report: StepReport) -> None:
        self.metrics.record_step(report)

    def record_end(self, ended: RequestEnd) -> None:
        """See above."""

    def record_idle(self, model: str, task: WorkerTask) -> None:
        self.metrics.record_idle(model, task)


class Replica:
    """Lives on the event loop thread.  `secret` is what both ends know."""

    def __init__(self, settings: Settings, name: str, secret: str, executed: ExecutorHook = keep_executor) -> None:
        self.name, self._secret = name, secret
        self._drain_s = settings.drain_seconds
        books, place = Telemetry.from_settings(settings), choose_placement(settings)
        self.engine = Engine(StepObserver(books.metrics), name=place.device.type, threads=place.torch_threads)
        self.registry = ModelRegistry(self.engine, settings, told=books.metrics, executed=executed)
        self.server = books.build_server(settings, self.registry, self.engine, NO_TRACING, self.registry.held_bytes)
        self.pool = (
            ModelPool(self.registry, settings.models, settings.pool_models, self._drain_s) if settings.pools else None
        )
        self._connections: set[IngressConnection] = set()
        self._unauthenticated = UnauthenticatedConnections()

    @property
    def queued_tokens(self) -> int:
        """Tokens that are still to be computed of all that was asked."""
        return sum(visitor.load.queued_tokens for visitor in self._connections)

    async def start(self, host: str, ports: Iterable[int] = (0,)) -> int:
        """Load, then listen on the first of `ports` that is free, and for whoever looks on the next; the first.

        Raises Unavailable where no model could be loaded, OSError where no port is free.
        """
        self.engine.start()
        if self.pool:
            self.registry.defer_loading()
            await self.pool.start()
        else:
            await self.registry.load_all()
        if not self.models:
            raise Unavailable("; ".join(f"{name}: {why}" for name, why in self.broken.items()))
        asked, seen = bind_socket(host, ports), bind_socket(host, ports)
        # Some turns of the loop take TAKEN connections each before the first can be closed; others wait in the kernel.
        self._listener = await asyncio.start_server(self._accept, sock=asked, backlog=ACCEPT_BATCH)
        asked.listen(LISTEN_BACKLOG)
        self._http_port = int(seen.getsockname()[1])
        self._http_server = ReplicaHttpServer(self.server, seen)
        await self._http_server.start()
        self._background_tasks = [
            start_background_task(self._send_load()),
            start_background_task(watch_keys_file(self.server.keys)),
        ]
        log.info("%s answers on %s:%d, its metrics are on %s:%d", self.name, *asked.getsockname(), *seen.getsockname())
        return int(asked.getsockname()[1])

    def failure_reasons(self) -> list[str]:
        """Why it should be replaced."""
        return self.server.fatal_reasons() + [f"{model} cannot compute any more" for model in self.engine.failing()]

    @property
    def models(self) -> Sequence[Model]:
        """All that may be asked for."""
        return list(self.pool.models.values()) if self.pool else self.registry.models()

    @property
    def broken(self) -> Mapping[str, str]:
        states = self.registry.states().items()
        return self.pool.broken if self.pool else {name: one.reason for name, one in states if one.phase == "broken"}

    async def load_model(self, name: str) -> Model:
        """The one that is meant, loaded."""
        if self.pool:
            return await self.pool.load_model(name)
        for model in self.registry.models():
            if model.name == name:
                return model
        raise Unavailable(f"{name} is not on this replica any more; send it again", retry_after=1)

    async def close(self) -> None:
        """Leave, once whoever is connected has somebody else to ask and what is in flight has had its time."""
        self.server.admission.close()
        self._listener.close()
        visitors = list(self._connections)
        for visitor in visitors:
            visitor.send("leaving")
        if visitors:  # what they asked before they heard of it is on its way
            await asyncio.wait(
                [asyncio.create_task(visitor.has_left.wait()) for visitor in visitors], timeout=LEAVE_TIMEOUT_S
            )
        await self.engine.close(self._drain_s)
        await asyncio.sleep(0)  # what was said last is on its way
        for task in self._background_tasks:
            task.cancel()
        await self._http_server.close()
        for visitor in list(self._connections):
            await visitor.close()
        self.server.text.close()

    def hello_message(self) -> tuple[Any, ...]:
        """What a replica says of itself.  Models are told apart by what they are made of, wherever they are loaded."""
        models = tuple((model_digest(model), pack(model)) for model in self.models)
        kept, size = self.registry.cache_size()
        return ("hello", PROTOCOL_VERSION, self.name, self._http_port, models, dict(self.broken), kept, size)

    async def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._unauthenticated.add(writer)
        try:
            async with asyncio.timeout(AUTHENTICATION_TIMEOUT_S):
                await authenticate(self._secret, reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, FrameError) as error:
            self._unauthenticated.log_refusal(error)
            writer.close()
            return
        finally:
            self._unauthenticated.remove(writer)
        visitor = IngressConnection(self, writer)
        self._connections.add(visitor)
        writer.write(encode_frame(self.hello_message()))
        try:
            await visitor.serve(reader)
        finally:
            visitor.has_left.set()
            self._connections.discard(visitor)
            await visitor.close()

    async def _send_load(self) -> None:
        while True:
            await asyncio.sleep(LOAD_INTERVAL_S)
            reasons, held = tuple(self.server.unready_reasons()), self.pool.loaded_names if self.pool else None
            for visitor in self._connections:
                visitor.send("load", self.queued_tokens - visitor.load.queued_tokens, reasons, held)


def bind_socket(host: str, ports: Iterable[int]) -> socket.socket:
    """A socket on the first port that is free.  Raises OSError where none is."""
    taken: OSError | None = None
    for port in ports:
        # The protocol is named because asyncio looks for it before it switches off Nagle's algorithm.  Without that a
        # frame waits for the acknowledgement of the one before, some 40 ms, and tokens come in bursts.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(LISTEN_BACKLOG)
        except OSError as error:
            listener.close()
            taken = error
        else:
            return listener
    raise OSError(f"no port is free on {host}: {taken}")


async def authenticate(secret: str, reader: StreamReader, writer: StreamWriter) -> None:
    """Both show that they know the secret.  Raises FrameError.  Nothing of a stranger's is looked into before."""
    ours = secrets.token_bytes(NONCE_BYTES)
    writer.write(ours)
    theirs, shown = await reader.readexactly(NONCE_BYTES), await reader.readexactly(NONCE_BYTES)
    if not hmac.compare_digest(shown, compute_proof(secret, "asks", ours)):
        raise FrameError("it does not know the secret")
    writer.write(compute_proof(secret, "answers", theirs))


class IngressConnection:
    """One who asks.  `ledger` is what it asked and what of that is left to compute."""

    def __init__(self, replica: Replica, writer: StreamWriter) -> None:
        self.load, self.has_left = Candidate(""), asyncio.Event()
        self._replica, self._writer = replica, writer
        self._open_numbers: set[int] = set()  # tickets, of which some may not be submitted yet
        self._streams: dict[int, Stream] = {}
        self._paused: dict[int, asyncio.Event] = {}
        self._unsent_events: list[tuple[int, Event | RequestStarted]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._routes: Mapping[str, MessageRoute] = {
            "ask": (ASK_FIELDS, self._on_ask),
            "drop": (DROP_FIELDS, self._drop),
            "hold": (NUMBER_FIELDS, self._hold),
            "resume": (NUMBER_FIELDS, self._resume),
            "watch": (WATCH_FIELDS, self._on_watch),
            "left": (NO_FIELDS, self.has_left.set),
        }

    async def serve(self, reader: StreamReader) -> None:
        """Until it goes."""
        try:
            while True:
                dispatch_message(self._routes, await read_frame(reader))
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

    def send(self, *words: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode_frame(words))

    # What it may say

    def _on_ask(self, name: str, answer: int, requests: Sequence[tuple[int, int, Request]]) -> None:
        for ticket, left, request in requests:
            if not isinstance(request, Request) or ticket in self._open_numbers:
                raise FrameError("it asks what is no request, or has a number that is in use")
            if not (answer >= 0 and 0 <= left <= request.prompt_tokens):
                raise FrameError(
                    f"{left} tokens are left to compute of {request.prompt_tokens}, and {answer} to answer"
                )
            self._open_numbers.add(ticket)
            self.load.add_request(ticket, RoutingRequest(left, answer))
        self._start_task(self._submit(name, [(ticket, request) for ticket, _, request in requests]))

    def _drop(self, ticket: int, answered: bool) -> None:
        self._finish_request(ticket)
        if stream := self._streams.pop(ticket, None):
            stream.close(answered=answered)

    def _hold(self, ticket: int) -> None:
        if ticket in self._open_numbers:
            self._paused[ticket] = asyncio.Event()

    def _resume(self, ticket: int) -> None:
        if held := self._paused.pop(ticket, None):
            held.set()

    def _on_watch(self, number: int, name: str) -> None:
        self._start_task(self._send_layout(number, name))

    # What is done about it

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        """A fault of ours leaves nobody waiting: with the connection all that was asked over it is over."""
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("a connection is given up", exc_info=fault)
            self._writer.transport.abort()

    async def _submit(self, name: str, requests: Sequence[tuple[int, Request]]) -> None:
        try:
            model = await self._replica.load_model(name)
            guided = [await self._with_guide(model, request) for _, request in requests]
            model = await self._replica.load_model(name)  # it may have had to make room meanwhile
            ready = [replace(request, adapter=model.adapter) for request in guided]  # its number is this replica's own
            streams = self._replica.registry.submit(model, ready)
        except PolyheadError as error:
            for ticket, _ in requests:
                self._add_event(ticket, Failed(error))
            return
        for (ticket, _), stream in zip(requests, streams, strict=True):
            if ticket in self._open_numbers:
                self._streams[ticket] = stream
                self._start_task(self._forward_events(ticket, stream))
            else:  # whoever asked has left meanwhile
                stream.close()

    async def _with_guide(self, model: Model, request: Request) -> Request:
        """With its guide, if it has one, compiled here."""
        if isinstance(request, Generate) and isinstance(asked := request.guide, GuideSpec):
            with name_model_in_errors(model):
                text = self._replica.server.text
                guide = await text.find_guide(model, asked.grammar, asked.thinking, request.terms)
            return replace(request, guide=guide)
        return request

    async def _forward_events(self, ticket: int, stream: Stream) -> None:
        begun = False
        async for event in stream:
            if not begun and stream.timing.started:
                begun = True
                self._add_event(ticket, RequestStarted(stream.timing.started - stream.submitted))
            self._add_event(ticket, event)
            if held := self._paused.get(ticket):
                await held.wait()
            await self._writer.drain()  # at once, unless what was said before is not taken
        self._streams.pop(ticket, None)

    def _add_event(self, ticket: int, event: Event | RequestStarted) -> None:
        """With whatever else is said in this round of the loop: all of a step is one frame."""
        match event:
            case GeneratedToken():
                self.load.count_token(ticket)
            case Done() | Failed():
                self._finish_request(ticket)
            case _:
                pass
        if not self._unsent_events:
            asyncio.get_running_loop().call_soon(self._send_events)
        self._unsent_events.append((ticket, event))

    def _finish_request(self, ticket: int) -> None:
        self._open_numbers.discard(ticket)
        self.load.remove_request(ticket)
        self._resume(ticket)

    def _send_events(self) -> None:
        said, self._unsent_events = tuple(self._unsent_events), []
        try:
            self.send("said", said)
        except FrameError as error:
            for ticket in {ticket for ticket, _ in said}:
                self._drop(ticket, answered=False)
                self.send("said", ((ticket, Failed(AnswerTooLarge(f"it cannot be told: {error}"))),))

    async def _send_layout(self, number: int, name: str) -> None:
        try:
            layout = await self._replica.registry.load_explainer(await self._replica.load_model(name))
        except PolyheadError as error:
            self.send("watched", number, error)
        else:
            self.send("watched", number, dict(layout))
