"""Readers of bodies: a call reads few chunks, so that hundreds of clients that send tiny chunks delay others little."""

import pytest

from polyhead.service.api.http.request_body import MAX_CHUNKS, ChunkedBody

TINY_CHUNK = b"1\r\na\r\n"
TURN_CHUNKS = 50_000  # of 500 connections together in one turn of the event loop: about 50 ms


def test_the_tiny_chunks_of_hundreds_of_connections_are_a_short_turn() -> None:
    reader, buffer, body = ChunkedBody(), bytearray(TINY_CHUNK * 1050 + b"0\r\n\r\n"), bytearray()
    while not reader.complete:
        before = len(body)
        reader.consume(buffer, body)
        assert 500 * (len(body) - before) <= TURN_CHUNKS
        assert reader.is_paused != reader.complete
    assert (body, buffer) == (b"a" * 1050, b"")


def test_a_large_chunk_is_read_in_one_call() -> None:
    reader, body = ChunkedBody(), bytearray()
    reader.consume(bytearray(b"%x\r\n%s\r\n0\r\n\r\n" % (1 << 16, b"a" * (1 << 16))), body)
    assert (reader.complete, len(body)) == (True, 1 << 16)


@pytest.mark.parametrize("count", [MAX_CHUNKS, 2 * MAX_CHUNKS])
def test_a_reader_that_has_read_all_of_its_buffer_does_not_pause(count: int) -> None:
    """Nothing would tell it to go on: it is paused until it has read the rest of the buffer."""
    reader, buffer, body = ChunkedBody(), bytearray(TINY_CHUNK * count), bytearray()
    while buffer:
        reader.consume(buffer, body)
    assert not reader.is_paused
    reader.consume(bytearray(b"0\r\n\r\n"), body)
    assert (reader.complete, len(body)) == (True, count)
