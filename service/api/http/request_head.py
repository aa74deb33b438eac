"""The head of a request: its line, its fields, and what they say of the body, read as strictly as RFC 9112 lets one.

Knows no socket and no route.  The one idea: where two readers understand the same bytes differently, a request can be
smuggled past the first of them.  So what could be read in two ways is refused and never mended: a line that ends in a
bare LF, a folded one, a space before a colon, two lengths, a length beside chunks.
"""

import re
from dataclasses import dataclass
from urllib.parse import unquote

from ...core.errors import Unreadable

LONGEST_LINE = 8 << 10  # bytes of the request line, without its end
LARGEST_FIELDS = 32 << 10  # bytes of all fields together, with the ends of their lines
MOST_FIELDS = 100
MOST_DIGITS = 15  # of a length
CRLF, END = b"\r\n", b"\r\n\r\n"
CHUNKED = -1  # a length that nobody knows before

TOKEN = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
TEXT = bytes([0x09, *range(0x20, 0x7F), *range(0x80, 0x100)])  # what the value of a field is made of
LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])")
ABSOLUTE = re.compile(r"https?://([^/?#]+)", re.IGNORECASE)
HOST = re.compile(rb"([A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(:[0-9]{0,5})?")
IDS = ("X-Request-Id", "Request-Id")  # headers of an answer; Anthropic's clients read the second
Fields = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Head:
    """`length` is that of the body in bytes, or CHUNKED; `fields` have names in small letters, in their order."""

    method: str
    version: str  # 1.0 or 1.1
    raw_path: bytes
    path: str
    query: bytes
    fields: Fields
    length: int
    closes: bool  # nothing comes after it on this connection
    expects: bool  # a word that the body is wanted

    @property
    def modern(self) -> bool:
        return self.version == "1.1"


def end_of(buffer: bytearray, searched: int) -> int:
    """Where the head at the beginning of `buffer` ends; 0: not yet, and there was no end in the first `searched` bytes.

    Raises Unreadable as soon as what has come is too much or can't become a request.
    """
    if buffer[0] not in TOKEN:
        raise Unreadable(400, "the first byte begins no HTTP request; is it TLS? Plain HTTP is spoken here")
    end = buffer.find(END, max(searched - len(END) + 1, 0))
    size = end + len(CRLF) if end >= 0 else len(buffer)  # without the empty line
    line = buffer.find(b"\n", 0, min(LONGEST_LINE + len(CRLF), size))
    if line < 0 and size >= LONGEST_LINE + len(CRLF):
        raise Unreadable(414, f"the request line is longer than the {LONGEST_LINE} bytes that are read")
    if line >= 0 and size - line - 1 > LARGEST_FIELDS:
        raise Unreadable(431, f"the header fields have more than the {LARGEST_FIELDS} bytes that are read")
    breaks = buffer.count(b"\n", 0, size)
    if breaks > MOST_FIELDS + 1:
        raise Unreadable(431, f"there are more than the {MOST_FIELDS} header fields that are read")
    if breaks != buffer.count(CRLF, 0, size):
        raise Unreadable(400, "a line of the header ends in LF alone; lines end in CR LF")
    return end + len(END) if end >= 0 else 0


def read_head(head: bytes) -> Head:
    """`head` is everything up to its empty line and with it.  Raises Unreadable."""
    first, *lines = head[: -len(END)].split(CRLF)
    line = LINE.fullmatch(first)
    if line is None:
        raise Unreadable(400, "the first line is not of the form METHOD TARGET HTTP/1.1")
    if line[3] != b"1":
        raise Unreadable(505, f"HTTP/{line[3].decode()}.{line[4].decode()} is not spoken here; HTTP/1.1 is")
    fields = read_fields(lines)
    modern = line[4] != b"0"
    authority, raw_path, query = target_of(line[1], line[2])
    path = unquote(raw_path)
    if "\0" in path:
        raise Unreadable(400, "the path has a NUL in it")
    check_host(fields, modern)
    if authority:
        fields = directed(fields, authority)
    return Head(
        method=line[1].decode(),
        version="1.1" if modern else "1.0",
        raw_path=raw_path.encode(),
        path=path,
        query=query.encode(),
        fields=fields,
        length=length_of(fields, modern),
        closes=not modern or b"close" in listed(fields, b"connection"),
        expects=expectation(fields) and modern,
    )


