"""A server put together: its settings become an engine, models, an application and a process.

Knows no route.  The one idea: it listens first and loads then, so that probes are answered from the first moment.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI

from models.executor import Executor
from service import quickstart
from service.api.admission import Admission, Bounds
from service.api.app import build
from service.api.quota import Quotas
from service.api.record import UNTRACED, Traces
from service.api.security import Keys, follow
from service.api.server import Server
from service.engine.engine import Engine
from service.engine.worker import Ended, StepReport
from service.loader import Executed
from service.machine import age, keep_low
from service.metrics import Metrics
from service.place import placed
from service.process import Clock, Process, bound, share_the_interpreter
from service.registry import Registry
from service.request import Duty
from service.settings import Settings
from service.text import Text

Told = Callable[[Registry], None]


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
