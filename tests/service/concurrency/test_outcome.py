"""Results of other threads: an error is raised here, and what its function had is freed with it."""

import asyncio
import gc
import weakref

import pytest

from polyhead.service.concurrency.outcome import run_on_daemon_thread


class Data:
    """Something large that a function has when it fails."""


def test_an_error_keeps_nothing_after_it_was_handled() -> None:
    """Without a collection of cycles, which may come much later."""
    kept = list[weakref.ref[Data]]()

    def fail() -> None:
        data = Data()
        kept.append(weakref.ref(data))
        raise ValueError("it is wrong")

    async def act() -> None:
        with pytest.raises(ValueError, match="it is wrong") as raised:
            await run_on_daemon_thread(fail)
        del raised
        async with asyncio.timeout(60):
            while kept[0]() is not None:  # the thread ends
                await asyncio.sleep(0.001)

    gc.disable()
    try:
        asyncio.run(act())
    finally:
        gc.enable()
