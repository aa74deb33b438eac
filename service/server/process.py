"""The server as a process: signals, shutdown and exit status.

It shuts down in the opposite order of its start: it stops accepting requests (probes are still answered), finishes the
running ones, stops the engine, closes the connections. If anything hangs meanwhile (a client that does not read, a
step, a tokenizer), the process exits EXIT_SECONDS after `drain_seconds`, counted from the first signal.
"""

import asyncio
import errno
import ipaddress
import logging
import math
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Literal, Protocol, cast

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.server import ServerState

from ..api.access.access_log import RequestTracer
from ..api.access.admission import Admission, AdmissionLimits
from ..api.access.app_state import AppState, EngineProtocol, RegistryProtocol
from ..api.access.auth import Keys
from ..api.access.origins import WILDCARD, OriginPolicy
from ..api.access.rate_limit import Quotas
from ..api.http.body_limits import FULL_BODIES, IncomingBodies
from ..api.http.connection import Connection
from ..api.http.connection_limits import ConnectionLimits, UnsentAnswers
from ..api.http.tls import TlsClient, read_certificate
from ..api.probe_app import ProbeApp
from ..api.shared.openai_errors import write_openai_error
from ..concurrency.loop_errors import LoopErrors
from ..concurrency.server_loop import prefer_socket
from ..config.settings import Settings, SettingsError
from ..core.logs import count_dropped_lines, exit_process, write_lines
from ..core.model import Model
from ..core.request import WorkerTask
from ..engine.worker import RequestEnd, StepReport
from ..metrics import Metrics
from ..resources import capacity
from ..resources.connection_memory import connection_bytes, max_unsent_bytes
from ..resources.key_share import KeyShare
from ..resources.process_info import allow_connections, limit_arenas, process_age
from ..resources.request_memory import BYTES_PER_BODY_BYTE, BYTES_PER_TOKEN, Headroom
from ..text.tokenization import TextProcessor
from .first_steps import ServerAddress, describe_first_steps, program_name
from .garbage_collection import control_garbage_collection

CLOSE_SECONDS = 3  # seconds to send the last errors, after the drain
EXIT_SECONDS = 8  # seconds after which the process exits, whatever still runs
LISTEN_BACKLOG = 4096  # connections that the kernel queues; the client of one more tries again after a second or more
# Connections that are accepted in a turn of the event loop. More shorten the queue that a probe may wait in, and
# lengthen the turn: some hundred microseconds each. They are open before the first of them could close another one, so
# several turns of them must be within the reserve of `service.resources.process_info`.
ACCEPT_BATCH = 32
PROBE_CONNECTIONS = 32  # connections of the probe port
EVENT_LOOP = "polyhead.service.concurrency.server_loop:create_server_loop"  # as uvicorn asks for it
SWITCH_INTERVAL = 0.0005  # seconds a busy thread runs before another one may take the interpreter lock
SEND_BUFFER = 1 << 16  # bytes of an answer that the kernel buffers until they are acknowledged; Linux doubles it
# Bytes that the kernel buffers beyond what the client has room for. A client that reads nothing then costs about 25 KiB
# of the kernel instead of 127, and one that reads gets as many bytes in flight as before.
UNSENT_LOW_WATER = 16 << 10

log = logging.getLogger("polyhead")


