"""Messages on the connection of an ingress and a replica: how they are read, and how large each kind may be.

A message is a frame whose value is a row: its kind, then its fields.  The kind is read first, so a frame that is too
large for its kind is refused before it is received.  Large frames are decoded on a thread.  Requests and events are
sent in frames of about FILLED_BYTES.
"""

from asyncio import StreamReader
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack
from pydantic import ValidationError

from ..concurrency.outcome import run_on_daemon_thread
from .frames import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    FieldRow,
    FrameError,
    check_item_count,
    describe_error,
    frame,
    pack,
    unpack_message,
)

SMALL_FRAME_BYTES = 1 << 18  # bytes of a frame whose kind has no limit of its own
THREAD_BYTES = 1 << 16  # bytes of a frame; larger ones are decoded on a thread
FILLED_BYTES = 1 << 20  # bytes of a frame to which no more rows are added
EVENTS_PER_FRAME = 1 << 10  # events in one frame, at most
REQUESTS_PER_FRAME = 1 << 12  # requests in one frame, at most
MODELS_PER_FRAME = 1 << 14  # models in one frame, at most
MAX_TEXT = 1000  # characters of the name of a model, or of the reason why it is broken
HEAD_BYTES = 33  # bytes of a frame within which its kind ends: two of msgpack, and a text of at most 31

Work = Coroutine[Any, Any, None] | None


@dataclass(frozen=True)
class MessageRoute:
    """A kind of message: the validator of its fields, the function that gets them, and the bytes that it may have.

    The function may return a coroutine, which is awaited before the next message is read.
    """

    validate: Callable[[Any], FieldRow]
    function: Callable[..., Work]
    max_bytes: int = SMALL_FRAME_BYTES


async def read_message(reader: StreamReader, routes: Mapping[str, MessageRoute]) -> Callable[[], Work]:
    """Read the next message.  Return the function of its route, with its fields as arguments.

    Raises FrameError for a bad one and IncompleteReadError at the end of the connection.
    """
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is announced; at most {MAX_FRAME_BYTES} are read")
    head = await reader.readexactly(min(length, HEAD_BYTES))
    kind = message_kind(head)
    if kind not in routes:
        raise FrameError("its first field is no known message type")
    route = routes[kind]
    if length > route.max_bytes:
        raise FrameError(f"a frame of {length} bytes is announced; {kind} has at most {route.max_bytes}")
    decode = partial(decode_fields, kind, route, head, await reader.readexactly(length - len(head)))
    fields = await run_on_daemon_thread(decode) if length > THREAD_BYTES else decode()
    return partial(route.function, *fields)


def message_kind(head: bytes) -> str:
    """Return the kind of the message that begins with `head`.  Raises FrameError if it begins otherwise.

    A row of at most 15 fields begins with the byte 0x90 plus their number, a text of at most 31 bytes with 0xa0 plus
    their number (the formats fixarray and fixstr of the msgpack specification).
    """
    if len(head) < 2 or head[0] & 0xF0 != 0x90 or head[1] & 0xE0 != 0xA0:
        raise FrameError("its first field is no known message type")
    return head[2 : 2 + (head[1] & 0x1F)].decode(errors="replace")


def decode_fields(kind: str, route: MessageRoute, head: bytes, rest: bytes) -> FieldRow:
    """Decode and validate the fields of a message.  Raises FrameError."""
    try:
        return route.validate(unpack_message(head + rest)[1:])
    except ValidationError as error:
        raise FrameError(f"{kind}: {describe_error(error)}") from None


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a message that belong in the same frame, packed one after the other."""

    count: int
    data: bytes


def pack_rows(rows: Sequence[Any]) -> PackedRows:
    """Pack rows of a message.  Raises FrameError if they cannot be sent, or are more than a frame may have."""
    data = b"".join(map(pack, rows))
    if len(data) > MAX_FRAME_BYTES - FILLED_BYTES:
        raise FrameError(f"{len(data)} bytes are more than a frame has, {MAX_FRAME_BYTES - FILLED_BYTES}")
    check_item_count(data)
    return PackedRows(len(rows), data)


def fill_frames(fields: Sequence[Any], parts: Iterable[PackedRows], max_rows: int) -> Iterator[bytes]:
    """Yield frames of messages that have `fields`, and then a row of rows: all those of `parts`, in order."""
    count, size, filled = 0, 0, list[bytes]()
    for part in parts:
        if filled and (size + len(part.data) > FILLED_BYTES or count + part.count > max_rows):
            yield frame_rows(fields, count, filled)
            count, size, filled = 0, 0, []
        count, size = count + part.count, size + len(part.data)
        filled.append(part.data)
    if filled:
        yield frame_rows(fields, count, filled)


def frame_rows(fields: Sequence[Any], count: int, rows: Sequence[bytes]) -> bytes:
    """Return the frame of the message (*fields, rows)."""
    packer = msgpack.Packer()
    head = packer.pack_array_header(len(fields) + 1) + b"".join(map(pack, fields))
    return frame(b"".join((head, packer.pack_array_header(count), *rows)))
