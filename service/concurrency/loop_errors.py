"""Logs errors that the event loop itself reports."""

import asyncio
import errno
import logging
import math
import time
from collections.abc import Callable
from typing import Any

RESOURCE_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
LOG_INTERVAL_S = 1.0  # between two lines about connections that cannot be accepted

log = logging.getLogger("polyhead")


class LoopErrors:
    """An exception handler of the event loop.

    Of errors that connections cannot be accepted for lack of resources it logs at most one line in LOG_INTERVAL_S,
    without a traceback, because asyncio reports each of them.  Other errors are logged as asyncio does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (
            isinstance(error, OSError) and error.errno in RESOURCE_ERRORS and "accept" in context.get("message", "")
        ):
            loop.default_exception_handler(context)
            return
        if self._clock() - self._last >= LOG_INTERVAL_S:
            self._last = self._clock()
            log.error("connections cannot be accepted: %s; see ulimit -n and --max-connections", error.strerror)