@dataclass(frozen=True)
class Telemetry:
    """Observer of requests and steps: it passes events to the metrics, which count them, and to the keys' quotas."""

    metrics: Metrics
    keys: Keys
    quotas: Quotas

    @classmethod
    def from_settings(cls, settings: Settings) -> "Telemetry":
        keys, names_keys = Keys(settings), settings.metrics_access == "key"
        return cls(
            Metrics(settings.models, keys.names, vllm=settings.vllm_metrics, names_keys=names_keys), keys, Quotas()
        )

    def record_step(self, report: StepReport) -> None:
        self.metrics.record_step(report)

    def record_end(self, ended: RequestEnd) -> None:
        self.metrics.record_end(ended)
        self.quotas.add_ended(ended)

    def record_idle(self, model: str, task: WorkerTask) -> None:
        self.metrics.record_idle(model, task)

    def build_server(
        self,
        settings: Settings,
        registry: RegistryProtocol,
        engine: EngineProtocol,
        traces: RequestTracer,
        model_bytes: Callable[[], int] = lambda: 0,
    ) -> AppState:
        """Build what the routes use, around `registry` and `engine`; models hold `model_bytes()` bytes of memory."""
        free = min(capacity.available_memory(), default=math.inf) - connection_bytes(settings)
        share = KeyShare(self.keys.owners, settings.key_share)
        headroom = Headroom(free, lambda: model_bytes() + BYTES_PER_TOKEN * engine.tokens, share)
        text = TextProcessor(
            threads=settings.tokenizer_threads,
            batch_limit=settings.max_batch_texts,
            window_limit=settings.max_tokens_in_flight,
            on_tokenised=self.metrics.record_tokenisation,
            headroom=headroom,
        )
        self.metrics.watch_log(count_dropped_lines)
        bounds = AdmissionLimits(settings.max_requests, settings.max_tokens_in_flight, settings.key_share)
        return AppState(
            settings=settings,
            registry=registry,
            metrics=self.metrics,
            text=text,
            admission=Admission(bounds, engine, self.keys.owners),
            engine=engine,
            keys=self.keys,
            quotas=self.quotas,
            origins=OriginPolicy(settings),
            incoming_bodies=IncomingBodies(
                FULL_BODIES * settings.max_body_bytes, lambda: headroom.total / (2 * BYTES_PER_BODY_BYTE)
            ),
            tracer=traces,
            headroom=headroom,
        )


