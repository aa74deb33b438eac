"""Served models, as a dialect asks for them, and as the key that asks may have them.

Knows no route.  The one idea: a dialect reaches the registry through `Permitted` alone, so no way of naming a model (by
its name, an alias, an adapter's id, or by being the only one) leads past what its key may use.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from ...config.keys import Key
from ...core.errors import Forbidden, PolyheadError, Unavailable
from ...core.model import Model
from ...core.request import Task


class ModelLookup(Protocol):
    """What dialects ask of the registry of served models."""

    def models(self) -> list[Model]: ...

    def resolve(self, name: str, tasks: Collection[Task]) -> Model: ...

    def resolve_only(self, tasks: Collection[Task]) -> Model: ...


class Resolver(ModelLookup, Protocol):
    """The same before keys are looked at: it says, too, which model a placeholder such as "default" means."""

    def expand(self, name: str) -> str: ...


@dataclass(frozen=True)
class AuthorizedModels:
    """Those of `served` that `key` may use, by their own names or by an alias that it may."""

    registry: Resolver
    key: Key

    def models(self) -> list[Model]:
        return [model for model in self.registry.models() if self.key.allows_model(model.name)]

    def resolve(self, name: str, tasks: Collection[Task]) -> Model:
        """Raises Forbidden, too, for a name that is not served and that the key could not use if it were.

        A placeholder such as "default" is the name of the one model: it is no name that a key may have.
        """
        named = self.registry.expand(name)
        try:
            model = self.registry.resolve(named, tasks)
        except PolyheadError as error:
            self._check_allowed(name, named)
            self._hide_names(error)
            raise
        self._check_allowed(name, named, model.name)
        return model

    def resolve_only(self, tasks: Collection[Task]) -> Model:
        """The server's only one: what a key may use says nothing of which model a route without a name means."""
        try:
            model = self.registry.resolve_only(tasks)
        except Unavailable as error:
            if self.key.models:
                said = "not all models are loaded yet, and the address names none; send it again, or name a model"
                raise Unavailable(said, retry_after=error.retry_after) from None
            raise
        except PolyheadError as error:
            self._hide_names(error)
            raise
        self._check_allowed("", model.name)
        return model

    def _hide_names(self, error: PolyheadError) -> None:
        """Leave out of the names that `error` lists those of models that the key may not use."""
        if error.names:
            error.with_names(name for name in error.names if self.key.allows_model(name))

    def _check_allowed(self, asked: str, *names: str) -> None:
        """Raises Forbidden unless the key may use one of `names`; `asked` is what the client wrote."""
        if not any(map(self.key.allows_model, names)):
            what, may = asked[:100] or "without a name", ", ".join(self.key.models)
            raise Forbidden(f"the key {self.key.name!r} may not use the model {what}, it may use {may}", param="model")
