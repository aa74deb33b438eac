"""The server as a process: what is put together at start, what happens at a signal, how it ends.

Knows no route.  The one idea: it listens first and loads then, so that probes are answered from the first moment; and
it leaves in the opposite order: not ready and nothing new (still answering probes), what is in flight, the engine,
the connections.  Whatever hangs meanwhile (a client that doesn't read, a step, a tokeniser), GRACE seconds after
`drain_seconds` the process is gone.
"""

import asyncio
import gc
import ipaddress
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import cast

import uvicorn
from fastapi import FastAPI

from models.executor import Executor
from service import quickstart
from service.api.admission import Admission, Bounds
from service.api.alike import write_error
from service.api.app import build
from service.api.connection import Connection, Edge
from service.api.quota import Quotas
from service.api.record import UNTRACED, Traces
from service.api.security import Keys, follow
from service.api.server import Server
from service.engine.engine import Engine
from service.engine.worker import Ended, StepReport
from service.loader import Executed
from service.machine import age, keep_low, sockets
from service.metrics import Metrics
from service.place import placed
from service.registry import Registry
from service.request import Duty
from service.settings import Settings, SettingsError
from service.text import Text

LAST_WORDS = 3  # seconds for errors to leave, once the time is over
GRACE = 8  # seconds after which the process is gone, whatever still hangs
WAITING = 2048  # connections that the kernel keeps until they are taken
TAKEN = 16  # of them at once, each before the next could find that no more files may be open
SWITCH = 0.0005  # seconds a busy thread computes before it lets another one
SEND_BUFFER = 1 << 16  # bytes of an answer that the kernel keeps for a client that doesn't read; Linux doubles it

Told = Callable[[Registry], None]

log = logging.getLogger("polyhead")


@dataclass(frozen=True)
class Clock:
    """When the stages of a start were reached, in seconds since the process began."""

    imported: float  # its code
    fetched: float  # the models


@dataclass(frozen=True)
class Accounts:
    """What the engine tells goes to the page, which counts it, and to the keys, which pay for it."""

    metrics: Metrics
    quotas: Quotas

    def step(self, report: StepReport) -> None:
        self.metrics.step(report)

    def ended(self, ended: Ended) -> None:
        self.metrics.ended(ended)
        self.quotas.ended(ended)

    def rested(self, model: str, task: Duty) -> None:
        self.metrics.rested(model, task)


def unchanged(executor: Executor) -> Executor:
    return executor


def serve(settings: Settings, executed: Executed = unchanged, traces: Traces = UNTRACED) -> int:
    """Serve until a signal comes; the exit status.  1 if no model could be loaded.

    `executed` gets every executor and gives the one to be used: tests put faults in between.  `traces` is told of every
    request.  Raises SettingsError if the address cannot be listened on, CheckpointError if quick-start models cannot be
    fetched.
    """
    imported = age()
    listener = bound(settings.host, settings.port)
    if not settings.models:
        quickstart.fetch_all(settings.model_dir)
        settings = settings.model_copy(update={"models": quickstart.sources(settings.model_dir)})
    clock = Clock(imported, age())
    app = assemble(settings, lambda registry: process.settled(registry, clock), executed, traces)
    process = Process(settings, app, listener)
    share_the_interpreter()
    process.run(sockets=[listener])
    return process.code


def share_the_interpreter() -> None:
    """Let no thread keep the others waiting: probes are to be answered while all are busy."""
    # What is there now, code for the most part, stays.  To look through it for garbage would stop every thread for a
    # tenth of a second, again and again.
    gc.freeze()
    gc.enable()
    # A thread that sends to a client has to ask for the interpreter again afterwards, and waits so long for it.
    sys.setswitchinterval(SWITCH)


