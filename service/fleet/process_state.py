"""What there is one of in a process: who hears which replicas there are, and the application behind Ray's proxy.

Ray makes objects of ours by rules of its own, before there is what they stand for; this is where they find it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from .replica_connection import Address

LISTENERS: dict[str, Callable[[Mapping[str, Address]], None]] = {}  # by deployment


class DeferredApplication:
    """An application that is there before `app` is."""

    app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return
        for stage in ("startup", "shutdown"):  # of which `app` hears from its deployment
            await receive()
            await send({"type": f"lifespan.{stage}.complete"})


DEFERRED_APPLICATION = DeferredApplication()