def read_fields(lines: list[bytes]) -> Fields:
    """Raises Unreadable."""
    fields: Fields = []
    for line in lines:
        name, colon, value = line.partition(b":")
        value = value.strip(b" \t")
        if not colon or not name or name.translate(None, TOKEN) or value.translate(None, TEXT):
            where = f"header field {len(fields) + 1}"
            raise Unreadable(400, f"{where} is not of the form NAME: VALUE on one line, without control characters")
        fields.append((name.lower(), value))
    return fields


def target_of(method: bytes, target: bytes) -> tuple[str, str, str]:
    """Authority, path and query as they came; only http://host/path, which is what proxies are asked, has the first."""
    text = target.decode("ascii")
    absolute = ABSOLUTE.match(text)
    authority, asked = (absolute[1], text[absolute.end() :]) if absolute else ("", text)
    path, _, query = asked.partition("?")
    if asked != text and not path:
        path = "/"
    if not path.startswith("/") and (method, path) != (b"OPTIONS", "*"):
        raise Unreadable(400, "the target of a request must begin with / or with http://HOST")
    return authority, path, query


def directed(fields: Fields, authority: str) -> Fields:
    """`fields` with the host of the target in place of the header's, which does not count then (RFC 9112, 3.2.2)."""
    if not HOST.fullmatch(authority.encode()):
        raise Unreadable(400, "the target of a request must name a host, and perhaps a port, and no user")
    return [(b"host", authority.encode()), *(pair for pair in fields if pair[0] != b"host")]


def check_host(fields: Fields, modern: bool) -> None:
    hosts = values(fields, b"host")
    if len(hosts) > 1 or (modern and not hosts):
        raise Unreadable(400, f"a request has one Host field, this one has {len(hosts)}")
    if hosts and not HOST.fullmatch(hosts[0]):
        raise Unreadable(400, "Host: must be the name or address of a host, and perhaps a port")


def length_of(fields: Fields, modern: bool) -> int:
    """How long the body is; CHUNKED if it says so itself."""
    codings, lengths = values(fields, b"transfer-encoding"), values(fields, b"content-length")
    if codings and (lengths or not modern):
        beside = "Content-Length" if lengths else "HTTP/1.0"
        raise Unreadable(400, f"Transfer-Encoding: cannot stand beside {beside}")
    if codings and (len(codings) > 1 or codings[0].lower() != b"chunked"):
        raise Unreadable(501, "Transfer-Encoding: only chunked, once, is understood")
    if codings:
        return CHUNKED
    if len(lengths) > 1 or (lengths and not lengths[0].isdigit()):
        raise Unreadable(400, "Content-Length: must be one number of bytes, in digits alone")
    if lengths and len(lengths[0]) > MOST_DIGITS:
        raise Unreadable(413, f"Content-Length: has {len(lengths[0])} digits, at most {MOST_DIGITS} are read")
    return int(lengths[0]) if lengths else 0


def expectation(fields: Fields) -> bool:
    expected = listed(fields, b"expect")
    if expected - {b"100-continue"}:
        raise Unreadable(417, "Expect: only 100-continue is understood")
    return bool(expected)


def values(fields: Fields, name: bytes) -> list[bytes]:
    return [value for known, value in fields if known == name]


def listed(fields: Fields, name: bytes) -> set[bytes]:
    """What stands between the commas, in small letters."""
    return {part.strip(b" \t").lower() for value in values(fields, name) for part in value.split(b",")} - {b""}
