"""The server as a process: what is put together at start, what happens at a signal, how it ends.

Knows no route.  The one idea: it listens first and loads then, so that probes are answered from the first moment; and
it leaves in the opposite order: not ready and nothing new (still answering probes), what is in flight, the engine,
the connections.
"""

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import FrameType

import uvicorn
from fastapi import FastAPI

from service import quickstart
from service.api.admission import Admission
from service.api.app import build
from service.api.server import Server
from service.engine.engine import Engine
from service.machine import compute_threads
from service.metrics import Metrics
from service.registry import Registry, placed
from service.settings import Settings, SettingsError
from service.text import Text

LAST_WORDS = 5  # seconds for errors to leave, once the time is over
KEEP_ALIVE = 75  # seconds an idle connection is kept: longer than clients keep theirs, so that they close first

log = logging.getLogger("polyhead")


@dataclass(frozen=True)
class Clock:
    """When the stages of a start were reached, on `time.perf_counter`."""

    began: float  # the command
    imported: float  # its code
    fetched: float  # the models


def serve(settings: Settings, began: float) -> int:
    """Serve until a signal comes; the exit status.  1 if no model could be loaded.

    Raises SettingsError if the address cannot be listened on, CheckpointError if quick-start models cannot be fetched.
    """
    imported = time.perf_counter()
    listener = bound(settings.host, settings.port)
    if not settings.models:
        quickstart.fetch_all(settings.model_dir)
        settings = settings.model_copy(update={"models": quickstart.sources(settings.model_dir)})
    clock = Clock(began, imported, time.perf_counter())
    admission = Admission(settings.max_requests)
    process = Process(settings, admission, listener)
    process.config.app = app = assemble(settings, admission, lambda registry: process.settled(registry, clock))
    process.stop = app.state.stop
    process.run(sockets=[listener])
    return process.code


def assemble(settings: Settings, admission: Admission, settled: Callable[[Registry], None]) -> FastAPI:
    """The application, its engine and its models; `settled` hears when every model is ready or broken."""
    metrics = Metrics(settings.models)
    engine = Engine(metrics, name=placed(settings).device.type, threads=settings.threads or compute_threads())
    registry = Registry(engine, settings, told=metrics)
    text = Text(threads=settings.tokenizer_threads, batch_limit=settings.max_batch_texts, tokenised=metrics.tokenised)
    server = Server(
        settings=settings,
        registry=registry,
        metrics=metrics,
        text=text,
        admission=admission,
        alive=lambda: engine.alive,
    )

    async def load() -> None:
        await registry.load_all()
        settled(registry)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        engine.start()
        loading = asyncio.create_task(load())
        yield
        loading.cancel()
        await engine.close(0)  # what was in flight has had its time
        text.close()
        await asyncio.wait([loading])

    app = build(server, lifespan)
    app.state.stop = lambda: engine.close(0)
    return app


class Process(uvicorn.Server):
    """uvicorn with our signals, our lines in the log, and an exit status."""

    def __init__(self, settings: Settings, admission: Admission, listener: socket.socket) -> None:
        super().__init__(configured())
        self.code = 0
        self.drain = settings.drain_seconds
        self.admission = admission
        self.address = address(settings.host, listener)
        self.deadline = math.inf  # of what is in flight, on `time.monotonic`
        self.stop: Callable[[], Awaitable[None]]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info("listening on %s, loading models", self.address)

    def settled(self, registry: Registry, clock: Clock) -> None:
        """All models are ready or broken.  Without any there is nothing to stay for."""
        ready, now = registry.models(), time.perf_counter()
        if not ready:
            log.critical("none of %d models could be loaded, leaving", len(registry.names()))
            self.code = 1
            self.leave()
            return
        log.info(
            "ready on %s: %s of %d models in %.1f s (start %.1f s, fetch %.1f s, load and warm up %.1f s)",
            *(self.address, ", ".join(model.name for model in ready), len(registry.names()), now - clock.began),
            *(clock.imported - clock.began, clock.fetched - clock.imported, now - clock.fetched),
        )

    @property
    def leaving(self) -> bool:
        return self.deadline < math.inf

    def leave(self) -> None:
        self.admission.close()
        self.deadline = time.monotonic() + self.drain
        log.info("leaving: %d requests in flight have %d s to finish", self.admission.in_flight, self.drain)

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop listening: not while something is in flight and has time."""
        over = self.leaving and (not self.admission.in_flight or time.monotonic() >= self.deadline)
        return await super().on_tick(counter) or over

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The first signal drains; the second doesn't wait for anything, not even for the engine's thread."""
        if self.leaving:
            os._exit(128 + sig)
        self.leave()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.admission.in_flight:
            log.warning("%d requests are cut: they had their time", self.admission.in_flight)
        await self.stop()  # whose streams end with an error, in the words of their dialect
        await super().shutdown(sockets)
        log.info("left")


def configured() -> uvicorn.Config:
    return uvicorn.Config(
        "",  # the application follows: it wants to know the process
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=LAST_WORDS,
    )


def bound(host: str, port: int) -> socket.socket:
    """A socket that has the address, before anything slow is begun.  Raises SettingsError if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio looks for it before it switches off Nagle's algorithm, and without that a
    # response in two writes waits 40 ms for the client's acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise SettingsError(f"cannot listen on {host} port {port}: {reason}; see --host and --port") from None
    return listener


def address(host: str, listener: socket.socket) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
