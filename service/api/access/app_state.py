"""The state of the application that routes use: `request.app.state.server`.

Every dialect submits its engine requests here.  So the deadline and the admission limits are checked, and the request
is first counted, in one place.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import methodcaller
from typing import Protocol

from ...concurrency.thread_pool import ThreadPool
from ...concurrency.time_slices import SLICE_SIZE, LoopTurns, call_in_slices
from ...config.settings import Settings
from ...core.model import LoadState, Model, ServedName, name_model_in_errors
from ...core.request import ExplainTextRequest, Generate, Request
from ...metrics import Metrics, ObservedEngine
from ...resources.request_memory import UNBOUNDED_HEADROOM, Headroom
from ...runtime.operation import ModelOperation
from ...text.event_source import EventSource
from ...text.tokenization import TextProcessor
from ..http.body_limits import IncomingBodies
from .access_log import NO_TRACING, RequestTracer
from .admission import Admission, TokenLoad
from .auth import Keys
from .authorized_models import Resolver
from .origins import OriginPolicy
from .rate_limit import Quotas
from .recent_errors import RecentErrors
from .request_context import RequestContext

REQUEST_THREADS = 2  # that parse long bodies and write long answers; the interpreter runs one at a time
SLICE_TOKENS = 1 << 16  # prompt tokens that are submitted in one iteration of the event loop: they are hashed or packed


class RegistryProtocol(Resolver, Protocol):
    """What the HTTP API needs of the registry of served models."""

    def submit(self, model: Model, requests: Sequence[Request]) -> Sequence[EventSource]: ...

    async def load_explainer(self, model: Model) -> Mapping[str, tuple[int, int]]: ...

    def states(self) -> Mapping[str, LoadState]: ...

    # for administrators; see service.runtime.registry

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
    """What the HTTP API needs of the engine: whether its thread runs, and how far it gets."""

    @property
    def alive(self) -> bool: ...

    def failing(self) -> list[str]:
        """Names of models whose executor cannot compute any more."""


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
    recent_errors: RecentErrors = field(default_factory=RecentErrors)
    request_threads: ThreadPool = field(default_factory=lambda: ThreadPool(REQUEST_THREADS, "requests", math.inf))
    turns: LoopTurns = field(default_factory=LoopTurns)  # by key, for slices of large calls

    def submit(self, context: RequestContext, model: Model, requests: Sequence[Request]) -> Sequence[EventSource]:
        """Submit all of `requests`, or none.  Raises Expired or Overloaded, and what the engine raises."""
        with name_model_in_errors(model):
            context.check_deadline()
            self.admission.check_tokens(context.owner, count_prompt_tokens(requests))
        return self._submit(context, model, requests)

    async def submit_in_slices(
        self, context: RequestContext, model: Model, requests: Sequence[Request]
    ) -> Sequence[EventSource]:
        """Submit any number of `requests`, one slice of one such call of a key in each turn of the event loop.

        Room for all tokens is reserved before the first slice.  If a later slice fails, the deadline passes or the
        client disconnects meanwhile, the requests that were submitted are aborted.
        """
        slices = list(split_requests(requests))
        if len(slices) <= 1:
            return self.submit(context, model, requests)
        sources, is_complete = list[EventSource](), False
        try:
            with (
                name_model_in_errors(model),
                self.admission.reserve_tokens(context.owner, count_prompt_tokens(requests)) as count_submitted,
            ):
                for part in slices:
                    await self.turns.take(context.owner)
                    context.check_deadline()
                    sources += self._submit(context, model, part)
                    count_submitted(count_prompt_tokens(part))
            is_complete = True
        finally:
            if not is_complete:  # perhaps cancelled: only this function can close the sources
                call_in_slices(methodcaller("close"), sources)
        return sources

    def _submit(self, context: RequestContext, model: Model, requests: Sequence[Request]) -> Sequence[EventSource]:
        with name_model_in_errors(model):
            sources = self.registry.submit(model, requests)
        self.admission.add_submitted(context.owner, count_prompt_tokens(requests))
        self.quotas.add_submitted(context.owner, requests)
        explains = any(isinstance(request, ExplainTextRequest) for request in requests)
        self.metrics.record_submitted(model.name, "explain" if explains else model.task, len(requests))
        context.is_counted = True
        context.timings += [source.timing for source in sources]
        return sources

    async def load_explainer(self, model: Model) -> Mapping[str, tuple[int, int]]:
        """Load what is needed to explain answers of `model`.  Returns (layers, heads) of each kind of attention."""
        return await self.registry.load_explainer(model)

    @property
    def has_admin_key(self) -> bool:
        """Whether models may be changed with an admin key."""
        return self.keys.has_admin_key

    @property
    def is_started(self) -> bool:
        """Every model of the settings is loaded and warm, or known to be broken."""
        states = self.registry.states()
        return all(states[name].is_final for name in self.settings.models if name in states)

    def fatal_reasons(self) -> list[str]:
        """Reasons to restart the process; empty if there are none."""
        if not self.engine.alive:
            return ["the engine thread has ended"]
        return self._stall_reasons(self.settings.hang_seconds)

    def unready_reasons(self) -> list[str]:
        """Reasons to send no requests here; empty if there are none."""
        reasons = ["the server is shutting down"] if self.admission.is_draining else []
        reasons += self.fatal_reasons() or self._stall_reasons(self.settings.stall_seconds)
        reasons += self._model_reasons()
        if not any(state.phase == "ready" for state in self.registry.states().values()):
            reasons.append("no model is ready")
        return reasons

    def _stall_reasons(self, limit: float) -> list[str]:
        stalled = self.engine.stalled_seconds()
        return [f"no step has been finished for {stalled:.1f} s, and work waits"] if stalled > limit else []

    def _model_reasons(self) -> list[str]:
        """Reasons why models of the settings cannot answer."""
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
    """Split `requests` into slices of about SLICE_SIZE, or of prompts with about SLICE_TOKENS; requests of one group,
    which have the same prompt, stay together.
    """
    part, tokens = list[Request](), 0
    for _, group in groupby(requests, group_key):
        first, *rest = group
        part += first, *rest
        tokens += first.prompt_tokens
        if len(part) >= SLICE_SIZE or tokens >= SLICE_TOKENS:
            yield part
            part, tokens = [], 0
    if part:
        yield part


def group_key(request: Request) -> str:
    """The request's group, or its own id."""
    return (request.group if isinstance(request, Generate) else "") or request.id
