"""A replica: an engine and its models, for requests from other processes.

Each ingress process keeps one connection.  Its requests arrive on it, and all events of a step go back in one frame.
If the connection breaks, its requests are aborted.  This module imports neither Ray nor the HTTP API's routes.
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
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from ..api.access.access_log import NO_TRACING
from ..api.access.auth import watch_keys_file
from ..concurrency.outcome import run_on_daemon_thread
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
    MAX_FRAME_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    FrameError,
    PackedModel,
    RequestStarted,
    SimilarRequest,
    compute_proof,
    encode_frame,
    pack_model,
    row_validator,
)
from .messages import (
    EVENTS_PER_FRAME,
    MAX_TEXT,
    REQUESTS_PER_FRAME,
    MessageRoute,
    PackedRows,
    fill_frames,
    pack_rows,
    read_message,
)
from .model_pool import ModelPool
from .replica_http import ReplicaHttpServer
from .routing import Candidate, RoutingRequest
from .similar_requests import complete_request
from .unauthenticated import UnauthenticatedConnections

LOAD_INTERVAL_S = 0.5  # seconds between two reports of the queued tokens to each connection
AUTHENTICATION_TIMEOUT_S = 10.0  # seconds in which a new connection must prove that it knows the secret
# The fields of each message that an ingress may send.
ASK_FIELDS = row_validator(str, int, Annotated[tuple[tuple[int, int, Any], ...], Field(max_length=REQUESTS_PER_FRAME)])
DROP_FIELDS = row_validator(int, bool)
NUMBER_FIELDS = row_validator(int)
WATCH_FIELDS = row_validator(int, str)
NO_FIELDS = row_validator()

log = logging.getLogger("polyhead.replica")


@dataclass(frozen=True)
class StepObserver:
    """An observer that counts steps only.  Requests are counted by the ingress; counted here too, they would count
    twice.
    """

    metrics: Metrics

    def record_step(self, report: StepReport) -> None:
        self.metrics.record_step(report)

    def record_end(self, ended: RequestEnd) -> None:
        """Count nothing: the ingress counts requests."""

    def record_idle(self, model: str, task: WorkerTask) -> None:
        self.metrics.record_idle(model, task)


class Replica:
    """An engine with its models, behind a socket.  It lives on the event loop thread.  `secret` is shared with the
    ingress.
    """

    def __init__(self, settings: Settings, name: str, secret: str, executor_hook: ExecutorHook = keep_executor) -> None:
        self.name, self._secret = name, secret
        self._drain_s = settings.drain_seconds
        telemetry, placement = Telemetry.from_settings(settings), choose_placement(settings)
        self.engine = Engine(
            StepObserver(telemetry.metrics), name=placement.device.type, threads=placement.torch_threads
        )
        self.registry = ModelRegistry(self.engine, settings, observer=telemetry.metrics, executor_hook=executor_hook)
        self.server = telemetry.build_server(settings, self.registry, self.engine, NO_TRACING, self.registry.held_bytes)
        self.pool = (
            ModelPool(self.registry, settings.models, settings.pool_models, self._drain_s) if settings.pools else None
        )
        self._packed_models: dict[str, tuple[Model, asyncio.Task[PackedModel]]] = {}  # by name
        self._connections: set[IngressConnection] = set()
        self._unauthenticated = UnauthenticatedConnections()

    @property
    def queued_tokens(self) -> int:
        """Tokens still to be computed, of all open requests."""
        return sum(visitor.load.queued_tokens for visitor in self._connections)

    async def start(self, host: str, ports: Iterable[int] = (0,)) -> int:
        """Load the models, then listen for ingress processes on the first free port of `ports`, and for HTTP on the
        next.  Returns the first.

        Raises Unavailable if no model could be loaded, OSError if no port is free.
        """
        self.engine.start()
        if self.pool:
            self.registry.defer_loading()
            await self.pool.start()
        else:
            await self.registry.load_all()
        if not self.models:
            raise Unavailable("; ".join(f"{name}: {why}" for name, why in self.broken.items()))
        ingress_socket, http_socket = bind_socket(host, ports), bind_socket(host, ports)
        # The event loop accepts up to TAKEN connections in each of a few turns before it can close the first. Others
        # wait in the kernel.
        self._listener = await asyncio.start_server(self._accept, sock=ingress_socket, backlog=ACCEPT_BATCH)
        ingress_socket.listen(LISTEN_BACKLOG)
        self._http_port = int(http_socket.getsockname()[1])
        self._http_server = ReplicaHttpServer(self.server, http_socket)
        await self._http_server.start()
        self._background_tasks = [
            start_background_task(self._send_load()),
            start_background_task(watch_keys_file(self.server.keys)),
        ]
        log.info(
            "%s answers on %s:%d, its metrics are on %s:%d",
            self.name,
            *ingress_socket.getsockname(),
            *http_socket.getsockname(),
        )
        return int(ingress_socket.getsockname()[1])

    def failure_reasons(self) -> list[str]:
        """Return why Ray should replace this replica; empty if it should not."""
        return self.server.fatal_reasons() + [f"{model} cannot compute any more" for model in self.engine.failing()]

    @property
    def models(self) -> Sequence[Model]:
        """The models that requests may name."""
        return list(self.pool.models.values()) if self.pool else self.registry.models()

    @property
    def broken(self) -> Mapping[str, str]:
        states = self.registry.states().items()
        return self.pool.broken if self.pool else {name: one.reason for name, one in states if one.phase == "broken"}

    async def load_model(self, name: str) -> Model:
        """Return the model, loaded if it is of a pool.  Raises Unavailable if it is not on this replica."""
        if self.pool:
            return await self.pool.load_model(name)
        for model in self.registry.models():
            if model.name == name:
                return model
        raise Unavailable(f"{name} is not on this replica any more; send it again", retry_after=1)

    async def close(self) -> None:
        """Leave: wait until each ingress sends its requests elsewhere, drain the engine, then close."""
        self.server.admission.close()
        self._listener.close()
        visitors = list(self._connections)
        for visitor in visitors:
            visitor.send("leaving")
        if visitors:  # requests that were sent before the message arrived
            await asyncio.wait(
                [asyncio.create_task(visitor.has_left.wait()) for visitor in visitors], timeout=LEAVE_TIMEOUT_S
            )
        await self.engine.close(self._drain_s)
        await asyncio.sleep(0)  # let the last events be sent
        for task in self._background_tasks:
            task.cancel()
        await self._http_server.close()
        for visitor in list(self._connections):
            await visitor.close()
        self.server.text.close()
        self.server.request_threads.close()

    async def hello_message(self) -> tuple[Any, ...]:
        """Return the hello message: models with their digests, failures, port and cache size."""
        models = tuple([await self._pack_model(model) for model in self.models])
        block_count, size = self.registry.cache_size()
        broken = {name: why[:MAX_TEXT] for name, why in self.broken.items()}
        return ("hello", PROTOCOL_VERSION, self.name, self._http_port, models, broken, block_count, size)

    async def _pack_model(self, model: Model) -> PackedModel:
        """Encode a model on a thread, once for all connections."""
        known, task = self._packed_models.get(model.name, (None, None))
        if known is not model or task is None:
            task = asyncio.create_task(run_on_daemon_thread(partial(pack_model, model)))
            self._packed_models[model.name] = model, task
        return await asyncio.shield(task)

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
        hello = encode_frame(await self.hello_message())
        visitor = IngressConnection(self, writer)
        self._connections.add(visitor)
        writer.write(hello)
        if self.server.admission.is_draining:  # the replica began to leave while its models were encoded
            visitor.send("leaving")
        try:
            await visitor.serve(reader)
        finally:
            visitor.has_left.set()
            self._connections.discard(visitor)
            await visitor.close()

    async def _send_load(self) -> None:
        while True:
            await asyncio.sleep(LOAD_INTERVAL_S)
            reasons = tuple(why[:MAX_TEXT] for why in self.server.unready_reasons())
            loaded = self.pool.loaded_names if self.pool else None
            for visitor in self._connections:
                visitor.send("load", self.queued_tokens - visitor.load.queued_tokens, reasons, loaded)


def bind_socket(host: str, ports: Iterable[int]) -> socket.socket:
    """Return a socket that listens on the first free port.  Raises OSError if none is free."""
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
    """Prove to each other that both know the secret.  Raises FrameError.

    No other byte of the peer is read before that.
    """
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    writer.write(own_nonce)
    peer_nonce, peer_proof = await reader.readexactly(NONCE_BYTES), await reader.readexactly(NONCE_BYTES)
    if not hmac.compare_digest(peer_proof, compute_proof(secret, "asks", own_nonce)):
        raise FrameError("it does not know the secret")
    writer.write(compute_proof(secret, "answers", peer_nonce))


class IngressConnection:
    """The connection of one ingress process.  `load` counts its requests and the tokens that are left to compute."""

    def __init__(self, replica: Replica, writer: StreamWriter) -> None:
        self.load, self.has_left = Candidate(""), asyncio.Event()
        self._replica, self._writer = replica, writer
        self._open_numbers: set[int] = set()  # open requests, some of them not submitted yet
        self._streams: dict[int, Stream] = {}
        self._paused: dict[int, asyncio.Event] = {}
        self._unsent_events: list[tuple[int, Event | RequestStarted]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._routes: Mapping[str, MessageRoute] = {
            "ask": MessageRoute(ASK_FIELDS, self._on_ask, MAX_FRAME_BYTES),
            "drop": MessageRoute(DROP_FIELDS, self._drop),
            "hold": MessageRoute(NUMBER_FIELDS, self._hold),
            "resume": MessageRoute(NUMBER_FIELDS, self._resume),
            "watch": MessageRoute(WATCH_FIELDS, self._on_watch),
            "left": MessageRoute(NO_FIELDS, self.has_left.set),
        }

    async def serve(self, reader: StreamReader) -> None:
        """Read messages until the connection ends."""
        try:
            while True:
                call_route = await read_message(reader, self._routes)
                if (work := call_route()) is not None:
                    await work
        except (OSError, asyncio.IncompleteReadError):
            pass  # the peer has left; its requests are aborted
        except FrameError as error:
            log.error("a connection is closed: it sent what the protocol does not allow: %s", error)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for stream in list(self._streams.values()):
            stream.close()
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    def send(self, *fields: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode_frame(fields))

    # Messages of the ingress

    def _on_ask(self, name: str, answer: int, rows: Sequence[tuple[int, int, Request | SimilarRequest]]) -> None:
        requests = dict[int, Request]()
        for number, left, row in rows:
            request = complete_request(row, requests) if isinstance(row, SimilarRequest) else row
            if not isinstance(request, Request) or number in self._open_numbers:
                raise FrameError("it sent what is no request, or a number that is in use")
            if not (answer >= 0 and 0 <= left <= request.prompt_tokens):
                raise FrameError(
                    f"{left} tokens are left to compute of {request.prompt_tokens}, and {answer} to answer"
                )
            requests[number] = request
            self._open_numbers.add(number)
            self.load.add_request(number, RoutingRequest(left, answer))
        self._start_task(self._submit(name, list(requests.items())))

    def _drop(self, number: int, answered: bool) -> None:
        self._finish_request(number)
        if stream := self._streams.pop(number, None):
            stream.close(answered=answered)

    def _hold(self, number: int) -> None:
        if number in self._open_numbers:
            self._paused[number] = asyncio.Event()

    def _resume(self, number: int) -> None:
        if paused := self._paused.pop(number, None):
            paused.set()

    def _on_watch(self, number: int, name: str) -> None:
        self._start_task(self._send_layout(number, name))

    # Tasks and events

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        """Abort the connection if a task failed: the ingress then fails or resends the requests of it."""
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("a connection is closed after an internal error", exc_info=fault)
            self._writer.transport.abort()

    async def _submit(self, name: str, requests: Sequence[tuple[int, Request]]) -> None:
        try:
            model = await self._replica.load_model(name)
            guided = [await self._with_guide(model, request) for _, request in requests]
            model = await self._replica.load_model(name)  # the pool may have unloaded it meanwhile
            ready = [replace(request, adapter=model.adapter) for request in guided]  # adapter numbers differ by replica
            streams = self._replica.registry.submit(model, ready)
        except PolyheadError as error:
            for number, _ in requests:
                self._add_event(number, Failed(error))
            return
        for (number, _), stream in zip(requests, streams, strict=True):
            if number in self._open_numbers:
                self._streams[number] = stream
                self._start_task(self._forward_events(number, stream))
            else:  # the request was dropped meanwhile
                stream.close()

    async def _with_guide(self, model: Model, request: Request) -> Request:
        """Return the request with its guide compiled, if it has one."""
        if isinstance(request, Generate) and isinstance(spec := request.guide, GuideSpec):
            with name_model_in_errors(model):
                text = self._replica.server.text
                guide = await text.find_guide(model, spec.grammar, spec.thinking, request.terms)
            return replace(request, guide=guide)
        return request

    async def _forward_events(self, number: int, stream: Stream) -> None:
        is_started = False
        async for event in stream:
            if not is_started and stream.timing.started:
                is_started = True
                self._add_event(number, RequestStarted(stream.timing.started - stream.submitted))
            self._add_event(number, event)
            if paused := self._paused.get(number):
                await paused.wait()
            await self._writer.drain()  # returns at once unless the send buffer is full
        self._streams.pop(number, None)

    def _add_event(self, number: int, event: Event | RequestStarted) -> None:
        """Queue an event.  All events of one turn of the event loop are sent in one frame."""
        match event:
            case GeneratedToken():
                self.load.count_token(number)
            case Done() | Failed():
                self._finish_request(number)
            case _:
                pass
        if not self._unsent_events:
            asyncio.get_running_loop().call_soon(self._send_events)
        self._unsent_events.append((number, event))

    def _finish_request(self, number: int) -> None:
        self._open_numbers.discard(number)
        self.load.remove_request(number)
        self._resume(number)

    def _send_events(self) -> None:
        unsent, self._unsent_events = self._unsent_events, []
        parts = list[PackedRows]()
        for event in unsent:
            try:
                parts.append(pack_rows([event]))
            except FrameError as error:
                self._drop(event[0], answered=False)
                parts.append(pack_rows([(event[0], Failed(AnswerTooLarge(f"it cannot be sent: {error}")))]))
        if not self._writer.is_closing():
            for frame in fill_frames(("said",), parts, EVENTS_PER_FRAME):
                self._writer.write(frame)

    async def _send_layout(self, number: int, name: str) -> None:
        try:
            layout = await self._replica.registry.load_explainer(await self._replica.load_model(name))
        except PolyheadError as error:
            self.send("watched", number, error)
        else:
            self.send("watched", number, dict(layout))