def assemble(settings: Settings, settled: Told, executed: Executed = unchanged, traces: Traces = UNTRACED) -> FastAPI:
    """The application, its engine and its models; `settled` hears when every model is ready or broken."""
    keys, quotas = Keys(settings), Quotas()
    metrics = Metrics(settings.models, keys.names, vllm=settings.vllm_metrics)
    place = placed(settings)
    engine = Engine(Accounts(metrics, quotas), name=place.device.type, threads=place.torch_threads)
    registry = Registry(engine, settings, told=metrics, executed=executed)
    text = Text(threads=settings.tokenizer_threads, batch_limit=settings.max_batch_texts, tokenised=metrics.tokenised)
    bounds = Bounds(settings.max_requests, settings.max_tokens_in_flight, settings.key_share)
    server = Server(
        settings=settings,
        registry=registry,
        metrics=metrics,
        text=text,
        admission=Admission(bounds, engine, keys.owners),
        engine=engine,
        keys=keys,
        quotas=quotas,
        traces=traces,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        engine.start()
        loading = asyncio.create_task(load(registry, text, settled))
        beside = [asyncio.create_task(keep_low()), asyncio.create_task(follow(keys))]
        yield
        for task in (loading, *beside):
            task.cancel()
        await engine.close(0)  # what was in flight has had its time
        text.close()
        await asyncio.wait([loading])
        await traces.close()

    app = build(server, lifespan)
    app.state.stop = lambda: engine.close(0)
    return app


async def load(registry: Registry, text: Text, settled: Callable[[Registry], None]) -> None:
    await registry.load_all()
    settled(registry)
    for model in registry.models():
        text.expect(model)  # now: nobody is answered yet whom that could hold up


class Process(uvicorn.Server):
    """uvicorn with our signals, our lines in the log, and an exit status."""

    def __init__(self, settings: Settings, app: FastAPI, listener: socket.socket) -> None:
        server = cast(Server, app.state.server)
        super().__init__(configured(app, edge_of(settings, server.metrics)))
        self.code = 0
        self.drain = settings.drain_seconds
        self.admission = server.admission
        self.address = address(settings.host, listener)
        self.private = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        self.asked = server.keys.asked
        self.listening = 0.0  # since when, in seconds since the process began
        self.deadline = math.inf  # of what is in flight, on `time.monotonic`
        self.stop: Callable[[], Awaitable[None]] = app.state.stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(WAITING)
        self.listening = age()
        self.announce()

    def announce(self) -> None:
        """Whoever can reach it may ask, unless a key is asked for."""
        whom = "for this machine only" if self.private else "for whoever reaches it"
        log.info("listening on %s, %s; loading models", self.address, whom)
        if not self.private and not self.asked:
            log.warning("no key is asked for: whoever reaches it may use the models; see --api-key and --keys-file")

    def settled(self, registry: Registry, clock: Clock) -> None:
        """All models are ready or broken.  Without any there is nothing to stay for."""
        ready = registry.models()
        if not ready:
            log.critical("none of %d models could be loaded, leaving", len(registry.names()))
            self.code = 1
            self.leave()
            return
        stages = {
            "interpreter and imports": clock.imported,
            "fetch": clock.fetched - clock.imported,
            "listening": max(self.listening - clock.fetched, 0.0),
            **registry.spent(),
        }
        line = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items())
        names = ", ".join(model.name for model in ready)
        log.info("ready on %s: %s of %d models in %.1f s (%s)", self.address, names, len(registry.names()), age(), line)

    @property
    def leaving(self) -> bool:
        return self.deadline < math.inf

    def leave(self) -> None:
        self.admission.close()
        self.deadline = time.monotonic() + self.drain
        log.info("leaving: %d requests in flight have %d s to finish", self.admission.in_flight, self.drain)

    def abandon(self) -> None:
        log.critical("something hangs and is left behind, %d s after the end began", GRACE)
        os._exit(self.code)

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
        hanging = threading.Timer(GRACE, self.abandon)
        hanging.daemon = True
        hanging.start()
        await self.stop()  # whose streams end with an error, in the words of their dialect
        await super().shutdown(sockets)
        log.info("left")


def edge_of(settings: Settings, metrics: Metrics) -> Edge:
    return Edge(
        header_seconds=settings.header_seconds,
        keep_alive_seconds=settings.keep_alive_seconds,
        write_seconds=settings.write_seconds,
        most=sockets(settings.max_connections),
        words=write_error,
        refused=lambda status: metrics.answered("other", "", status),
        cut=metrics.cut,
    )


def configured(app: FastAPI, edge: Edge) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], partial(Connection, edge=edge)),
        ws="none",
        backlog=TAKEN,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=LAST_WORDS,
    )


def bound(host: str, port: int) -> socket.socket:
    """A socket that has the address, before anything slow is begun.  Raises SettingsError if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio looks for it before it switches off Nagle's algorithm, and without that a
    # response in two writes waits 40 ms for the client's acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # of every connection
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise SettingsError(f"cannot listen on {host} port {port}: {reason}; see --host and --port") from None
    return listener


def address(host: str, listener: socket.socket) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
