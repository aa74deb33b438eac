"""The timers of event streams."""

import asyncio
from itertools import pairwise

from polyhead.service.concurrency.time_slices import SLICE_SIZE
from polyhead.service.core.request import Terms
from polyhead.service.engine.event_stream import Stream, StreamContext
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
