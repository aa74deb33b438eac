"""Reading the events of several sources."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from polyhead.service.core.errors import StepFailed
from polyhead.service.core.request import Done, Event, Failed, Generate, GeneratedToken
from polyhead.service.engine.event_stream import Stream, StreamContext
from polyhead.service.text.event_source import EventReader


def streams(count: int) -> list[Stream]:
    """Streams as the engine makes them, whose requests are not computed."""

    def ignore(*_: object) -> None: ...

    context = StreamContext("chat", "generate", ignore, ignore, ignore, ignore)
    return [Stream(Generate(f"call-{number}", (1,), 9), context) for number in range(count)]


async def read_all(reader: EventReader) -> list[tuple[int, Event]]:
    found = []
    while True:
        try:
            found.append(await reader.read())
        except StopAsyncIteration:
            return found


def test_events_are_read_in_turn_and_in_order() -> None:
    async def run() -> list[tuple[int, Event]]:
        first, second = streams(2)
        for token in (1, 2, 3):
            first.receive(GeneratedToken(token))
        second.receive(GeneratedToken(7))
        reader = EventReader([first, second])
        for stream in (first, second):
            stream.receive(Done("length", 1, 3))
        return await read_all(reader)

    found = asyncio.run(run())
    done = Done("length", 1, 3)
    tokens = [(0, GeneratedToken(1)), (1, GeneratedToken(7)), (0, GeneratedToken(2)), (1, done)]
    assert found == [*tokens, (0, GeneratedToken(3)), (0, done)]


@pytest.mark.parametrize("count", [1, 300])
def test_a_reader_that_waits_gets_every_event(count: int) -> None:
    async def run() -> tuple[list[tuple[int, Event]], int]:
        sources = streams(count)
        task = asyncio.create_task(read_all(EventReader(sources)))
        await asyncio.sleep(0)
        tasks = len(asyncio.all_tasks())
        for token in range(3):
            for source in reversed(sources):
                source.receive(GeneratedToken(token))
            await asyncio.sleep(0)
        for source in sources:
            source.receive(Done("length", 1, 3))
        return await task, tasks

    found, tasks = asyncio.run(run())
    assert tasks == 2, "a source has no task of its own"
    for index in range(count):
        events = [event for number, event in found if number == index]
        assert events == [*map(GeneratedToken, range(3)), Done("length", 1, 3)]


@pytest.mark.parametrize(
    "end", [lambda stream: stream.close(), lambda stream: stream.receive(Failed(StepFailed("no")))]
)
def test_sources_that_end_before_they_are_read(end: Callable[[Stream], None]) -> None:
    async def run() -> Sequence[tuple[int, Event]]:
        sources = streams(3)
        end(sources[0])
        task = asyncio.create_task(read_all(EventReader(sources)))
        await asyncio.sleep(0)
        end(sources[1])
        end(sources[2])
        return await task

    assert {type(event) for _, event in asyncio.run(run())} <= {Failed}


def test_a_reader_of_no_sources_ends() -> None:
    assert asyncio.run(read_all(EventReader([]))) == []


def test_nothing_is_read_of_a_source_that_was_left() -> None:
    async def run() -> list[tuple[int, Event]]:
        sources = streams(2)
        for source in sources:
            source.receive(GeneratedToken(1))
            source.receive(Done("length", 1, 1))
        reader = EventReader(sources)
        first = await reader.read()
        reader.leave(0)
        return [first, *await read_all(reader)]

    assert [index for index, _ in asyncio.run(run())] == [0, 1, 1]
