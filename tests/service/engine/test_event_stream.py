"""The timers of event streams, and the bound of what waits for a reader."""

import asyncio
from itertools import pairwise

import pytest

from polyhead.service.concurrency.time_slices import SLICE_SIZE
from polyhead.service.core.request import GeneratedToken, Terms
from polyhead.service.engine.event_stream import MAX_UNREAD_EVENTS, Stream, StreamContext
from polyhead.service.text import tokenization as text_module
from tests.support.engine_fakes import generate

MANY = 5 * SLICE_SIZE + 17


IDS = [5, 6, 7]


def stream_context() -> StreamContext:
    return StreamContext("m", "generate", lambda *_: None, lambda _: None, lambda _: None, lambda _: None)


def test_streams_with_the_same_deadline_share_a_timer() -> None:
    async def run() -> None:
        one, ends = stream_context(), list[int]()
        deadline = text_module.time.perf_counter() + 0.01
        streams = [Stream(generate(IDS, terms=Terms(deadline=deadline)), one) for _ in range(MANY)]
        endless = Stream(generate(IDS), one)
        for stream in (*streams, endless):
            stream.start()
        assert len(one.timers) == 1
        streams[0].close()
        while any(stream.is_open for stream in streams):
            await asyncio.sleep(0)
            ends.append(sum(not stream.is_open for stream in streams))
        assert max(after - before for before, after in pairwise(ends)) <= SLICE_SIZE
        assert endless.is_open
        assert len(one.timers) == 0
        streams[0].start()  # it has ended, so no timer is set
        assert len(one.timers) == 0

    asyncio.run(run())


@pytest.mark.parametrize("alternatives", [0, 1, 20, MAX_UNREAD_EVENTS])
def test_the_alternatives_of_unread_tokens_count_as_events(alternatives: int) -> None:
    """An event with 20 of them takes as much memory as 20 events, and an unread call may have 128 answers."""
    calls = list[str]()
    reports = (lambda _: calls.append("paused")), (lambda _: calls.append("resumed"))
    one = StreamContext("m", "generate", lambda *_: None, lambda _: None, *reports)
    stream, event = Stream(generate(IDS), one), GeneratedToken(5, -1.0, ((6, -2.0),) * alternatives)
    most = -(-MAX_UNREAD_EVENTS // (1 + alternatives))  # the last one may exceed the bound
    for _ in range(3):  # what is read counts no more, so an answer always goes on
        for count in range(most):
            assert not stream.is_paused, count
            stream.receive(event)
        assert stream.is_paused
        left = most
        while stream.is_paused:
            assert stream.take() == event
            left -= 1
            assert stream.is_paused == (left * (1 + alternatives) > MAX_UNREAD_EVENTS // 2)
        while stream.take() is not None:
            pass
    assert calls == ["paused", "resumed"] * 3
