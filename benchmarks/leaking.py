"""A server with a leak, on purpose: what a soak must not let pass.

    python -m benchmarks.leaking BYTES serve ...

It is `polyhead serve`, but keeps so many bytes of every request, whatever it is and however it ends.  It keeps them as
Python does, in small objects, which are new memory at once; larger ones would first fill the room that loading left.
"""

import sys

from starlette.types import Receive, Scope, Send

from polyhead.service.api import app
from polyhead.service.api.access.middleware import AccessMiddleware
from polyhead.service.cli import main as cli

SMALL = 384  # bytes
KEPT: list[bytes] = []


class Leaking(AccessMiddleware):
    """The door, which forgets nothing."""

    leak = 0  # bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            KEPT.extend(b"x" * min(SMALL, self.leak - start) for start in range(0, self.leak, SMALL))
        await super().__call__(scope, receive, send)


if __name__ == "__main__":
    Leaking.leak = int(sys.argv.pop(1))
    app.AccessMiddleware = Leaking  # type: ignore[attr-defined]
    cli.main()
