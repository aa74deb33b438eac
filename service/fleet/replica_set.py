"""Who is there: the replicas that are listed, the models they have, and which of them may be asked.

Knows no request.  The one idea: a model is ready while any replica takes requests for it; while one is replaced by a
newer one both are there, each for what was read for it.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from random import Random

from ..core.errors import NotFound, PolyheadError, Unavailable
from ..core.model import Known, Model, State
from ..runtime.model_resolver import Offer
from .replica_connection import Address, Circle, Line

SPILL = 4096  # tokens that wait at those who hold a model beyond what waits elsewhere, before it is loaded there too

log = logging.getLogger("polyhead.fleet")


class Roll:
    """`names` are those of the models that replicas are to serve."""

    def __init__(self, names: Sequence[str], circle: Circle, random: Random) -> None:
        self._names, self._circle, self._random = tuple(names), circle, random
        self._lines: dict[tuple[str, str], Line] = {}  # by deployment and replica
        self._unlisted: list[Line] = []  # that have something to end
        self._doubts: dict[str, str] = {}  # models that no replica could be started for, and why
        self._wanted: dict[str, int] = {}

    def __iter__(self) -> Iterator[Line]:
        return iter((*self._lines.values(), *self._unlisted))

    def listed(self, deployment: str, replicas: Mapping[str, Address]) -> None:
        """These are all the replicas of a deployment, by name."""
        for key, line in list(self._lines.items()):
            if key[0] == deployment and replicas.get(key[1]) != line.address:
                line.unlist()
                self._unlisted.append(self._lines.pop(key))
        for name, address in replicas.items():
            if (deployment, name) not in self._lines:
                self._lines[deployment, name] = Line(name, address, self._circle)
        self.settle()

    def settle(self) -> None:
        """Those who will leave go as soon as each of their models has somebody who stays: not before, or there would be
        nobody to ask while Ray has stopped the one and not yet said where the other is."""
        for line in [line for line in self if line.parting]:
            if not line.open or all(self._staying(name) for name in line.models):
                line.part()
        self._unlisted = [line for line in self._unlisted if line.open]

    def deployed(self, names: Collection[str], wanted: int, why: str) -> None:
        """So many replicas of these there should be; `why` none could be started, nothing: that is over."""
        for name in names:
            self._wanted[name], self._doubts[name] = wanted, why

    def wanted(self) -> Mapping[str, int]:
        """Replicas of each model that there should be, where that was said."""
        return self._wanted

    def names(self) -> list[str]:
        return list(self._names)

    def states(self) -> Mapping[str, State]:
        return {name: self.state(name) for name in self._names}

    def models(self) -> list[Model]:
        """Of each model that is ready one; where some replicas have a newer one already, now the one, now the other."""
        lines = [(name, self.having(name)) for name in self._names]
        return [self._random.choice(having).models[name] for name, having in lines if having]

    def known(self) -> list[Known]:
        ready = {model.name: model for model in self.models()}
        return [self.known_as(name, ready.get(name)) for name in self._names]

    def queues(self) -> Iterable[tuple[str, str, int]]:
        """Model, replica, and the tokens queued there."""
        for line in self._lines.values():
            host, port = line.address
            for name in line.models if line.open else ():
                yield name, f"{host}:{port}", line.candidate.queued

    def pages(self) -> Iterable[tuple[str, str, Address]]:
        """Of all that are connected: deployment, name, and where its metrics are."""
        return ((deployment, line.name, line.page) for (deployment, _), line in self._lines.items() if line.open)

    def counted(self) -> Mapping[str, int]:
        """Replicas of each model that take requests."""
        return {name: len(self.having(name)) for name in self._names}

    def having(self, name: str) -> list[Line]:
        """Lines to replicas that take requests for a model; to those that will leave only if nobody stays."""
        return self._staying(name) or [line for line in self if line.open and not line.leaving and name in line.models]

    def _staying(self, name: str) -> list[Line]:
        return [line for line in self._lines.values() if line.open and not line.parting and name in line.models]

    def fit(self, model: Model) -> list[Line]:
        """Where requests for it may be sent: to those that compute just this model, and well, if there are any.

        A request that was read for a model that is being replaced just now can be answered by its successor.
        """
        having = self.having(model.name)
        same = [line for line in having if line.models[model.name] is model]
        alike = same or [line for line in having if line.models[model.name].tokenizer.parts == model.tokenizer.parts]
        if not alike:
            raise self.unavailable(model.name)
        fit = [line for line in alike if line.fit] or alike
        holding = [line for line in fit if line.holds(model.name)]
        least, idlest = (min((line.candidate.queued for line in lines), default=SPILL) for lines in (holding, fit))
        return holding if holding and least - idlest < SPILL else fit

    def state(self, name: str) -> State:
        if self.having(name):
            return State("ready", 1.0)
        told = (line.broken[name] for line in self._lines.values() if name in line.broken)
        why = next(told, self._doubts.get(name, ""))
        return State("broken", why=why) if why else State("waiting")

    def known_as(self, name: str, model: Model | None) -> Known:
        return Known(name, model.source if model else "", self.state(name), model.task if model else None, 0, ())

    def offer(self) -> Offer:
        return Offer(self.states(), self.models(), self.unavailable)

    def unavailable(self, name: str) -> PolyheadError:
        if name not in self._names:
            return NotFound(f"no model is called {name[:100]!r}; there are:", param="model").listing(self._names)
        state = self.state(name)
        if state.phase == "broken":
            return Unavailable(f"{name} could not be loaded: {state.why}")
        return Unavailable(f"no replica of {name} takes requests yet", retry_after=2)
