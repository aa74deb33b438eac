"""A server put together: its settings become an engine, models, an application and a process.

Knows no route.  The one idea: it listens first and loads then, so that probes are answered from the first moment.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI

from polyhead.models.executors.contract import Executor

from ..api.access.access_log import UNTRACED, Traces
from ..api.access.auth import follow
from ..api.app import build
from ..config.settings import Settings
from ..engine.engine import Engine
from ..resources.process_info import age, beside, keep_low
from ..runtime import follower, quickstart
from ..runtime.loader import Executed
from ..runtime.placement import placed
from ..runtime.rank_processes import launched
from ..runtime.registry import Registry
from ..text.tokenization import Text
from .process import Books, Clock, Process, bound, share_the_interpreter

Told = Callable[[Registry], None]


def unchanged(executor: Executor) -> Executor:
    return executor


def serve(settings: Settings, executed: Executed = unchanged, traces: Traces = UNTRACED) -> int:
    """Serve until a signal comes; the exit status.  1 if no model could be loaded.

    `executed` gets every executor and gives the one to be used: tests put faults in between.  `traces` is told of every
    request.  Raises SettingsError if the address cannot be listened on, CheckpointError if quick-start models cannot be
    fetched.
    """
    if (follows := launched(settings, lambda: placed(settings))) is not None:
        return follower.follow(follows)
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


def assemble(settings: Settings, settled: Told, executed: Executed = unchanged, traces: Traces = UNTRACED) -> FastAPI:
    """The application, its engine and its models; `settled` hears when every model is ready or broken."""
    books = Books.of(settings)
    place = placed(settings)
    engine = Engine(books, name=place.device.type, threads=place.torch_threads)
    registry = Registry(engine, settings, told=books.metrics, executed=executed)
    server = books.server(settings, registry, engine, traces, registry.held)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        engine.start()
        loading = asyncio.create_task(load(registry, server.text, settled))
        aside = [beside(keep_low()), beside(follow(books.keys))]
        yield
        for task in (loading, *aside):
            task.cancel()
        await engine.close(0)  # what was in flight has had its time
        server.text.close()
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
