"""Work of the event loop in slices."""

import asyncio
from functools import partial

from polyhead.service.concurrency.time_slices import LoopTurns, call_in_slices, iterate_in_slices, split_in_slices


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


def test_an_owner_has_one_slice_in_each_turn_however_many_calls_it_has() -> None:
    """Calls that are cancelled while they wait take no turn, and the turn of an owner goes around its calls."""
    turns, slices = LoopTurns(), list[tuple[str, int, int]]()  # owner, call, number of the turn
    number = 0

    async def call(owner: str, name: int) -> None:
        async for _ in iterate_in_slices(range(4), 1, partial(turns.take, owner)):
            slices.append((owner, name, number))

    async def run() -> None:
        nonlocal number
        calls = [asyncio.create_task(call(owner, name)) for owner in ("many", "one") for name in range(8)]
        for task in calls[9:]:
            task.cancel()
        while not all(task.done() for task in calls):
            if number == 2:
                calls[1].cancel()
            await asyncio.sleep(0)
            number += 1

    asyncio.run(run())
    later = [each for each in slices if each[2] > 0]
    assert all(sum(at == turn and owner == "many" for owner, _, at in later) <= 1 for turn in range(number))
    assert [name for owner, name, _ in later if owner == "many"][:6] == [0, 2, 3, 4, 5, 6]
    ends = {owner: max(at for whose, _, at in slices if whose == owner) for owner in ("many", "one")}
    assert ends["one"] < ends["many"] / 2
    assert len(later) == 3 * 7 + 3
