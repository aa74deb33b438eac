"""Messages between an ingress and a replica: what is too large is refused early, what is large is read on a thread."""

import asyncio
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import msgpack
import pytest
from pydantic import Field, ValidationError

from polyhead.service.core.request import Done, Failed, Generate, GeneratedToken, PromptScores
from polyhead.service.fleet import frames, messages
from polyhead.service.fleet.frames import LENGTH_BYTES, FrameError, encode_frame, pack, row_validator, unpack
from polyhead.service.fleet.messages import (
    EVENTS_PER_FRAME,
    FILLED_BYTES,
    SMALL_FRAME_BYTES,
    THREAD_BYTES,
    MessageRoute,
    fill_frames,
    pack_rows,
    read_message,
)
from polyhead.service.fleet.replica import ASK_FIELDS
from polyhead.service.fleet.replica_connection import EVENT_FIELDS, HELLO_FIELDS

MILLION = 1_000_000


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The value of the next frame, of whatever kind."""
    return unpack(await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")))


class Receiver:
    """Routes that keep what they get, and the thread that validated it."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.threads: list[threading.Thread] = []
        self.routes = {
            "load": MessageRoute(row_validator(int), self.received.append),
            "said": MessageRoute(self.validate, self.received.append, frames.MAX_FRAME_BYTES),
        }

    def validate(self, row: Any) -> Any:
        self.threads.append(threading.current_thread())
        return EVENT_FIELDS(row)

    async def read(self, data: bytes) -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        (await read_message(reader, self.routes))()


def announced(length: int, data: bytes) -> bytes:
    return struct.pack(">I", length) + data


def items(count: int, item: bytes = b"\xc0") -> bytes:
    """An array of so many items, nil if nothing else is asked for."""
    return b"\xdd" + struct.pack(">I", count) + item * count


def said(events: bytes) -> bytes:
    body = b"\x92" + pack("said") + events
    return announced(len(body), body)


def test_a_message_calls_the_function_of_its_kind() -> None:
    receiver = Receiver()
    asyncio.run(receiver.read(encode_frame(("load", 3))))
    assert receiver.received == [3]
    with pytest.raises(asyncio.IncompleteReadError):
        asyncio.run(receiver.read(encode_frame(("load", 3))[:-1]))


@pytest.mark.parametrize("value", [(), 7, None, "load", {"load": 3}, (["load"], 3), ("dance",), ("x" * 40,)], ids=str)
def test_what_is_no_message_is_refused(value: Any) -> None:
    with pytest.raises(FrameError, match="its first field is no known message type"):
        asyncio.run(Receiver().read(encode_frame(value)))


@pytest.mark.parametrize(
    ("length", "head", "said"),
    [
        (1 << 31, b"", "a frame of 2147483648 bytes is announced; at most 268435456 are read"),
        (SMALL_FRAME_BYTES + 1, b"\x92" + pack("load"), "262145 bytes is announced; load has at most 262144"),
        (1 << 20, b"\x92" + pack("dance"), "its first field is no known message type"),
    ],
)
def test_a_frame_that_is_too_large_is_refused_before_it_is_received(length: int, head: bytes, said: str) -> None:
    with pytest.raises(FrameError, match=said):
        asyncio.run(Receiver().read(announced(length, head + bytes(40))))


def test_large_frames_are_decoded_on_a_thread_and_small_ones_are_not() -> None:
    receiver, large = Receiver(), "x" * THREAD_BYTES
    for text in ("x", large):
        asyncio.run(receiver.read(encode_frame(("said", ((1, text),)))))
    assert receiver.received == [((1, "x"),), ((1, large),)]
    here = threading.current_thread()
    assert [thread is here for thread in receiver.threads] == [True, False]


