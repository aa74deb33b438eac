"""The application with its models in this process, for commands that ask it over ASGI, without a socket."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx

from polyhead.models.core.errors import ModelError

from ..config.settings import Settings
from ..core.model import Model
from ..runtime.registry import ModelRegistry
from ..server.assembly import assemble

BASE_URL = "http://127.0.0.1"  # no socket: requests go to the application
POLL_S = 1.0  # seconds between two checks that the engine still runs
CLIENT_TIMEOUT_S = 86_400.0  # no timeout: the user can stop the command
OPEN_SETTINGS: Mapping[str, Any] = {  # no keys and no limits that protect other clients
    "api_key": "",
    "api_keys": {},
    "keys_file": "",
    "request_seconds": 0,
}


@asynccontextmanager
async def serve_locally(settings: Settings) -> AsyncIterator[tuple[Sequence[Model], httpx.AsyncClient]]:
    """The models that could be loaded, and a client of the application. Raises ModelError if there is no model."""
    settled: asyncio.Future[ModelRegistry] = asyncio.get_running_loop().create_future()
    app = assemble(settings, settled.set_result)
    async with app.router.lifespan_context(app):
        while not settled.done():
            await asyncio.wait({settled}, timeout=POLL_S)
            if not (settled.done() or app.state.server.engine.alive):
                raise ModelError("the engine's thread has ended while the model was loaded; the log says why")
        registry = settled.result()
        if not (ready := registry.models()):
            raise ModelError(" ".join(state.reason for state in registry.states().values()))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url=BASE_URL, timeout=CLIENT_TIMEOUT_S
        ) as client:
            yield ready, client


@contextmanager
def silence_logs() -> Iterator[None]:
    """Log errors only, while the application works."""
    log = logging.getLogger("polyhead")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
