"""What the routes of one application reach: `request.app.state.server`.

Knows no torch: the registry and the engine are whatever answers these questions.  The one idea: every dialect submits
here, so that the last look at deadline and bounds, and the first count, have one place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from service.api.admission import Admission, Load
from service.api.quota import Quotas
from service.api.record import UNTRACED, Traces
from service.api.security import Keys
from service.api.served import Served
from service.api.visit import Visit
from service.change import Change
from service.headroom import NUMBER, UNBOUNDED, Headroom
from service.metrics import Metrics, Watched
from service.model import Known, Model, State, concerning
from service.request import Explain, Request
from service.settings import Settings
from service.text import Text
from service.transcript import EventSource


class Registry(Served, Protocol):
    """Served models, as far as HTTP asks."""

    def submit(self, model: Model, requests: Sequence[Request]) -> Sequence[EventSource]: ...

    async def watch(self, model: Model) -> Mapping[str, tuple[int, int]]: ...

    def states(self) -> Mapping[str, State]: ...

    # what administrators ask; see service.registry

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
    traces: Traces = UNTRACED
    headroom: Headroom = UNBOUNDED

    def submit(self, visit: Visit, model: Model, requests: Sequence[Request]) -> Sequence[EventSource]:
        """All of one call, or none.  Raises Expired or Overloaded, and what the engine raises."""
        tokens = sum(request.prompt_tokens for request in requests)
        with concerning(model):
            visit.hurry()
            self.admission.check_tokens(visit.owner, tokens)
            visit.claim.grow(NUMBER * numbers(model, requests), "the answer")
            sources = self.registry.submit(model, requests)
        self.admission.take(visit.owner, tokens)
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


def numbers(model: Model, requests: Sequence[Request]) -> int:
    """Of an answer of numbers, about how many there are; an answer in words has none."""
    match model.task:
        case "embed":
            return len(requests) * model.width
        case "tag":
            return sum(request.prompt_tokens for request in requests) * len(model.labels)
        case "classify" | "rank":
            return len(requests) * max(len(model.labels), 1)
        case _:
            return 0
