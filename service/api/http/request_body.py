"""Readers of request bodies: of a given length, or in chunks (RFC 9112, section 7).

A reader moves bytes from one buffer to another and keeps none itself, so a million chunks of one byte cost as much
memory as one chunk of a million.  It pauses after MAX_CHUNKS chunks, so that one client does not block the event loop.
"""

import re

from ...core.errors import UnreadableRequest
from .request_head import CHUNKED_LENGTH, CRLF, HEAD_END, MAX_FIELDS, VALUE_CHARS, read_fields

MAX_CHUNKS = 100  # read in one call, which takes a tenth of a millisecond; hundreds of connections may each make one
MAX_LINE_BYTES = 256  # bytes of a chunk's first line
MAX_EXTRA_BYTES = 16 << 10  # bytes of all chunk extensions, which are ignored, or of the trailer
CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})((?:;[%s]*)?)\r\n" % re.escape(VALUE_CHARS))


class FixedLengthBody:
    """A body of `remaining` bytes."""

    is_paused = is_broken = False  # it never pauses, and any bytes are a body

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining

    @property
    def complete(self) -> bool:
        return not self.remaining

    def consume(self, buffer: bytearray, into: bytearray) -> None:
        piece = buffer[: self.remaining]
        into += piece
        del buffer[: len(piece)]
        self.remaining -= len(piece)


class ChunkedBody:
    """A body in chunks.  `is_paused`: it stopped although the buffer may hold more.

    After a fault it `is_broken`: the end of the body cannot be found any more.  It never becomes complete, and all
    further input is discarded, so that no part of the body is read as a request.
    """

    def __init__(self) -> None:
        self.complete = self.is_paused = self.is_broken = False
        self.remaining = 0  # bytes left of the current chunk
        self.in_chunk = self.in_trailer = False  # inside a chunk, inside the trailer
        self.extra_bytes = 0
        self.searched_bytes = 0  # bytes of the trailer that contain no end

    def consume(self, buffer: bytearray, into: bytearray) -> None:
        """Move the decoded bytes of `buffer` to `into`.  Raises UnreadableRequest at the first fault."""
        try:
            if not self.is_broken:
                self.read(buffer, into)
        except UnreadableRequest:
            self.is_broken, self.is_paused = True, False
            raise
        finally:
            if self.is_broken:
                buffer.clear()

    def read(self, buffer: bytearray, into: bytearray) -> None:
        at = self.continue_chunk(buffer, 0, into) if self.in_chunk else 0
        if not (self.in_chunk or self.in_trailer):
            at = self.read_chunks(buffer, at, into)
            if self.in_chunk:
                at = self.continue_chunk(buffer, at, into)
        del buffer[:at]
        if self.in_trailer:
            self.read_trailer(buffer)
        elif not (self.in_chunk or self.is_paused):
            check_chunk_line(buffer)

    def continue_chunk(self, buffer: bytearray, at: int, into: bytearray) -> int:
        """Continue the chunk that was begun.  Returns the position after what was read."""
        piece = buffer[at : at + self.remaining]
        into += piece
        self.remaining -= len(piece)
        end = at + len(piece)
        if self.remaining or len(buffer) < end + len(CRLF):
            return end
        if not buffer.startswith(CRLF, end):
            raise UnreadableRequest(400, "the body: a chunk is longer than its size")
        self.in_chunk = False
        return end + len(CRLF)

    def read_chunks(self, buffer: bytearray, at: int, into: bytearray) -> int:
        """Read as many complete chunks as there are.

        Returns where the next chunk begins, or where the data of an incomplete one begins.
        """
        for _ in range(MAX_CHUNKS):
            line = CHUNK_LINE.match(buffer, at)
            if line is None:
                self.is_paused = False
                return at
            digits, extension = line.groups()
            if extension:
                self.skip_extension(extension)
            start = line.end()
            at = start + int(digits, 16)
            if at == start or buffer[at : at + 2] != CRLF:
                self.remaining, self.in_trailer = at - start, at == start
                self.in_chunk, self.is_paused = not self.in_trailer, False
                return start
            into += buffer[start:at]
            at += 2
        self.is_paused = at < len(buffer)
        return at

    def skip_extension(self, extension: bytes) -> None:
        self.extra_bytes += len(extension)
        if self.extra_bytes > MAX_EXTRA_BYTES or len(extension) > MAX_LINE_BYTES:
            raise UnreadableRequest(400, "the body: its chunks have longer extensions than are read")

    def read_trailer(self, buffer: bytearray) -> None:
        """Read the trailer after the last chunk.  Its fields must be valid; they are not used."""
        if buffer.startswith(CRLF):
            del buffer[: len(CRLF)]
            self.complete = True
            return
        end = buffer.find(HEAD_END, max(self.searched_bytes - len(HEAD_END) + 1, 0))
        self.searched_bytes = len(buffer)
        if (
            end > MAX_EXTRA_BYTES
            or (end < 0 and len(buffer) > MAX_EXTRA_BYTES)
            or buffer.count(b"\n", 0, end) > MAX_FIELDS
        ):
            raise UnreadableRequest(431, "the body: its trailer is longer than is read")
        if end >= 0:
            read_fields(bytes(buffer[:end]).split(CRLF))
            del buffer[: end + len(HEAD_END)]
            self.complete = True


def check_chunk_line(buffer: bytearray) -> None:
    """Raises UnreadableRequest if `buffer` does not begin with a part of a chunk's first line."""
    if b"\n" in buffer or len(buffer) > MAX_LINE_BYTES:
        raise UnreadableRequest(
            400, "the body: a chunk must begin with its size in hexadecimal digits, on a line of its own"
        )


def make_body_reader(length: int) -> FixedLengthBody | ChunkedBody:
    return ChunkedBody() if length == CHUNKED_LENGTH else FixedLengthBody(length)
