"""What the routes of one application reach: `request.app.state.server`.

Knows no torch: the registry is whatever answers these questions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from service.api import dialect
from service.api.admission import Admission
from service.metrics import Metrics
from service.model import State
from service.settings import Settings
from service.text import Text


class Registry(dialect.Registry, Protocol):
    """Served models, as far as HTTP asks."""

    def states(self) -> Mapping[str, State]: ...


@dataclass(frozen=True, kw_only=True)
class Server:
    """`alive` says whether the thread that computes still runs."""

    settings: Settings
    registry: Registry
    metrics: Metrics
    text: Text
    admission: Admission
    alive: Callable[[], bool]

    @property
    def started(self) -> bool:
        """Every model is loaded and warm, or known to be broken."""
        return all(state.settled for state in self.registry.states().values())

    @property
    def ready(self) -> bool:
        """Whether requests should be sent here."""
        usable = any(state.phase == "ready" for state in self.registry.states().values())
        return self.started and usable and self.alive() and not self.admission.draining
