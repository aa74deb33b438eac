"""JSON that is written in parts, and streams that are sent as they come."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from polyhead.service.api.access.admission import Admission, AdmissionLimits
from polyhead.service.api.access.middleware import send_uncounted
from polyhead.service.api.shared import streaming
from polyhead.service.api.shared.streaming import NUMPY_OPTION, EventStream, dumps_sliced
from tests.support.scripted import FakeEngine, until

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=60,
)


@given(JSON)
def test_json_in_parts_is_the_same_json(value: Any) -> None:
    assert dumps_sliced(value) == orjson.dumps(value)


def test_arrays_and_long_lists_in_parts_are_the_same_json() -> None:
    rows = np.arange(30_000, dtype=np.float32).reshape(100, 300) / 7
    for value in (
        rows,
        list(rows),
        [rows, rows[:2]],
        list(range(20_000)),
        {"data": [{"index": index, "embedding": row} for index, row in enumerate(rows)], "model": 'a"b'},
        [],
        {},
    ):
        assert dumps_sliced(value) == orjson.dumps(value, option=NUMPY_OPTION)


def test_a_ping_and_an_event_that_wait_for_a_client_leave_its_place_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by an attack: both left it, and -1 requests were in flight in all and for the key."""
    monkeypatch.setattr(streaming, "KEEPALIVE_S", 0.001)
    admission = Admission(AdmissionLimits(4, 1000, 0.5), FakeEngine(), {"a", "b"})
    reads, has_next, waiting = asyncio.Event(), asyncio.Event(), list[bytes]()

    async def chunks() -> AsyncGenerator[bytes, None]:
        yield b"one"
        await has_next.wait()
        yield b"two"

    async def send(message: Message) -> None:
        if message.get("body") in (b"ping", b"two"):
            waiting.append(message["body"])
            await reads.wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    def counted() -> list[int]:
        return [admission.in_flight, admission._by_owner["a"].in_flight]

    async def run() -> None:
        with admission.open_permit("a") as permit:
            permit.acquire()
            stream = await EventStream.open(chunks(), b"ping")
            sending = asyncio.create_task(stream({}, receive, send_uncounted(permit, send)))
            await until(lambda: waiting == [b"ping"])
            assert counted() == [0, 0]
            has_next.set()
            await until(lambda: waiting == [b"ping", b"two"])
            assert counted() == [0, 0]
            reads.set()
            await sending
            assert counted() == [1, 1]
        assert counted() == [0, 0]

    asyncio.run(run())
