"""What can be seen of a replica over HTTP: its health and its metrics, and nothing to be asked.

Knows no model.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from service.api.health import router
from service.api.server import Server
from service.process import configured, edge_of


class Window(uvicorn.Server):
    """Serves beside whatever else the process does, which is who hears signals."""

    def __init__(self, server: Server, listener: socket.socket) -> None:
        app = FastAPI(openapi_url=None)
        app.state.server = server
        app.include_router(router)
        super().__init__(configured(app, edge_of(server.settings, server), lifespan="off"))
        self._listener = listener

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def open(self) -> None:
        self._serving = asyncio.create_task(self.serve([self._listener]))

    async def close(self) -> None:
        self.should_exit = True
        await self._serving
