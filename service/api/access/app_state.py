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

from ...concurrency.time_slices import SLICE, run_sliced
from ...config.settings import Settings
from ...core.model import Known, Model, State, concerning
from ...core.request import Explain, Generate, Request
from ...metrics import Metrics, Watched
from ...resources.request_memory import UNBOUNDED, Headroom
from ...runtime.operation import Change
from ...text.detokenizer import EventSource
from ...text.tokenization import Text
from ..http.body_limits import Receiving
from .access_log import UNTRACED, Traces
from .admission import Admission, Load
from .auth import Keys
from .authorized_models import Resolver
from .origins import Origins
from .rate_limit import Quotas
from .request_context import Visit


class Registry(Resolver, Protocol):
    """Served models, as far as HTTP asks."""

    def submit(self, model: Model, requests: Sequence[Request]) -> Sequence[EventSource]: ...

    async def watch(self, model: Model) -> Mapping[str, tuple[int, int]]: ...

    def states(self) -> Mapping[str, State]: ...

    # what administrators ask; see service.runtime.registry

    @property
    def change(self) -> Change | None: ...

    def known(self) -> list[Known]: ...

    def memory(self) -> tuple[int, int]: ...

    def load(self, name: str, source: str, *, merge: bool = False) -> Change: ...

    def reload(self, name: str, source: str, drain_s: float) -> Change: ...

    def unload(self, name: str, drain_s: float) -> Change: ...

    def alias(self, alias: str, name: str) -> None: ...

    def unalias(self, alias: str) -> None: ...


class Engine(Load, Watched, Protocol):
    """Whether the thread that computes runs, and how far it gets."""

    @property
    def alive(self) -> bool: ...

    def failing(self) -> list[str]:
        """Models that cannot compute any more."""


@dataclass(frozen=True, kw_only=True)
class Server:
    settings: Settings
    registry: Registry
    metrics: Metrics
    text: Text
    admission: Admission
    engine: Engine
    keys: Keys
    quotas: Quotas
    origins: Origins
    receiving: Receiving
    traces: Traces = UNTRACED
    headroom: Headroom = UNBOUNDED

    def submit(self, visit: Visit, model: Model, requests: Sequence[Request]) -> Sequence[EventSource]:
        """All of `requests`, or none.  Raises Expired or Overloaded, and what the engine raises."""
        with concerning(model):
            visit.hurry()
            self.admission.check_tokens(visit.owner, tokens_of(requests))
        return self._submit(visit, model, requests)

    async def submit_call(self, visit: Visit, model: Model, requests: Sequence[Request]) -> Sequence[EventSource]:
        """The same of a call with any number of them, a slice in one turn of the event loop.

        There is room for all of them before the first is submitted.  Where a later one cannot be, or the deadline
        passes or the client leaves meanwhile, those before it are aborted.
        """
        if len(requests) <= SLICE:
            return self.submit(visit, model, requests)
        sources, whole = list[EventSource](), False
        try:
            with concerning(model), self.admission.reserved(visit.owner, tokens_of(requests)) as submitted:
                for some in slices_of(requests):
                    visit.hurry()
                    sources += self._submit(visit, model, some)
                    submitted(tokens_of(some))
                    await asyncio.sleep(0)
            whole = True
        finally:
            if not whole:  # cancelled, perhaps: only this function has the sources, to close them
                run_sliced(methodcaller("close"), sources)
        return sources

    def _submit(self, visit: Visit, model: Model, requests: Sequence[Request]) -> Sequence[EventSource]:
        with concerning(model):
            sources = self.registry.submit(model, requests)
        self.admission.take(visit.owner, tokens_of(requests))
        self.quotas.submitted(visit.owner, requests)
        explains = any(isinstance(request, Explain) for request in requests)
        self.metrics.received(model.name, "explain" if explains else model.task, len(requests))
        visit.counted = True
        visit.courses += [source.course for source in sources]
        return sources

    async def watch(self, model: Model) -> Mapping[str, tuple[int, int]]:
        """See to it that `model` can be explained: the layers and heads of each kind of attention it has."""
        return await self.registry.watch(model)

    @property
    def administered(self) -> bool:
        """Whether models may be changed by whoever has the key."""
        return self.keys.administered

    @property
    def started(self) -> bool:
        """Every model of the settings is loaded and warm, or known to be broken."""
        states = self.registry.states()
        return all(states[name].settled for name in self.settings.models if name in states)

    def dying(self) -> list[str]:
        """Why the process is to be restarted; nothing if it isn't."""
        if not self.engine.alive:
            return ["the engine thread has ended"]
        return self._stalled(self.settings.hang_seconds)

    def unready(self) -> list[str]:
        """Why no requests should be sent here; nothing if they should."""
        reasons = ["the server is shutting down"] if self.admission.draining else []
        reasons += self.dying() or self._stalled(self.settings.stall_seconds)
        reasons += self._unfit()
        if not any(state.phase == "ready" for state in self.registry.states().values()):
            reasons.append("no model is ready")
        return reasons

    def _stalled(self, patience: float) -> list[str]:
        stalled = self.engine.stalled()
        return [f"no step has been finished for {stalled:.1f} s, and work waits"] if stalled > patience else []

    def _unfit(self) -> list[str]:
        """What keeps a model of the settings from answering."""
        states, failing, reasons = self.registry.states(), self.engine.failing(), []
        for name in self.settings.models:
            if name in states and states[name].phase == "broken":
                reasons.append(f"{name} is broken: {states[name].why}")
            elif name in states and not states[name].settled:
                reasons.append(f"{name} is not loaded yet")
            elif name in failing:
                reasons.append(f"{name} cannot compute any more")
        return reasons


def tokens_of(requests: Sequence[Request]) -> int:
    return sum(request.prompt_tokens for request in requests)


def slices_of(requests: Sequence[Request]) -> Iterator[Sequence[Request]]:
    """`requests` in slices of SLICE, or of a few more: those of one group are submitted together."""
    some = list[Request]()
    for _, together in groupby(requests, group_of):
        some += together
        if len(some) >= SLICE:
            yield some
            some = []
    if some:
        yield some


def group_of(request: Request) -> str:
    """Its group, or itself."""
    return (request.group if isinstance(request, Generate) else "") or request.id
