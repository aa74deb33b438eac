"""Assembles a server from its settings: the engine, the models, the application and the process.

The server listens first and loads its models then, so that probes are answered from the start.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI

from polyhead.models.executors.contract import Executor

from ..api.access.access_log import NO_TRACING, RequestTracer
from ..api.app import background_works, build_app
from ..config.settings import Settings
from ..engine.engine import Engine
from ..resources.connection_memory import limit_connections
from ..resources.process_info import process_age, start_background_task
from ..runtime import follower, quickstart
from ..runtime.loader import ExecutorHook
from ..runtime.placement import choose_placement
from ..runtime.rank_processes import torchrun_config
from ..runtime.registry import ModelRegistry
from ..text.tokenization import TextProcessor
from .process import ServerProcess, StartTimes, Telemetry, bind_socket, tune_interpreter

SettledCallback = Callable[[ModelRegistry], None]


def keep_executor(executor: Executor) -> Executor:
    return executor


def serve(settings: Settings, executor_hook: ExecutorHook = keep_executor, traces: RequestTracer = NO_TRACING) -> int:
    """Serve until a signal arrives; returns the exit status, which is 1 if no model could be loaded.

    `executor_hook` is called with every executor and returns the one to use: tests inject faults with it. `traces`
    records every request. Raises SettingsError if the address cannot be listened on, and CheckpointError if quick-start
    models cannot be fetched.
    """
    if (rank_config := torchrun_config(settings, lambda: choose_placement(settings))) is not None:
        tune_interpreter()
        return follower.run_follower(rank_config)
    imported = process_age()
    listener = bind_socket(settings.host, settings.port)
    settings = limit_connections(quickstart.with_sources(settings))
    times = StartTimes(imported, process_age())
    app = assemble(settings, lambda registry: process.on_models_settled(registry, times), executor_hook, traces)
    process = ServerProcess(settings, app, listener)
    tune_interpreter()
    process.run(sockets=[listener])
    return process.exit_code


def assemble(
    settings: Settings,
    on_settled: SettledCallback,
    executor_hook: ExecutorHook = keep_executor,
    traces: RequestTracer = NO_TRACING,
) -> FastAPI:
    """Build the application with its engine and models. `on_settled` is called when every model is ready or broken."""
    telemetry = Telemetry.from_settings(settings)
    placement = choose_placement(settings)
    engine = Engine(telemetry, name=placement.device.type, threads=placement.torch_threads)
    registry = ModelRegistry(engine, settings, observer=telemetry.metrics, executor_hook=executor_hook)
    server = telemetry.build_server(settings, registry, engine, traces, registry.held_bytes)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        engine.start()
        loading = asyncio.create_task(load_models(registry, server.text, on_settled))
        tasks = [start_background_task(work) for work in await background_works(app)]
        yield
        for task in (loading, *tasks):
            task.cancel()
        await engine.close(0)  # running requests have had their time
        server.text.close()
        server.request_threads.close()
        await asyncio.wait([loading])
        await traces.close()

    app = build_app(server, lifespan)
    app.state.stop = lambda: engine.close(0)
    return app


async def load_models(
    registry: ModelRegistry, text: TextProcessor, on_settled: Callable[[ModelRegistry], None]
) -> None:
    await registry.load_all()
    on_settled(registry)
    for model in registry.models():
        text.prepare_grammars(model)  # now, while no request can be delayed by it
