"""What a request waits for, and its deadline."""

import asyncio
from time import perf_counter

import pytest

from polyhead.service.api.access.request_context import RequestContext
from polyhead.service.core.errors import Expired


def test_what_a_request_waits_for_ends_with_its_deadline() -> None:
    """As the load of a network that explains: it takes seconds, and goes on for others."""

    async def wait() -> None:
        context, loaded = RequestContext("id"), asyncio.Event()
        load = asyncio.create_task(loaded.wait())
        context.deadline = perf_counter() + 0.01
        with pytest.raises(Expired, match="the deadline has passed before the engine had the request"):
            await context.wait(asyncio.shield(load))
        assert not load.done()
        loaded.set()
        assert await RequestContext("id").wait(asyncio.shield(load))

    asyncio.run(wait())


def test_an_error_of_what_it_waits_for_is_no_deadline() -> None:
    async def fail() -> None:
        raise TimeoutError("of the work")

    with pytest.raises(TimeoutError, match="of the work"):
        asyncio.run(RequestContext("id").wait(fail()))
