"""A client's connection, for as long as it takes what it is sent.

Knows no request.  The one idea: what the kernel doesn't take stops whoever writes, at the first byte; and a client
that takes nothing of it for some time is cut off, whatever it was being sent, so that a place in flight, cache blocks
and a buffer are not held by somebody who isn't there.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger("polyhead.http")


class Connection(H11Protocol):
    """`patience` is the seconds after which it is cut, `cut` is told of it.

    That something was taken shows when the kernel has room for more, which is when a part of its buffer is empty: so a
    client is cut, too, that takes a few bytes now and then to keep its place.
    """

    def __init__(self, *given: Any, patience: float, cut: Callable[[], None], **named: Any) -> None:
        super().__init__(*given, **named)
        self.patience, self.cut = patience, cut
        self.unread = 0  # bytes, when last looked at
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.wait()

    def resume_writing(self) -> None:
        self.rest()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.rest()
        super().connection_lost(exc)

    def wait(self) -> None:
        self.unread = self.transport.get_write_buffer_size()
        self.timer = self.loop.call_later(self.patience, self.look)

    def rest(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def look(self) -> None:
        """Has the client taken anything since?"""
        if self.transport.get_write_buffer_size() < self.unread:
            self.wait()
            return
        log.warning("a client took nothing of its answer for %g s, it is cut off: %s", self.patience, self.address)
        self.cut()
        self.transport.abort()

    @property
    def address(self) -> str:
        host, port = self.client or ("unknown", 0)
        return f"{host}:{port}"