class LoadedModels(Protocol):
    """What the start-up log line needs of the registry."""

    def names(self) -> list[str]: ...

    def models(self) -> Sequence[Model]: ...

    def stage_seconds(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class StartTimes:
    """When the stages of a start ended, in seconds since the process began."""

    imported: float  # the imports
    fetched: float  # the fetch of quick-start models


def tune_interpreter() -> None:
    """Set up garbage collection and thread switching so that probes are answered while all threads are busy, and the
    heaps of threads.
    """
    control_garbage_collection()
    limit_arenas()
    # A thread that has sent to a client waits this long for the interpreter lock.
    sys.setswitchinterval(SWITCH_INTERVAL)


class ExitTimer(threading.Thread):
    """Calls `exit_now` when the time to exit is over.  It runs from the start of the server and sleeps until a time is
    set, so that a signal handler can set one: it may have interrupted the start of a thread, and could start none.
    """

    def __init__(self, exit_now: Callable[[], None]) -> None:
        super().__init__(name="exit timer", daemon=True)
        self.exit_now = exit_now
        self._limits: SimpleQueue[float | None] = SimpleQueue()  # reentrant, as a signal handler needs it

    def limit(self, seconds: float) -> None:
        """Exit so many seconds from now, whatever was set before."""
        self._limits.put(seconds)

    def cancel(self) -> None:
        self._limits.put(None)

    def run(self) -> None:
        seconds: float | None = None
        while True:
            try:
                seconds = self._limits.get(timeout=seconds)
            except Empty:
                self.exit_now()
                return


class ServerProcess(uvicorn.Server):
    """uvicorn with our signals, log lines and exit status."""

    def __init__(self, settings: Settings, app: FastAPI, listener: socket.socket) -> None:
        server = cast(AppState, app.state.server)
        self.tls = load_tls_context(settings)
        super().__init__(
            build_uvicorn_config(trust_proxies(app, settings), build_connection_limits(settings, server), self.tls)
        )
        self.exit_code = 0
        self.drain_seconds = settings.drain_seconds
        self.admission = server.admission
        self.address = listen_address(settings.host, listener, "https" if self.tls else "http")
        self.is_loopback = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        server.origins.add_bound_address(settings.host, listener.getsockname()[0])
        self.requires_key = server.keys.are_required
        self.public_address = ServerAddress(self.address, self.requires_key, settings.playground)
        self.shows_first_steps = settings.log_format == "console" and log.isEnabledFor(logging.INFO)
        self.allows_any_origin = WILDCARD in settings.cors_origins
        self.listening_since = 0.0  # when it began to listen, in seconds since the process began
        self.deadline = math.inf  # of running requests, by `time.monotonic`
        self.warn_of_less_room: Callable[[], None] = app.state.responses.warn_of_less_room
        self.stop_engine: Callable[[], Awaitable[None]] = app.state.stop
        self.probes = ProbeServer(settings, app, server) if settings.probe_port else None
        self.exit_timer = ExitTimer(self.exit_now)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.exit_timer.start()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(LoopErrors())
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(LISTEN_BACKLOG)
        if self.probes is not None:
            await self.probes.start()
        self.listening_since = process_age()
        is_main_thread = threading.current_thread() is threading.main_thread()
        if (
            is_main_thread and hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        ):  # not so under nohup
            signal.signal(signal.SIGHUP, self.handle_exit)
        self.log_address()

    def log_address(self) -> None:
        """Log the address, and warn if anyone may use the models."""
        clients = "for this machine only" if self.is_loopback else "for all machines that reach it"
        log.info("listening on %s, %s; loading models", self.address, clients)
        if not self.is_loopback and not self.requires_key:
            log.warning(
                "no key is required: every client that reaches it may use the models; see --api-key and --keys-file"
            )
        if self.allows_any_origin and not self.requires_key:
            log.warning("no key is required and cors_origins is *: any web page that a user opens may use the models")

    def on_models_settled(self, registry: LoadedModels, times: StartTimes) -> None:
        """All models are ready or broken. If none is ready, the server exits."""
        ready = registry.models()
        if not ready:
            log.critical("none of %d models could be loaded, exiting", len(registry.names()))
            self.exit_code = 1
            self.start_draining()
            return
        stages = {
            "interpreter and imports": times.imported,
            "fetch": times.fetched - times.imported,
            "listening": max(self.listening_since - times.fetched, 0.0),
            **registry.stage_seconds(),
        }
        line = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items())
        names = ", ".join(model.name for model in ready)
        log.info(
            "ready on %s: %s of %d models in %.1f s (%s)",
            self.address,
            names,
            len(registry.names()),
            process_age(),
            line,
        )
        self.warn_of_less_room()
        if self.shows_first_steps:
            program = program_name(sys.argv[0], Path.cwd())
            write_lines(describe_first_steps(self.public_address, ready, program))

    @property
    def is_draining(self) -> bool:
        return self.deadline < math.inf

    def start_draining(self) -> None:
        if self.is_draining:
            return
        self.exit_timer.limit(self.drain_seconds + EXIT_SECONDS)  # first, so that it exits whatever hangs
        self.admission.close()
        self.deadline = time.monotonic() + self.drain_seconds
        log.info("leaving: %d requests in flight have %d s to finish", self.admission.unfinished, self.drain_seconds)

    def exit_now(self) -> None:
        log.critical("exiting %d s after the time for requests: something hangs", EXIT_SECONDS)
        exit_process(self.exit_code)

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop listening: not while requests are running and have time. Clients with idle connections are
        disconnected meanwhile, so that they connect to another server: here their requests would be rejected.
        """
        if self.is_draining:
            for connection in list(self.server_state.connections):
                cast(Connection, connection).stop_keep_alive()
        is_finished = self.is_draining and (not self.admission.unfinished or time.monotonic() >= self.deadline)
        return await super().on_tick(counter) or is_finished

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The first signal starts the drain; the second exits at once, without the engine's thread."""
        if self.is_draining:
            exit_process(128 + sig)
        self.start_draining()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.admission.unfinished:
            log.warning("%d requests are aborted: their time is over", self.admission.unfinished)
        self.exit_timer.limit(EXIT_SECONDS)
        await self.stop_engine()  # its streams end with an error in the form of their dialect
        await super().shutdown(sockets)
        if self.probes is not None:
            self.probes.close()
        log.info("left")


