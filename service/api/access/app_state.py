"""What the routes of one application reach: `request.app.state.server`.

Knows no torch: the registry and the engine are whatever answers these questions.  The one idea: every dialect submits
here, so that the last look at deadline and bounds, and the first count, have one place.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import methodcaller
from typing import Protocol

from ...concurrency.time_slices import SLICE_SIZE, call_in_slices
from ...config.settings import Settings
from ...core.model import LoadState, Model, ServedName, name_model_in_errors
from ...core.request import ExplainTextRequest, Generate, Request
from ...metrics import Metrics, ObservedEngine
from ...resources.request_memory import UNBOUNDED_HEADROOM, Headroom
from ...runtime.operation import ModelOperation
from ...text.detokenizer import EventSource
from ...text.tokenization import TextProcessor
from ..http.body_limits import IncomingBodies
from .access_log import NO_TRACING, RequestTracer
from .admission import Admission, TokenLoad
from .auth import Keys
from .authorized_models import Resolver
from .origins import OriginPolicy
from .rate_limit import Quotas
from .request_context import RequestContext


class RegistryProtocol(Resolver, Protocol):
    """Served models, as far as HTTP asks."""

    def submit(self, model: Model, requests: Sequence[Request]) -> Sequence[EventSource]: ...

    async def load_explainer(self, model: Model) -> Mapping[str, tuple[int, int]]: ...

    def states(self) -> Mapping[str, LoadState]: ...

    # what administrators ask; see service.runtime.registry

    @property
    def operation(self) -> ModelOperation | None: ...

    def model_statuses(self) -> list[ServedName]: ...

    def memory_budget(self) -> tuple[int, int]: ...

    def load(self, name: str, source: str, *, merge: bool = False) -> ModelOperation: ...

    def reload(self, name: str, source: str, drain_s: float) -> ModelOperation: ...

    def unload(self, name: str, drain_s: float) -> ModelOperation: ...

    def alias(self, alias: str, name: str) -> None: ...

    def unalias(self, alias: str) -> None: ...


class EngineProtocol(TokenLoad, ObservedEngine, Protocol):
    """Whether the thread that computes runs, and how far it gets."""

    @property
    def alive(self) -> bool: ...

    def failing(self) -> list[str]:
        """Models that cannot compute any more."""


@dataclass(frozen=True, kw_only=True)
class AppState:
    settings: Settings
    registry: RegistryProtocol
    metrics: Metrics
    text: TextProcessor
    admission: Admission
    engine: EngineProtocol
    keys: Keys
    quotas: Quotas
    origins: OriginPolicy
    incoming_bodies: IncomingBodies
    tracer: RequestTracer = NO_TRACING
    headroom: Headroom = UNBOUNDED_HEADROOM

    def submit(self, visit: RequestContext, model: Model, requests: Sequence[Request]) -> Sequence[EventSource]:
        """All of `requests`, or none.  Raises Expired or Overloaded, and what the engine raises."""
        with name_model_in_errors(model):
            visit.check_deadline()
            self.admission.check_tokens(visit.owner, count_prompt_tokens(requests))
        return self._submit(visit, model, requests)

    async def submit_in_slices(
        self, visit: RequestContext, model: Model, requests: Sequence[Request]
    ) -> Sequence[EventSource]:
        """The same of a call with any number of them, a slice in one turn of the event loop.

        There is room for all of them before the first is submitted.  Where a later one cannot be, or the deadline
        passes or the client leaves meanwhile, those before it are aborted.
        """
        if len(requests) <= SLICE_SIZE:
            return self.submit(visit, model, requests)
        sources, whole = list[EventSource](), False
        try:
            with (
                name_model_in_errors(model),
                self.admission.reserve_tokens(visit.owner, count_prompt_tokens(requests)) as submitted,
            ):
                for some in split_requests(requests):
                    visit.check_deadline()
                    sources += self._submit(visit, model, some)
                    submitted(count_prompt_tokens(some))
                    await asyncio.sleep(0)
            whole = True
        finally:
            if not whole:  # cancelled, perhaps: only this function has the sources, to close them
                call_in_slices(methodcaller("close"), sources)
        return sources

    def _submit(self, visit: RequestContext, model: Model, requests: Sequence[Request]) -> Sequence[EventSource]:
        with name_model_in_errors(model):
            sources = self.registry.submit(model, requests)
        self.admission.add_submitted(visit.owner, count_prompt_tokens(requests))
        self.quotas.add_submitted(visit.owner, requests)
        explains = any(isinstance(request, ExplainTextRequest) for request in requests)
        self.metrics.record_submitted(model.name, "explain" if explains else model.task, len(requests))
        visit.is_counted = True
        visit.timings += [source.timing for source in sources]
        return sources

    async def load_explainer(self, model: Model) -> Mapping[str, tuple[int, int]]:
        """See to it that `model` can be explained: the layers and heads of each kind of attention it has."""
        return await self.registry.load_explainer(model)

    @property
    def has_admin_key(self) -> bool:
        """Whether models may be changed by whoever has the key."""
        return self.keys.has_admin_key

    @property
    def is_started(self) -> bool:
        """Every model of the settings is loaded and warm, or known to be broken."""
        states = self.registry.states()
        return all(states[name].is_final for name in self.settings.models if name in states)

    def fatal_reasons(self) -> list[str]:
        """Why the process is to be restarted; nothing if it isn't."""
        if not self.engine.alive:
            return ["the engine thread has ended"]
        return self._stall_reasons(self.settings.hang_seconds)

    def unready_reasons(self) -> list[str]:
        """Why no requests should be sent here; nothing if they should."""
        reasons = ["the server is shutting down"] if self.admission.is_draining else []
        reasons += self.fatal_reasons() or self._stall_reasons(self.settings.stall_seconds)
        reasons += self._model_reasons()
        if not any(state.phase == "ready" for state in self.registry.states().values()):
            reasons.append("no model is ready")
        return reasons

    def _stall_reasons(self, patience: float) -> list[str]:
        stalled = self.engine.stalled()
        return [f"no step has been finished for {stalled:.1f} s, and work waits"] if stalled > patience else []

    def _model_reasons(self) -> list[str]:
        """What keeps a model of the settings from answering."""
        states, failing, reasons = self.registry.states(), self.engine.failing(), []
        for name in self.settings.models:
            if name in states and states[name].phase == "broken":
                reasons.append(f"{name} is broken: {states[name].reason}")
            elif name in states and not states[name].is_final:
                reasons.append(f"{name} is not loaded yet")
            elif name in failing:
                reasons.append(f"{name} cannot compute any more")
        return reasons


def count_prompt_tokens(requests: Sequence[Request]) -> int:
    return sum(request.prompt_tokens for request in requests)


def split_requests(requests: Sequence[Request]) -> Iterator[Sequence[Request]]:
    """`requests` in slices of SLICE, or of a few more: those of one group are submitted together."""
    some = list[Request]()
    for _, together in groupby(requests, group_key):
        some += together
        if len(some) >= SLICE_SIZE:
            yield some
            some = []
    if some:
        yield some


def group_key(request: Request) -> str:
    """Its group, or itself."""
    return (request.group if isinstance(request, Generate) else "") or request.id
