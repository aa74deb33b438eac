"""An operation on the served models (load, reload, unload): its description, its progress and its outcome.

An operation continues even if the client that started it disconnects.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any, Literal, Protocol

from polyhead.models.core.errors import ModelError

from ..config.settings import Settings, SettingsError
from ..core.errors import BadRequest, Cancelled, PolyheadError, Stopped, client_message, first_line, redact_locations
from ..core.model import LoadState
from ..core.names import NAME_PATTERN, base_model_name, is_name

Phase = Literal["loading", "draining", "over"]
# Logged as one sentence; any other error is logged with its traceback.
EXPECTED_ERRORS = (ModelError, PolyheadError, OSError, MemoryError)

log = logging.getLogger("polyhead.registry")


class LoadProgress(Protocol):
    """A load, whose thread writes how far it is."""

    @property
    def fraction(self) -> float: ...

    @property
    def is_downloading(self) -> bool: ...


class ModelOperation:
    """`name` is the model's, `description` a phrase for messages. Used on the event loop thread."""

    def __init__(self, name: str, description: str) -> None:
        self.name, self.description = name, description
        self.phase: Phase = "loading"
        self.load: LoadProgress | None = None  # the load that it waits for, once that has begun
        self.error: PolyheadError | None = None
        self._finished = asyncio.Event()
        self._task: asyncio.Task[None] | None = None  # asyncio keeps only a weak reference

    @property
    def fraction(self) -> float:
        """The share of the files that is downloaded, or of the weights that is read."""
        return self.load.fraction if self.load is not None else 0.0

    @property
    def load_phase(self) -> Literal["downloading", "loading"]:
        """What is being done while the phase is "loading"."""
        return "downloading" if self.load is not None and self.load.is_downloading else "loading"

    @property
    def progress(self) -> str:
        """How far the load is, as the end of a sentence."""
        return LoadState(self.load_phase, self.fraction).progress

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Run `work`, which raises PolyheadErrors only, as a task of its own."""
        self._task = asyncio.create_task(self._run(work))

    async def wait(self) -> None:
        """Wait until the operation has ended, whatever its outcome."""
        await self._finished.wait()

    async def wait_and_raise(self) -> None:
        """Wait until the operation has ended; raise its error if it failed."""
        await self._finished.wait()
        if self.error is not None:
            raise self.error

    async def _run(self, work: Coroutine[Any, Any, object]) -> None:
        # Replaced by the real outcome, unless this task is cancelled.
        self.error = Stopped(f"{redact_locations(self.description)} was interrupted", retry_after=1)
        try:
            await work
            self.error = None
        except PolyheadError as error:
            self.error = error
        finally:
            self.phase = "over"
            self._finished.set()


def operation_error(description: str, error: Exception) -> PolyheadError:
    """Return the error for the client whose operation failed."""
    if isinstance(error, PolyheadError):
        return error
    reason = f"{redact_locations(description)} failed: {client_message(error)}"
    return BadRequest(reason, param="source") if isinstance(error, EXPECTED_ERRORS) else PolyheadError(reason)


def log_failure(description: str, error: Exception) -> None:
    level = logging.INFO if isinstance(error, Cancelled) else logging.ERROR  # an administrator cancelled it
    log.log(
        level, "%s: %s", description, first_line(error), exc_info=None if isinstance(error, EXPECTED_ERRORS) else error
    )


def check_setting_names(settings: Settings) -> None:
    """Raise SettingsError if the settings give a weight, a draft or a calibration to a model that is not served."""
    per_model: tuple[tuple[str, Mapping[str, object]], ...] = (
        ("weights", settings.weights),
        ("drafts", settings.drafts),
        ("calibrations", settings.calibrations),
    )
    for setting, given in per_model:
        for name in given:
            if name not in settings.models:
                names = ", ".join(settings.models)
                raise SettingsError(f"{setting}: no model is called {name!r}; there are: {names}")
            if (base := base_model_name(name)) and setting != "calibrations":
                raise SettingsError(f"{setting}: {name!r} is an adapter of {base!r}; name that model there")


def base_model_error(base_model: str, state: LoadState | None) -> BadRequest:
    """Return the error of an adapter whose base model could not be loaded."""
    reason = state.reason if state else "its load was cancelled"
    return BadRequest(f"{base_model}, its base model, could not be loaded: {reason}")


def check_name(name: str, param: str) -> None:
    if not (is_name(name) if param == "name" else NAME_PATTERN.fullmatch(name)):
        message = f"{param}: {name[:60]!r} is no name: letters, digits, dots, dashes and underscores, 128 at most"
        raise BadRequest(message, param=param)
