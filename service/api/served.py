"""Served models, as a dialect asks for them, and as the key that asks may have them.

Knows no route.  The one idea: a dialect reaches the registry through `Permitted` alone, so no way of naming a model (by
its name, an alias, an adapter's id, or by being the only one) leads past what its key may use.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from service.errors import Forbidden, PolyheadError
from service.keys import Key
from service.model import Model
from service.request import Task


class Served(Protocol):
    """What dialects ask of the registry of served models."""

    def models(self) -> list[Model]: ...

    def resolve(self, name: str, tasks: Collection[Task]) -> Model: ...

    def only(self, tasks: Collection[Task]) -> Model: ...


@dataclass(frozen=True)
class Permitted:
    """Those of `served` that `key` may use, by their own names or by an alias that it may."""

    served: Served
    key: Key

    def models(self) -> list[Model]:
        return [model for model in self.served.models() if self.key.opens(model.name)]

    def resolve(self, name: str, tasks: Collection[Task]) -> Model:
        """Raises Forbidden, too, for a name that is not served and that the key could not use if it were."""
        try:
            model = self.served.resolve(name, tasks)
        except PolyheadError:
            self._check(name, name)
            raise
        self._check(name, model.name)
        return model

    def only(self, tasks: Collection[Task]) -> Model:
        """The server's only one: what a key may use says nothing of which model a route without a name means."""
        model = self.served.only(tasks)
        self._check(model.name, model.name)
        return model

    def _check(self, asked: str, name: str) -> None:
        if not self.key.opens(name) and not self.key.opens(asked):
            what, may = asked[:100] or "without a name", ", ".join(self.key.models)
            raise Forbidden(f"the key {self.key.name!r} may not use the model {what}, it may use {may}", param="model")
