"""One change of what is served: what it is, how far it is, and how it ended.

Knows no HTTP, and of models what can be wrong with them.  The one idea: it goes on whether or not whoever asked for it
still waits.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Literal

from polyhead.models.core.errors import ModelError

from ..config.settings import Settings, SettingsError
from ..core.errors import BadRequest, Cancelled, PolyheadError, Stopped, outward, sentence, spoken
from ..core.model import State
from ..core.names import NAME, is_name, trunk_of

Phase = Literal["loading", "draining", "over"]
REFUSALS = (ModelError, PolyheadError, OSError, MemoryError)  # a sentence says it all; elsewhere a traceback helps

log = logging.getLogger("polyhead.registry")


class Change:
    """`name` is the model's, `what` a phrase for people.  Lives on the event loop thread, `fraction` apart."""

    def __init__(self, name: str, what: str) -> None:
        self.name, self.what = name, what
        self.phase: Phase = "loading"
        self.fraction = 0.0  # read of its file; written on the engine's thread
        self.error: PolyheadError | None = None
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None  # the loop itself keeps no reference

    def hear(self, fraction: float) -> None:
        self.fraction = fraction

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Let `work`, which raises PolyheadErrors, go on by itself."""
        self._task = asyncio.create_task(self._run(work))

    async def over(self) -> None:
        """Waits until it is over, however it ends."""
        await self._over.wait()

    async def end(self) -> None:
        """Waits until it is over; raises what went wrong."""
        await self._over.wait()
        if self.error is not None:
            raise self.error

    async def _run(self, work: Coroutine[Any, Any, object]) -> None:
        self.error = Stopped(f"{outward(self.what)} was broken off", retry_after=1)  # unless it ends otherwise
        try:
            await work
            self.error = None
        except PolyheadError as error:
            self.error = error
        finally:
            self.phase = "over"
            self._over.set()


def failure(what: str, error: Exception) -> PolyheadError:
    """What is said to whoever asked for a change that failed."""
    if isinstance(error, PolyheadError):
        return error
    why = f"{outward(what)} failed: {spoken(error)}"
    return BadRequest(why, param="source") if isinstance(error, REFUSALS) else PolyheadError(why)


def complain(what: str, error: Exception) -> None:
    level = logging.INFO if isinstance(error, Cancelled) else logging.ERROR  # it was asked for
    log.log(level, "%s: %s", what, sentence(error), exc_info=None if isinstance(error, REFUSALS) else error)


def refuse_unknown(settings: Settings) -> None:
    """Raises SettingsError where a weight or a draft is given to a model that is not served."""
    for setting, given in (("weights", settings.weights), ("drafts", settings.drafts)):
        for name in given:
            if name not in settings.models:
                there = ", ".join(settings.models)
                raise SettingsError(f"{setting}: no model is called {name!r}; there are: {there}")
            if base := trunk_of(name):
                raise SettingsError(f"{setting}: {name!r} is computed with its trunk; name {base!r} there")


def broken_trunk(trunk: str, state: State | None) -> BadRequest:
    why = state.why if state else "its load was cancelled"
    return BadRequest(f"{trunk}, over which it is to be laid, could not be loaded: {why}")


def refuse_name(name: str, param: str) -> None:
    if not (is_name(name) if param == "name" else NAME.fullmatch(name)):
        message = f"{param}: {name[:60]!r} is no name: letters, digits, dots, dashes and underscores, 128 at most"
        raise BadRequest(message, param=param)
