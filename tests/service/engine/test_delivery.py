"""Delivery of the events of a step to the event loop, in slices."""

import asyncio
from typing import Any

import pytest

from polyhead.service.concurrency.time_slices import SLICE_SIZE
from polyhead.service.core.request import Done, Event, GeneratedToken
from polyhead.service.engine import delivery
from polyhead.service.engine.delivery import EventDelivery
from polyhead.service.engine.event_stream import Stream, StreamContext
from polyhead.service.engine.worker import HandleEvent
from tests.support.engine_fakes import FakeGenerator, RecordingTicket, generate

PROMPT = [5, 6, 7]


LONG = 5 * SLICE_SIZE + 17


def streams(count: int) -> list[Stream]:
    link = StreamContext("m", "generate", lambda *_: None, lambda _: None, lambda _: None, lambda _: None)
    return [Stream(generate(PROMPT), link) for _ in range(count)]


def step_of(stream: Stream, first: int) -> list[HandleEvent]:
    return [(stream, GeneratedToken(id)) for id in range(first, first + LONG)]


def test_steps_of_a_worker_are_delivered_in_order_and_workers_do_not_wait_for_each_other() -> None:
    async def run() -> None:
        deliveries, [stream, other], over = EventDelivery(), streams(2), list[str]()
        one, another = (Any, FakeGenerator)  # used only as keys
        deliveries.add(one, step_of(stream, 0), lambda: over.append("first"))
        deliveries.add(one, [*step_of(stream, LONG), (stream, Done("length", 3))], lambda: over.append("second"))
        deliveries.add(another, [(other, GeneratedToken(1)), (other, Done("length", 3))], lambda: over.append("other"))
        assert len(stream._events) == SLICE_SIZE
        assert not other.is_open
        while stream.is_open:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert over == ["other", "first", "second"]
        assert [event.id async for event in stream if isinstance(event, GeneratedToken)] == list(range(2 * LONG))
        assert not deliveries._waiting

    asyncio.run(run())


def test_a_closed_stream_receives_no_further_events() -> None:
    async def run() -> None:
        deliveries, [stream, other] = EventDelivery(), streams(2)
        worker: Any = "a worker"
        deliveries.add(worker, [*step_of(stream, 0), (other, Done("length", 3))])
        stream.close()
        while deliveries._waiting:
            await asyncio.sleep(0)
        assert not other.is_open
        assert [event async for event in stream] == []

    asyncio.run(run())


def test_a_stream_that_raises_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(RecordingTicket):
        def receive(self, event: Event) -> None:
            raise RuntimeError("no")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context["exception"]))
        deliveries, [stream], over = EventDelivery(), streams(1), list[bool]()
        monkeypatch.setattr(delivery, "SLICE_SIZE", 1)
        worker: Any = "a worker"
        broken = Broken(generate(PROMPT))
        answers: list[HandleEvent] = [
            (stream, GeneratedToken(1)),
            (broken, GeneratedToken(1)),
            (stream, Done("length", 3)),
        ]
        deliveries.add(worker, answers, lambda: over.append(True))
        while deliveries._waiting:
            await asyncio.sleep(0)
        assert over == [True]
        assert not stream.is_open

    raised: list[Any] = []
    asyncio.run(run())
    assert len(raised) == 1
