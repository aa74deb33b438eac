"""Request bodies that are sent compressed (`Content-Encoding: gzip` or `deflate`, RFC 9110), decoded piece by piece.

A small body may expand a thousandfold, so no piece is longer than PIECE_BYTES and the caller counts each before it asks
for the next.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence

from ...core.errors import BadRequest, UnsupportedType

PIECE_BYTES = 1 << 16  # decoded bytes at a time
WINDOW_BITS: Mapping[str, int] = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
ACCEPTED_CODINGS = "gzip, deflate"  # the header Accept-Encoding of a refusal (RFC 9110, section 12.5.3)
MAX_QUOTED_CHARS = 100  # characters of the header that an error repeats


class ContentDecoder:
    """Decodes one body."""

    def __init__(self, coding: str) -> None:
        self.coding = coding
        self._decompressor = zlib.decompressobj(WINDOW_BITS[coding])

    def decode(self, data: bytes) -> Iterator[bytes]:
        """The decoded bytes of the next part of the body, in pieces.  Raises BadRequest if it is not valid."""
        while data:
            if self._decompressor.eof:
                raise BadRequest(f"the body: has bytes after the end of its {self.coding} data")
            try:
                piece = self._decompressor.decompress(data, PIECE_BYTES)
            except zlib.error:
                message = f"the body: is not {self.coding} data, as its Content-Encoding says"
                raise BadRequest(message, param="Content-Encoding") from None
            data = self._decompressor.unconsumed_tail or self._decompressor.unused_data
            yield piece

    def finish(self) -> None:
        """Raises BadRequest if the data has no end yet."""
        if not self._decompressor.eof:
            raise BadRequest(f"the body: its {self.coding} data is cut short")


def make_decoder(values: Sequence[str]) -> ContentDecoder | None:
    """The decoder for the values of Content-Encoding; None for a body that is sent as it is.

    Raises UnsupportedType for other codings, and for several.
    """
    codings = [coding.strip().lower() for value in values for coding in value.split(",")]
    match [coding for coding in codings if coding not in ("", "identity")]:
        case []:
            return None
        case [coding] if coding in WINDOW_BITS:
            return ContentDecoder(coding)
        case _:
            given = ", ".join(values)[:MAX_QUOTED_CHARS]
            message = f"Content-Encoding: {given!r} is not supported; send gzip, deflate or no coding"
            raise UnsupportedType(message, param="Content-Encoding")
