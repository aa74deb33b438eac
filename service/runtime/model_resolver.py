"""From the name in a request to a ready model that does the requested task. Does not depend on where a model is
computed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.errors import BadRequest, NotFound, PolyheadError, WrongTask
from ..core.model import TASK_VERBS, LoadState, Model, describe_tasks
from ..core.request import Task

# Model names of clients that assume a single model.
PLACEHOLDERS = frozenset({"", "default", "dummy", "tei", "tgi"})
URL_SCHEMES = ("http://", "https://")  # some clients send the server's address as the name
MAX_URL_CHARS = 2048  # characters of such an address, which each part of a streamed answer repeats


def is_placeholder(name: str) -> bool:
    """Whether `name` is what a client sends that assumes a single model."""
    return name in PLACEHOLDERS or (name.startswith(URL_SCHEMES) and len(name) <= MAX_URL_CHARS)


@dataclass(frozen=True)
class ModelResolver:
    """The states of all served names, the models that are ready, and the error for a name that is not."""

    states: Mapping[str, LoadState]
    ready_models: Sequence[Model]
    unavailable_error: Callable[[str], PolyheadError]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def expand(self, name: str, tasks: Collection[Task]) -> str:
        """Return the name of the only model that does one of `tasks` if `name` is a placeholder; else `name`.

        While models are being loaded, only a single served model is known to be the only one.
        """
        if not is_placeholder(name) or name in self.aliases or name in self.states:
            return name
        if len(self.states) == 1:
            return next(iter(self.states))
        fitting = [model.name for model in self.ready_models if model.task in tasks]
        return fitting[0] if len(fitting) == 1 and not self._pending else name

    def resolve(self, name: str, tasks: Collection[Task]) -> Model:
        """Return the model called `name` if it is ready and does one of `tasks`. The error says what would be right.

        A placeholder stands for the only model that does one of `tasks`.
        """
        name = self.expand(name, tasks)
        name = self.aliases.get(name, name)
        model = next((model for model in self.ready_models if model.name == name), None)
        if model is None:
            raise self._placeholder_error(name, tasks) if is_placeholder(name) else self.unavailable_error(name)
        if model.task not in tasks:
            message = f"{name} can {TASK_VERBS[model.task]}, it cannot {describe_tasks(tasks)}; models that can:"
            raise WrongTask(message, param="model").with_names(
                other.name for other in self.ready_models if other.task in tasks
            )
        return model

    def resolve_only(self, tasks: Collection[Task]) -> Model:
        """Return the one model that does one of `tasks`, for routes without a model name."""
        if self._pending:  # it may be the only one, or a second one
            raise self.unavailable_error(self._pending[0])
        fitting = [model for model in self.ready_models if model.task in tasks]
        if not fitting:
            raise NotFound(f"no model here can {describe_tasks(tasks)}")
        if len(fitting) > 1:
            message = (
                f"several models here can {describe_tasks(tasks)}; name one of them in the address, /models/NAME/...:"
            )
            raise BadRequest(message).with_names(model.name for model in fitting)
        return fitting[0]

    @property
    def _pending(self) -> list[str]:
        """The names of models that may still become ready."""
        return [name for name, state in self.states.items() if not state.is_final]

    def _placeholder_error(self, name: str, tasks: Collection[Task]) -> PolyheadError:
        """The error for a placeholder that stands for no model."""
        if self._pending:
            return self.unavailable_error(self._pending[0])
        fitting = [model.name for model in self.ready_models if model.task in tasks]
        message = f"{name[:100]!r} stands for the only model that can {describe_tasks(tasks)}; there are:"
        return NotFound(message, param="model").with_names(fitting)
