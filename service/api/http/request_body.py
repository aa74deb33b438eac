"""How a body comes: so many bytes, or in chunks that say their own size (RFC 9112, section 7).

Knows neither head nor socket.  The one idea: a reader moves what it understands from one buffer to another and keeps
nothing, so that a million chunks of one byte weigh as much as one of a million; and it stops after so many of them,
so that whoever sends them waits, not everybody else.
"""

import re

from ...core.errors import Unreadable
from .request_head import CHUNKED, CRLF, END, MOST_FIELDS, TEXT, read_fields

MOST_CHUNKS = 1000  # read in one go: about a millisecond
LONGEST_LINE = 256  # bytes before a chunk
MOST_EXTRA = 16 << 10  # bytes of a body's chunk extensions, which nobody reads, or of its trailer
LINE = re.compile(rb"([0-9A-Fa-f]{1,15})((?:;[%s]*)?)\r\n" % re.escape(TEXT))


class Counted:
    """A body of `left` bytes."""

    busy = False  # there is nothing it leaves for later

    def __init__(self, left: int) -> None:
        self.left = left

    @property
    def complete(self) -> bool:
        return not self.left

    def take(self, buffer: bytearray, into: bytearray) -> None:
        piece = buffer[: self.left]
        into += piece
        del buffer[: len(piece)]
        self.left -= len(piece)


class Chunked:
    """`busy` says that it stopped though `buffer` may hold more."""

    def __init__(self) -> None:
        self.complete = self.busy = False
        self.left = 0  # bytes of a chunk that was begun
        self.within = self.last = False  # a chunk; the trailer
        self.extra = 0

    def take(self, buffer: bytearray, into: bytearray) -> None:
        """Raises Unreadable."""
        at = self.go_on(buffer, 0, into) if self.within else 0
        if not (self.within or self.last):
            at = self.take_whole(buffer, at, into)
            if self.within:
                at = self.go_on(buffer, at, into)
        del buffer[:at]
        if self.last:
            self.end(buffer)
        elif not (self.within or self.busy):
            check_begun(buffer)

    def go_on(self, buffer: bytearray, at: int, into: bytearray) -> int:
        """With the chunk that was begun; where it ends, or what has come of it."""
        piece = buffer[at : at + self.left]
        into += piece
        self.left -= len(piece)
        end = at + len(piece)
        if self.left or len(buffer) < end + len(CRLF):
            return end
        if not buffer.startswith(CRLF, end):
            raise Unreadable(400, "the body: a chunk is longer than it said")
        self.within = False
        return end + len(CRLF)

    def take_whole(self, buffer: bytearray, at: int, into: bytearray) -> int:
        """As many chunks as are there; where the next begins, or the bytes of one that was begun."""
        for _ in range(MOST_CHUNKS):
            line = LINE.match(buffer, at)
            if line is None:
                self.busy = False
                return at
            digits, extension = line.groups()
            if extension:
                self.overlook(extension)
            start = line.end()
            at = start + int(digits, 16)
            if at == start or buffer[at : at + 2] != CRLF:
                self.left, self.last = at - start, at == start
                self.within, self.busy = not self.last, False
                return start
            into += buffer[start:at]
            at += 2
        self.busy = True
        return at

    def overlook(self, extension: bytes) -> None:
        self.extra += len(extension)
        if self.extra > MOST_EXTRA or len(extension) > LONGEST_LINE:
            raise Unreadable(400, "the body: its chunks have longer extensions than are read")

    def end(self, buffer: bytearray) -> None:
        """What follows the last chunk: fields that must be right and that nobody reads."""
        if buffer.startswith(CRLF):
            del buffer[: len(CRLF)]
            self.complete = True
            return
        end = buffer.find(END)
        if end > MOST_EXTRA or (end < 0 and len(buffer) > MOST_EXTRA) or buffer.count(b"\n", 0, end) > MOST_FIELDS:
            raise Unreadable(431, "the body: its trailer is longer than is read")
        if end >= 0:
            read_fields(bytes(buffer[:end]).split(CRLF))
            del buffer[: end + len(END)]
            self.complete = True


def check_begun(buffer: bytearray) -> None:
    """Raises Unreadable if `buffer` doesn't begin with a part of a chunk's line."""
    if b"\n" in buffer or len(buffer) > LONGEST_LINE:
        raise Unreadable(400, "the body: a chunk must begin with its size in hexadecimal digits, on a line of its own")


def body_of(length: int) -> Counted | Chunked:
    return Chunked() if length == CHUNKED else Counted(length)
