"""The served models that the key of a request may use.

Dialects reach the registry only through `AuthorizedModels`.  So no way of naming a model (its name, an alias, an
adapter's id, or no name where there is one model) leads to a model that the key may not use.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from ...config.keys import Key
from ...core.errors import Forbidden, PolyheadError, Unavailable
from ...core.model import Model
from ...core.request import Task


class ModelLookup(Protocol):
    """What dialects need of the registry of served models."""

    def models(self) -> list[Model]: ...

    def resolve(self, name: str, tasks: Collection[Task]) -> Model: ...

    def resolve_only(self, tasks: Collection[Task]) -> Model: ...


class Resolver(ModelLookup, Protocol):
    """A lookup that also replaces a placeholder, such as "default", by the name of the model it stands for."""

    def expand(self, name: str, tasks: Collection[Task]) -> str: ...


@dataclass(frozen=True)
class AuthorizedModels:
    """The models of `registry` that `key` may use, by their own names or by an alias that the key may use."""

    registry: Resolver
    key: Key

    def models(self) -> list[Model]:
        return [model for model in self.registry.models() if self.key.allows_model(model.name)]

    def resolve(self, name: str, tasks: Collection[Task]) -> Model:
        """The model called `name`.  Raises Forbidden if the key may not use that name, whether it is served or not."""
        named = self.registry.expand(name, tasks)
        try:
            model = self.registry.resolve(named, tasks)
        except PolyheadError as error:
            self._check_allowed(name, named)
            self._hide_names(error)
            raise
        self._check_allowed(name, named, model.name)
        return model

    def resolve_only(self, tasks: Collection[Task]) -> Model:
        """The only model that does one of `tasks`.

        It has to be the server's only one: the models that the key may not use count, too.
        """
        try:
            model = self.registry.resolve_only(tasks)
        except Unavailable as error:
            if self.key.models:
                message = "not all models are loaded yet, and the address names none; send it again, or name a model"
                raise Unavailable(message, retry_after=error.retry_after) from None
            raise
        except PolyheadError as error:
            self._hide_names(error)
            raise
        self._check_allowed("", model.name)
        return model

    def resolve_or_only(self, name: str, tasks: Collection[Task]) -> Model:
        """The model called `name`; without a name the only model that does one of `tasks`."""
        return self.resolve(name, tasks) if name else self.resolve_only(tasks)

    def _hide_names(self, error: PolyheadError) -> None:
        """Remove from the names that `error` lists those that the key may not use."""
        if error.names:
            error.with_names(name for name in error.names if self.key.allows_model(name))

    def _check_allowed(self, requested: str, *names: str) -> None:
        """Raises Forbidden unless the key may use one of `names`; `requested` is what the client wrote."""
        if not any(map(self.key.allows_model, names)):
            shown_name, allowed = requested[:100] or "without a name", ", ".join(self.key.models)
            raise Forbidden(
                f"the key {self.key.name!r} may not use the model {shown_name}, it may use {allowed}", param="model"
            )