class ProbeConnection(Connection):
    """A connection whose requests come before those of others."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        prefer_socket(transport.get_extra_info("socket").fileno())


class ProbeServer:
    """A separate listener for probes, on the event loop of the server, so its answers are valid for the server too.

    Raises SettingsError if its port cannot be listened on.
    """

    def __init__(self, settings: Settings, app: FastAPI, server: AppState) -> None:
        self.listener = bind_socket(settings.host, settings.probe_port, "--probe-port")
        limits = replace(
            build_connection_limits(settings, server),
            max_connections=PROBE_CONNECTIONS,
            incoming_bodies=IncomingBodies(),
        )
        self.state = ServerState()
        config = build_uvicorn_config(ProbeApp(app), limits)
        self.connection = partial(ProbeConnection, config, self.state, {}, edge=limits)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(self.connection, sock=self.listener, backlog=ACCEPT_BATCH)
        prefer_socket(self.listener.fileno())

    def close(self) -> None:
        self.server.close()
        for connection in list(self.state.connections):
            cast(Connection, connection).shutdown()


def build_connection_limits(settings: Settings, server: AppState) -> ConnectionLimits:
    return ConnectionLimits(
        header_seconds=settings.header_seconds,
        keep_alive_seconds=settings.keep_alive_seconds,
        write_seconds=settings.write_seconds,
        max_connections=allow_connections(
            settings.max_connections, (PROBE_CONNECTIONS + ACCEPT_BATCH if settings.probe_port else 0) + ACCEPT_BATCH
        ),
        write_error=write_openai_error,
        count_refused=lambda status: server.metrics.record_response("other", "", status),
        count_cut_off=server.metrics.record_cut_connection,
        incoming_bodies=server.incoming_bodies,
        unsent_answers=UnsentAnswers(max_unsent_bytes(settings)),
    )


def load_tls_context(settings: Settings) -> ssl.SSLContext | None:
    """Read the TLS certificate of the settings; None without one. Raises SettingsError if the certificate or its key
    cannot be used.
    """
    if not settings.tls_cert:
        return None
    paths = [str(Path(path).expanduser()) for path in (settings.tls_cert, settings.tls_key) if path]
    for name, path in zip(("tls_cert", "tls_key"), paths, strict=False):
        if not Path(path).is_file():
            raise SettingsError(f"{name}: there is no file {path}")
    try:
        return read_certificate(paths[0], "".join(paths[1:]))
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingsError(f"tls_cert: is no PEM certificate that fits the private key: {reason}") from None


def trust_proxies(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Wrap `app` so that it sees the addresses of clients behind trusted proxies."""
    if not settings.proxy_headers:
        return app
    return cast(ASGIApp, ProxyHeadersMiddleware(cast(Any, app), list(settings.proxy_headers)))


def build_uvicorn_config(
    app: ASGIApp, limits: ConnectionLimits, tls: ssl.SSLContext | None = None, lifespan: Literal["on", "off"] = "on"
) -> uvicorn.Config:
    """Return uvicorn's configuration with our connections, behind a TLS handshake if `tls` is given."""

    def connect(
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.BaseProtocol:
        connection = partial(Connection, config, server_state, app_state, _loop, edge=limits)
        return connection() if tls is None else TlsClient(tls, connection, server_state, limits)

    return uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], connect),
        ws="none",
        loop=EVENT_LOOP,
        backlog=ACCEPT_BATCH,
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )


def bind_socket(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Return a socket bound to the address, before anything slow starts. Raises SettingsError, with the name of `flag`,
    if the address is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is given because asyncio checks it before it switches off Nagle's algorithm, and without that a
    # response in two writes waits 40 ms for the client's acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Both are inherited by every connection.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux, macOS
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_LOW_WATER)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        in_use = error.errno == errno.EADDRINUSE
        reason = "it is in use by another program" if in_use else error.strerror or str(error)
        advice = f"choose another by {flag}" if in_use else f"see --host and {flag}"
        raise SettingsError(f"cannot listen on {host} port {port}: {reason}; {advice}") from None
    return listener


def listen_address(host: str, listener: socket.socket, scheme: str = "http") -> str:
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
