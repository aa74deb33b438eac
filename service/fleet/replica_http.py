"""The HTTP server of a replica: its health and its metrics only.

The Host header and the key for /metrics are checked as on a server (`service.api.access.middleware`).
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..api.access.app_state import AppState
from ..api.access.auth import read_authorization
from ..api.operations.health import router
from ..api.shared.openai_errors import write_openai_error
from ..core.errors import PolyheadError
from ..server.process import build_connection_limits, build_uvicorn_config


class ReplicaAccessCheck:
    """ASGI middleware that answers with the same errors for Host, Origin and key as a server."""

    def __init__(self, app: ASGIApp, server: AppState) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.check(scope)
        except PolyheadError as error:
            headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
            refusal = JSONResponse(write_openai_error(error), error.status, headers)
            await refusal(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def check(self, scope: Scope) -> None:
        """Raises Misdirected, ForeignOrigin, Unauthorized or Forbidden."""
        headers, keys = Headers(scope=scope), self.server.keys
        self.server.origins.check_host(headers, scope)
        self.server.origins.check_origin(scope["method"], headers)
        kind = keys.required_scope(scope["path"], scope["method"])
        keys.authorize(keys.authenticate(kind, read_authorization(headers, scope["path"])), kind)


class ReplicaHttpServer(uvicorn.Server):
    """A uvicorn server that runs as a task and installs no signal handlers."""

    def __init__(self, server: AppState, listener: socket.socket) -> None:
        self.app = app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        app.state.server = server
        app.include_router(router)
        app.add_middleware(ReplicaAccessCheck, server=server)
        host = str(listener.getsockname()[0])
        server.origins.add_bound_address(host, host)
        super().__init__(build_uvicorn_config(app, build_connection_limits(server.settings, server), lifespan="off"))
        self._listener = listener

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def start(self) -> None:
        self._task = asyncio.create_task(self.serve([self._listener]))

    async def close(self) -> None:
        self.should_exit = True
        await self._task
