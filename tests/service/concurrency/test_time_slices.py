"""Work of the event loop in slices."""

import asyncio

from polyhead.service.concurrency.time_slices import call_in_slices, iterate_in_slices, split_in_slices


def test_slices() -> None:
    assert [list(some) for some in split_in_slices([1, 2, 3, 4, 5], 2)] == [[1, 2], [3, 4], [5]]
    done: list[int] = []

    async def run() -> None:
        assert [item async for item in iterate_in_slices(range(7), 3)] == list(range(7))
        call_in_slices(done.append, range(7), 3)
        assert done == [0, 1, 2]
        await asyncio.sleep(0)
        assert done == [0, 1, 2, 3, 4, 5]
        await asyncio.sleep(0)

    asyncio.run(run())
    assert done == list(range(7))
