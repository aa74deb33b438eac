"""A server with a deliberate leak, which a soak must detect.

    python -m benchmarks.leaking BYTES serve ...

It is `polyhead serve`, but keeps BYTES bytes of every request, whatever the request is and however it ends. The bytes
are in small Python objects, which take new memory at once. Larger objects would first fill memory that loading freed.
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
