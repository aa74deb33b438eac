"""Forms with a file: where they end, and what is said first of a form that cannot be read."""

import asyncio

import pytest
import python_multipart
from fastapi import Request
from starlette.types import Message

from polyhead.service.api.dialects.batches.upload import PIECE_BYTES, read_upload
from polyhead.service.concurrency.time_slices import TakeTurn
from polyhead.service.core.errors import BadRequest, Overloaded, PolyheadError

PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx--b--y\r\n'


async def yield_at_once() -> None:
    """A turn of the event loop that no other waits for."""


def read(form: bytes, size: int, error: PolyheadError | None = None, take_turn: TakeTurn = yield_at_once) -> bytes:
    """The content of the file in `form`, which comes in pieces of `size` bytes, and then `error`."""
    pieces = [form[start : start + size] for start in range(0, len(form), size)]

    async def receive() -> Message:
        if not pieces:
            assert error is not None
            raise error
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces) or error is not None}

    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    return asyncio.run(read_upload(Request({"type": "http", "headers": headers}, receive), take_turn)).content


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_bytes_behind_the_end_are_refused(size: int) -> None:
    for end in (b"", b"\r\n", b" \r\n\r\n"):
        assert read(PURPOSE + FILE + b"--b--" + end, size) == b"x--b--y"
    for end in (b"z", b"\r\nz", b"\r\n" + FILE):
        with pytest.raises(BadRequest, match="there are bytes behind the end of the form"):
            read(PURPOSE + FILE + b"--b--" + end, size)
    with pytest.raises(BadRequest, match="the form has no end"):
        read(PURPOSE + FILE + b"--b\r\n", size)


@pytest.mark.parametrize("form", [b"no form" * 9, FILE + b"--b--" + FILE])
def test_a_form_that_cannot_be_read_is_refused_once_its_body_has_room(form: bytes) -> None:
    with pytest.raises(BadRequest):
        read(form, 7)
    with pytest.raises(Overloaded):
        read(form, 7, Overloaded("no room", retry_after=1))


@pytest.mark.parametrize("behind", [b"a", b"\r", b"-", b" \r\n", b"-\r\n"])
@pytest.mark.parametrize("count", [1, 1_000_000])
def test_lines_that_begin_with_the_boundary_and_go_on_are_refused_unread(
    behind: bytes, count: int, parsed: list[int]
) -> None:
    """The parser reads the rest of a piece byte by byte behind each of them."""
    false = (b"\r\n--b" + behind) * count
    with pytest.raises(BadRequest, match="a line begins with the boundary and goes on; choose another boundary"):
        read(PURPOSE + FILE[:-2] + false + b"\r\n--b--", 1 << 20)
    assert parsed == []


def test_more_lines_with_the_boundary_than_fields_are_refused_unread(parsed: list[int]) -> None:
    with pytest.raises(BadRequest, match="more than 5 lines are the boundary; there are 4 fields"):
        read(PURPOSE * 100_000 + FILE + b"--b--", 1 << 20)
    assert parsed == []


def test_a_form_is_parsed_in_pieces_of_bounded_size_between_turns(parsed: list[int]) -> None:
    """However it comes: a compressed body may expand to megabytes at once."""
    turns = list[int]()

    async def take_turn() -> None:
        turns.append(len(parsed))

    content = b"x" * (3 * PIECE_BYTES)
    form = PURPOSE + FILE.replace(b"x--b--y", content) + b"--b--"
    assert read(form, len(form), take_turn=take_turn) == content
    assert max(parsed) <= PIECE_BYTES
    assert turns == list(range(len(parsed)))


@pytest.mark.parametrize("place", range(-9, 3))
def test_a_line_with_the_boundary_may_lie_in_two_pieces(place: int, parsed: list[int]) -> None:
    head = PURPOSE + FILE.partition(b"x--b--y")[0]
    content = b"x" * (PIECE_BYTES + place - len(head))
    assert read(head + content + b"\r\n--b--\r\n", 1 << 20) == content
    with pytest.raises(BadRequest, match="a line begins with the boundary and goes on"):
        read(head + content + b"\r\n--b?\r\n--b--", 1 << 20)
    with pytest.raises(BadRequest, match="there are bytes behind the end of the form"):
        read(head + content + b"\r\n--b--\r\n" * 2, 1 << 20)


def test_space_behind_the_end_is_bounded() -> None:
    with pytest.raises(BadRequest, match="there are bytes behind the end of the form"):
        read(PURPOSE + FILE + b"--b--" + b"\r\n" * 1000, 1 << 20)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the pieces that are parsed."""
    sizes, write = list[int](), python_multipart.MultipartParser.write

    def record(self: python_multipart.MultipartParser, data: bytes) -> int:
        sizes.append(len(data))
        return write(self, data)

    monkeypatch.setattr(python_multipart.MultipartParser, "write", record)
    return sizes
