"""State of a process that Ray creates our objects in: the callbacks for replica lists, and the application behind Ray's
proxy.

Ray constructs deployments by its own rules, before the objects that they refer to exist.  They find them here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from .replica_connection import Address

LISTENERS: dict[str, Callable[[Mapping[str, Address]], None]] = {}  # by deployment


class DeferredApplication:
    """An ASGI application that forwards to `app`, which is set later."""

    app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return
        for stage in ("startup", "shutdown"):  # the deployment runs the lifespan of `app`
            await receive()
            await send({"type": f"lifespan.{stage}.complete"})


DEFERRED_APPLICATION = DeferredApplication()
