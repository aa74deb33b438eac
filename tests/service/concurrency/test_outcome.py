"""Results of other threads: an error is raised here, and what its function had is freed with it."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Message

from polyhead.service.api.shared.streaming import run_while_connected
from polyhead.service.concurrency.outcome import run_on_daemon_thread, run_on_thread
from polyhead.service.concurrency.thread_pool import ThreadPool, WorkInfo
from polyhead.service.core.errors import Unavailable
from tests.support.threads import no_new_threads


class Data:
    """Something large that a function has when it fails."""


async def run_in_pool(function: Callable[[], None]) -> None:
    pool = ThreadPool(1, "pool", abandon_after=60)
    try:
        await pool.run(function, WorkInfo("failing", "source"))
    finally:
        pool.close()


async def run_for_a_client(function: Callable[[], None]) -> None:
    async def work() -> Response:
        await asyncio.sleep(0)
        function()
        return Response()

    async def receive() -> Message:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    await run_while_connected(Request({"type": "http"}, receive), work())


@pytest.mark.parametrize("run", [run_on_daemon_thread, run_in_pool, run_for_a_client])
def test_an_error_keeps_nothing_after_it_was_handled(run: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
    """Without a collection of cycles, which may come much later."""
    kept = list[weakref.ref[Data]]()

    def fail() -> None:
        data = Data()
        kept.append(weakref.ref(data))
        raise ValueError("it is wrong")

    async def act() -> None:
        with pytest.raises(ValueError, match="it is wrong") as raised:
            await run(fail)
        del raised
        async with asyncio.timeout(60):
            while kept[0]() is not None:  # the thread ends
                await asyncio.sleep(0.001)

    gc.disable()
    try:
        asyncio.run(act())
    finally:
        gc.enable()


@pytest.mark.parametrize("run", [run_on_daemon_thread, run_on_thread])
def test_a_thread_that_cannot_be_started_is_asked_for_again(
    run: Callable[[Callable[[], int]], Awaitable[int]],
) -> None:
    async def act() -> None:
        with no_new_threads(), pytest.raises(Unavailable, match="no thread can be started"):
            await run(lambda: 5)
        assert await run(lambda: 5) == 5

    asyncio.run(act())
