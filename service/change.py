"""One change of what is served: what it is, how far it is, and how it ended.

Knows no HTTP, and of models what can be wrong with them.  The one idea: it goes on whether or not whoever asked for it
still waits.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

from models.errors import ModelError
from service.errors import BadRequest, PolyheadError, outward, spoken

Phase = Literal["loading", "draining", "over"]
REFUSALS = (ModelError, PolyheadError, OSError, MemoryError)  # a sentence says it all; elsewhere a traceback helps


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

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Let `work`, which raises PolyheadErrors, go on by itself."""
        self._task = asyncio.create_task(self._run(work))

    async def end(self) -> None:
        """Waits until it is over; raises what went wrong."""
        await self._over.wait()
        if self.error is not None:
            raise self.error

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
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
