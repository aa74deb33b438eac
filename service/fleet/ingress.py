"""The application of a process that speaks for replicas and computes nothing itself.

Knows no torch, and not who starts replicas: `find` lists them.
"""

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from ..api.access.access_log import NO_TRACING, RequestTracer
from ..api.access.auth import watch_keys_file
from ..api.app import build_app
from ..config.settings import Settings
from ..resources.process_info import start_background_task, trim_heap_forever
from ..server.process import Telemetry
from . import prometheus_targets as targets
from .fleet_engine import Fleet
from .routing import CreatePolicy, PrefixAffinity

FindReplicas = Callable[[Fleet], Coroutine[Any, Any, None]]


def assemble_ingress(
    settings: Settings,
    secret: str,
    find: FindReplicas,
    routed: CreatePolicy = PrefixAffinity,
    traces: RequestTracer = NO_TRACING,
) -> FastAPI:
    """`find` tells the fleet for ever which replicas there are; `secret` is what they know."""
    books = Telemetry.from_settings(settings)
    fleet = Fleet(list(settings.models), books, secret, routed)
    server = books.build_server(settings, fleet, fleet, traces)
    fleet.on_model_available = server.text.prepare_grammars
    books.metrics.watch_replicas(fleet.replicas)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        aside = [
            start_background_task(work) for work in (find(fleet), trim_heap_forever(), watch_keys_file(books.keys))
        ]
        yield
        for task in aside:
            task.cancel()
        await fleet.close()  # what was in flight has had its time
        server.text.close()
        await traces.close()

    app = build_app(server, lifespan)
    app.include_router(targets.router)
    app.state.stop = fleet.close
    return app