@pytest.mark.parametrize("wrong", [items(MILLION), items(MILLION, b"\x01"), items(MILLION, b"\x90")])
def test_a_million_wrong_items_make_one_error(wrong: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = list[int]()
    real = messages.describe_error

    def counted(error: Any) -> str:
        errors.append(error.error_count())
        return real(error)

    monkeypatch.setattr(messages, "describe_error", counted)
    with pytest.raises(FrameError) as raised:
        asyncio.run(Receiver().read(said(wrong)))
    assert errors == [1]
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("validate", [EVENT_FIELDS, ASK_FIELDS, HELLO_FIELDS, row_validator(frozenset[int] | None)])
def test_validation_ends_at_the_first_wrong_item(validate: Any) -> None:
    many = (None,) * MILLION
    for row in (many, (many,), ("chat", 1, many), (3, "x", 1, many, {}, 1, 1), (frozenset("abc"),)):
        with pytest.raises(ValidationError) as raised:
            validate(row)
        assert raised.value.error_count() <= 2  # one for each type of a union


@pytest.mark.parametrize("kind", frames.CODECS, ids=lambda kind: kind.__name__)
def test_every_codec_ends_at_the_first_wrong_item(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each field of each type in turn is a long row of wrong items."""
    counts = list[int]()
    real = frames.describe_error

    def counted(error: Any) -> str:
        counts.append(error.error_count() if hasattr(error, "error_count") else 1)
        return real(error)

    monkeypatch.setattr(frames, "describe_error", counted)
    wrong = tuple((None,) for _ in range(1000))
    for place in range(16):
        for length in range(place + 1, 17):
            row = [0] * length
            row[place] = wrong  # type: ignore[call-overload]
            data = msgpack.packb(msgpack.ExtType(frames.CODEC_NUMBERS[kind], msgpack.packb(tuple(row))))
            with suppress(FrameError):
                unpack(data)
    assert max(counts, default=1) <= 4  # one for each type of a union


def test_too_many_events_of_a_frame_are_refused() -> None:
    with pytest.raises(FrameError, match=f"at most {EVENTS_PER_FRAME} items"):
        asyncio.run(Receiver().read(said(items(EVENTS_PER_FRAME + 1, pack((1, None))))))


def test_a_message_has_no_part_of_a_model() -> None:
    for kind in frames.MODEL_NUMBERS:
        value = msgpack.packb(msgpack.ExtType(kind, pack(("{}",) * 6)))
        with pytest.raises(FrameError, match=f"{kind} is no extension type that may occur here"):
            asyncio.run(Receiver().read(said(b"\x91\x92\x01" + value)))


# The memory of a frame


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("MAX_ITEMS", items(10, items(10)), "its arrays have more than 50 items"),
        ("MAX_ARRAY_ITEMS", items(51), "51 exceeds max_array_len"),
        ("MAX_MAPS", items(51, b"\x80"), "it has more than 50 maps"),
        ("MAX_MAP_ITEMS", msgpack.packb({str(number): 0 for number in range(51)}), "51 exceeds max_map_len"),
        ("MAX_EXTENSIONS", items(51, pack(frozenset())), "or it has more than 50"),
    ],
)
def test_the_values_of_a_frame_are_counted(
    limit: str, value: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack(value)
    monkeypatch.setattr(frames, limit, 50)
    with pytest.raises(FrameError, match=said):
        unpack(value)


def test_arrays_that_announce_more_than_they_have_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hundred nested arrays of four million items, in a megabyte, would take ten gigabytes."""
    decoded = list[bytes]()
    monkeypatch.setattr(frames.msgpack, "unpackb", lambda data, **_: decoded.append(data))
    with pytest.raises(FrameError, match="cannot be read"):
        unpack((b"\xdd" + struct.pack(">I", frames.MAX_ARRAY_ITEMS)) * 300 + bytes(1 << 20))
    assert not decoded


# Rows in frames


def rows_of(frames: Sequence[bytes]) -> list[Any]:
    values = [unpack(frame[LENGTH_BYTES:]) for frame in frames]
    assert all(value[:2] == ("ask", 7) for value in values)
    return [value[2] for value in values]


def test_rows_are_spread_over_frames_and_parts_stay_together() -> None:
    half = "x" * (FILLED_BYTES // 2)
    parts = [pack_rows(rows) for rows in ([(1, half)], [(2, half), (3, "")], [(4, "")], [(5, half), (6, half)])]
    found = rows_of([*fill_frames(("ask", 7), parts, 10)])
    assert [[number for number, _ in rows] for rows in found] == [[1], [2, 3, 4], [5, 6]]
    found = rows_of([*fill_frames(("ask", 7), [pack_rows([(number,)]) for number in range(10)], 4)])
    assert found == [((0,), (1,), (2,), (3,)), ((4,), (5,), (6,), (7,)), ((8,), (9,))]
    assert [*fill_frames(("ask", 7), [], 4)] == []


def test_what_a_receiver_would_refuse_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = PromptScores(tuple((-1.0, ((1, -1.0), (2, -2.0))) for _ in range(100)))
    rows = [(1, scores)]
    frames.check_item_count(pack_rows(rows).data)
    monkeypatch.setattr(frames, "MAX_ITEMS", 500)
    with pytest.raises(FrameError, match="more than 500 items"):
        pack_rows(rows)
    monkeypatch.setattr(frames, "MAX_ARRAY_ITEMS", 50)
    with pytest.raises(FrameError, match="a field of Generate has more than 50 items"):
        pack_rows([(1, Generate("x", tuple(range(51)), 1))])


@pytest.mark.parametrize("event", [GeneratedToken(1), Done("stop", 3), Failed], ids=str)
def test_events_of_a_large_step_are_read_back(event: Any) -> None:
    receiver = Receiver()
    events = [(number, Done("stop", number) if event is Failed else event) for number in range(EVENTS_PER_FRAME + 5)]
    data = fill_frames(("said",), [pack_rows([row]) for row in events], EVENTS_PER_FRAME)
    for frame in data:
        asyncio.run(receiver.read(frame))
    assert [len(rows) for rows in receiver.received] == [EVENTS_PER_FRAME, 5]
    assert [row for rows in receiver.received for row in rows] == events


def test_a_limit_of_rows_keeps_validation_of_their_types() -> None:
    validate = row_validator(Annotated[tuple[tuple[int, str], ...], Field(max_length=2)])
    assert validate((((1, "a"),),)) == (((1, "a"),),)
    with pytest.raises(ValueError, match="valid string"):
        validate((((1, 2),),))
