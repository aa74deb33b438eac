"""The application on the port for probes: it serves probe routes and rejects all others."""

from starlette.types import ASGIApp, Receive, Scope, Send

from ..core.errors import NotFound
from .openapi import PROBE_PATHS
from .shared.openai_errors import write_openai_error
from .shared.streaming import JsonResponse


class ProbeApp:
    """An ASGI application.  `app` answers the probes."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBE_PATHS and scope["method"] in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        error = NotFound(f"this port answers probes only: GET {', '.join(sorted(PROBE_PATHS))}")
        await JsonResponse(write_openai_error(error), error.status)(scope, receive, send)
