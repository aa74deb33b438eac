"""The application of a process that serves HTTP for replicas.  It does not import torch, and finds replicas through
`find`.
"""

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from ..api.access.access_log import NO_TRACING, RequestTracer
from ..api.app import background_works, build_app
from ..config.settings import Settings
from ..resources.process_info import start_background_task
from ..server.process import Telemetry
from . import prometheus_targets as targets
from .fleet_engine import Fleet
from .routing import CreatePolicy, PrefixAffinity

FindReplicas = Callable[[Fleet], Coroutine[Any, Any, None]]


def assemble_ingress(
    settings: Settings,
    secret: str,
    find: FindReplicas,
    create_policy: CreatePolicy = PrefixAffinity,
    traces: RequestTracer = NO_TRACING,
) -> FastAPI:
    """Build the application.  `find` runs for ever and updates the fleet's replicas; `secret` is shared with them."""
    telemetry = Telemetry.from_settings(settings)
    fleet = Fleet(list(settings.models), telemetry, secret, create_policy)
    server = telemetry.build_server(settings, fleet, fleet, traces)
    fleet.on_model_available = server.text.prepare_grammars
    telemetry.metrics.watch_replicas(fleet.replicas)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        works = [find(fleet), *await background_works(app)]
        app.state.responses.warn_of_less_room()
        aside = [start_background_task(work) for work in works]
        yield
        for task in aside:
            task.cancel()
        await fleet.close()  # requests in flight had their drain time before this
        server.text.close()
        server.request_threads.close()
        await traces.close()

    app = build_app(server, lifespan)
    app.include_router(targets.router)
    app.state.stop = fleet.close
    return app
