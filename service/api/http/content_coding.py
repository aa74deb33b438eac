"""Request bodies that are sent compressed (`Content-Encoding`, RFC 9110), decoded piece by piece.

A few bytes may expand a thousandfold, and millions to nothing. So a decoder gets SLICE_BYTES of the body and returns
PIECE_BYTES at a time, the caller counts each piece before it asks for the next, and a body that is much longer than
what it expands to is refused. The work is thereby bounded by the limit on decoded bytes.
"""

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...core.errors import BadRequest, UnsupportedType

try:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
except ImportError:  # Python can be built without it
    HAS_ZSTD = False
else:
    HAS_ZSTD = True

SLICE_BYTES = 1 << 13  # of the body at a time: a turn of the event loop is a millisecond or two at most
PIECE_BYTES = 1 << 16  # decoded bytes at a time
MAX_OVERHEAD_BYTES = 1 << 18  # that a body may be longer than what it expands to; decoders keep 128 KiB back
MAX_WINDOW_LOG = 23  # of zstd: the 8 MiB that RFC 9659 permits as a content coding
MAX_FRAMES = 4096  # of zstd in one body: each one has a decoder
MAX_QUOTED_CHARS = 100  # characters of the header that an error repeats


class CodedData(Protocol):
    """The state of one decoder."""

    @property
    def is_complete(self) -> bool:
        """Whether the data may end here."""

    def expand(self, data: bytes) -> Iterator[bytes]:
        """What the next bytes expand to, in pieces, some of them empty. Raises BadRequest if they are not valid."""


class DeflateData:
    """One gzip member, or zlib's format of deflate."""

    def __init__(self, coding: str, window_bits: int) -> None:
        self._coding, self._decompressor = coding, zlib.decompressobj(window_bits)

    @property
    def is_complete(self) -> bool:
        return self._decompressor.eof

    def expand(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._decompressor.eof:
                raise BadRequest(f"the body: has bytes after the end of its {self._coding} data")
            try:
                piece = self._decompressor.decompress(data, PIECE_BYTES)
            except zlib.error:
                message = f"the body: is not {self._coding} data, as its Content-Encoding says"
                raise BadRequest(message, param="Content-Encoding") from None
            data = self._decompressor.unconsumed_tail or self._decompressor.unused_data
            yield piece


class ZstdData:
    """Frames of Zstandard one after another, of which those to be skipped expand to nothing (RFC 8878)."""

    def __init__(self) -> None:
        self._frame, self._count = start_frame(), 1

    @property
    def is_complete(self) -> bool:
        return self._frame.eof

    def expand(self, data: bytes) -> Iterator[bytes]:
        while data or not (self._frame.eof or self._frame.needs_input):
            if self._frame.eof:
                self._frame, self._count = start_frame(), self._count + 1
            if self._count > MAX_FRAMES:
                raise BadRequest(f"the body: has more than {MAX_FRAMES} frames of zstd, at most so many are read")
            try:
                piece = self._frame.decompress(data, PIECE_BYTES)
            except zstd.ZstdError as error:
                message = f"the body: is not zstd data with a window of {1 << MAX_WINDOW_LOG} bytes at most: {error}"
                raise BadRequest(message, param="Content-Encoding") from None
            data = self._frame.unused_data if self._frame.eof else b""
            yield piece


def start_frame() -> "zstd.ZstdDecompressor":
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG})


@dataclass(frozen=True)
class Coding:
    """A content coding. Its decoder takes about `memory` bytes, beside a window of what is decoded already."""

    start: Callable[[str], CodedData]
    memory: int


def start_gzip(coding: str) -> DeflateData:
    return DeflateData(coding, 16 + zlib.MAX_WBITS)


CODINGS: Mapping[str, Coding] = {
    "gzip": Coding(start_gzip, 48 << 10),
    "x-gzip": Coding(start_gzip, 48 << 10),
    "deflate": Coding(lambda coding: DeflateData(coding, zlib.MAX_WBITS), 48 << 10),
    **({"zstd": Coding(lambda _: ZstdData(), 512 << 10)} if HAS_ZSTD else {}),
}
ACCEPTED_CODINGS = ", ".join(name for name in CODINGS if name != "x-gzip")  # Accept-Encoding of a refusal (RFC 9110)


class ContentDecoder:
    """Decodes one body. `memory` is that of its state in bytes."""

    def __init__(self, coding: str) -> None:
        self.coding, self.memory = coding, CODINGS[coding].memory
        self._data, self._received, self._decoded = CODINGS[coding].start(coding), 0, 0

    def decode(self, data: bytes) -> Iterator[bytes]:
        """The decoded bytes of the next part of the body, in pieces.  Raises BadRequest if it is not valid."""
        for start in range(0, len(data), SLICE_BYTES):
            part = data[start : start + SLICE_BYTES]
            self._received += len(part)
            for piece in self._data.expand(part):
                self._decoded += len(piece)
                yield piece
            if self._received > self._decoded + MAX_OVERHEAD_BYTES:
                message = f"its {self.coding} data is {MAX_OVERHEAD_BYTES} bytes longer than what it expands to"
                raise BadRequest(f"the body: {message}; send it without a coding", param="Content-Encoding")

    def finish(self) -> None:
        """Raises BadRequest if the data has no end yet."""
        if not self._data.is_complete:
            raise BadRequest(f"the body: its {self.coding} data is cut short")


def make_decoder(values: Sequence[str]) -> ContentDecoder | None:
    """The decoder for the values of Content-Encoding; None for a body that is sent as it is.

    Raises UnsupportedType for other codings, and for several.
    """
    codings = [coding.strip().lower() for value in values for coding in value.split(",")]
    match [coding for coding in codings if coding not in ("", "identity")]:
        case []:
            return None
        case [coding] if coding in CODINGS:
            return ContentDecoder(coding)
        case _:
            given = ", ".join(values)[:MAX_QUOTED_CHARS]
            message = f"Content-Encoding: {given!r} is not supported; send {ACCEPTED_CODINGS} or no coding"
            raise UnsupportedType(message, param="Content-Encoding")
