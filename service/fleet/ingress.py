"""The application of a process that speaks for replicas and computes nothing itself.

Knows no torch, and not who starts replicas: `find` lists them.
"""

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from ..api.access.access_log import UNTRACED, Traces
from ..api.access.auth import follow
from ..api.app import build
from ..config.settings import Settings
from ..resources.process_info import beside, keep_low
from ..server.process import Books
from . import prometheus_targets as targets
from .fleet_engine import Fleet
from .routing import Affine, Routed

Find = Callable[[Fleet], Coroutine[Any, Any, None]]


def assemble(
    settings: Settings, secret: str, find: Find, routed: Routed = Affine, traces: Traces = UNTRACED
) -> FastAPI:
    """`find` tells the fleet for ever which replicas there are; `secret` is what they know."""
    books = Books.of(settings)
    fleet = Fleet(list(settings.models), books, secret, routed)
    server = books.server(settings, fleet, fleet, traces)
    fleet.heard = server.text.expect
    books.metrics.watch_replicas(fleet.roll)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        aside = [beside(work) for work in (find(fleet), keep_low(), follow(books.keys))]
        yield
        for task in aside:
            task.cancel()
        await fleet.close()  # what was in flight has had its time
        server.text.close()
        await traces.close()

    app = build(server, lifespan)
    app.include_router(targets.router)
    app.state.stop = fleet.close
    return app
