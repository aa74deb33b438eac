"""A server that runs already, for commands that otherwise load the model in this process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from polyhead.models.core.errors import ModelError

from .client import complete_url, open_async_client
from .local_server import CLIENT_TIMEOUT_S


@asynccontextmanager
async def connect_server(url: str, key: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the server at `url`, by HTTP unless it says otherwise. If `key` is empty, none is sent. Raises
    ModelError if the server does not answer.
    """
    try:
        async with open_async_client(url, key, timeout=CLIENT_TIMEOUT_S) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise ModelError(f"{complete_url(url)} does not answer: {reason}; is the server running? See --url") from None
