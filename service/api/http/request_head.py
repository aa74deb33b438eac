"""Parses the head of an HTTP request (request line, header fields, length of the body) as strictly as RFC 9112 allows.

If two parsers understand the same bytes differently, a request can be smuggled past the first of them.  So anything
ambiguous is rejected and never repaired: a line that ends in a bare LF, a folded line, a space before a colon, two
lengths, a length together with chunked coding.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from ...core.errors import UnreadableRequest

MAX_LINE_BYTES = 8 << 10  # bytes of the request line, without its line end
MAX_FIELDS_BYTES = 32 << 10  # bytes of all fields together, with their line ends
MAX_FIELDS = 100
MAX_ITEMS = 256  # of a list in the header fields of one name, with the parameters of items; parameters of a query
MAX_LENGTH_DIGITS = 15  # digits of Content-Length
CRLF, HEAD_END = b"\r\n", b"\r\n\r\n"
CHUNKED_LENGTH = -1  # the length of a chunked body, which is not known before

TOKEN_CHARS = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
VALUE_CHARS = bytes([0x09, *range(0x20, 0x7F), *range(0x80, 0x100)])  # the bytes that a field value may contain
REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])")
ABSOLUTE_URI = re.compile(r"https?://([^/?#]+)", re.IGNORECASE)
MAX_HOST_CHARS = 255  # of a name in DNS (RFC 1035, section 2.3.4)
HOST_PATTERN = re.compile(
    rb"([A-Za-z0-9._~!$&'()*+,;=%%-]{1,%d}|\[[0-9A-Fa-f:.]{1,%d}\])(:[0-9]{0,5})?" % (MAX_HOST_CHARS, MAX_HOST_CHARS)
)
HOST_FORM = f"the name or address of a host, of at most {MAX_HOST_CHARS} characters, and perhaps a port"
REQUEST_ID_HEADERS = ("X-Request-Id", "Request-Id")  # response headers; Anthropic's clients read the second
HeaderFields = list[tuple[bytes, bytes]]
# The fields that are read as lists, here or by the application, with what separates items and their parameters. FastAPI
# reads cookies for each request, and each escape in them; browsers keep fewer than MAX_ITEMS for a host.
LIST_SEPARATORS: Mapping[bytes, tuple[bytes, ...]] = {
    **dict.fromkeys(
        (
            b"accept",
            b"accept-encoding",
            b"connection",
            b"content-encoding",
            b"expect",
            b"if-none-match",
            b"tracestate",
            b"x-forwarded-for",
        ),
        (b",", b";"),
    ),
    b"cookie": (b";", b"\\"),
}


@dataclass(frozen=True)
class RequestHead:
    """A parsed head.  `length` is that of the body in bytes, or CHUNKED_LENGTH; names of `fields` are in lower case."""

    method: str
    version: str  # 1.0 or 1.1
    raw_path: bytes
    path: str
    query: bytes
    fields: HeaderFields
    length: int
    closes: bool  # the connection ends after this request
    expects_continue: bool  # the client waits for "100 Continue"

    @property
    def is_http11(self) -> bool:
        return self.version == "1.1"


def find_head_end(buffer: bytearray, searched: int) -> int:
    """Where the head at the beginning of `buffer` ends; 0 if it is incomplete.

    The first `searched` bytes were searched before: they contain no end, and no line that ends in LF alone.  So the
    cost of a head does not grow with the number of its pieces.

    Raises UnreadableRequest as soon as the head is too large or cannot become a request.
    """
    if buffer[0] not in TOKEN_CHARS:
        raise UnreadableRequest(400, "the first byte begins no HTTP request; is it TLS? This port serves plain HTTP")
    end = buffer.find(HEAD_END, max(searched - len(HEAD_END) + 1, 0))
    size = end + len(CRLF) if end >= 0 else len(buffer)  # without the empty line
    line = buffer.find(b"\n", 0, min(MAX_LINE_BYTES + len(CRLF), size))
    if line < 0 and size >= MAX_LINE_BYTES + len(CRLF):
        raise UnreadableRequest(414, f"the request line is longer than the {MAX_LINE_BYTES} bytes that are read")
    if line >= 0 and size - line - 1 > MAX_FIELDS_BYTES:
        raise UnreadableRequest(431, f"the header fields have more than the {MAX_FIELDS_BYTES} bytes that are read")
    breaks = buffer.count(b"\n", 0, size)
    if breaks > MAX_FIELDS + 1:
        raise UnreadableRequest(431, f"there are more than the {MAX_FIELDS} header fields that are read")
    if buffer.count(b"\n", searched, size) != buffer.count(CRLF, max(searched - 1, 0), size):
        raise UnreadableRequest(400, "a line of the header ends in LF alone; lines end in CR LF")
    return end + len(HEAD_END) if end >= 0 else 0


def read_head(head: bytes) -> RequestHead:
    """Parse `head`, which ends with the empty line.  Raises UnreadableRequest."""
    first, *lines = head[: -len(HEAD_END)].split(CRLF)
    line = REQUEST_LINE.fullmatch(first)
    if line is None:
        raise UnreadableRequest(400, "the first line is not of the form METHOD TARGET HTTP/1.1")
    if line[3] != b"1":
        raise UnreadableRequest(505, f"HTTP/{line[3].decode()}.{line[4].decode()} is not supported; HTTP/1.1 is")
    fields = read_fields(lines)
    check_items(fields)
    is_http11 = line[4] != b"0"
    authority, raw_path, query = split_target(line[1], line[2])
    if (parameters := query.count("&") + 1) > MAX_ITEMS:
        raise UnreadableRequest(414, f"the query has {parameters} parameters, at most {MAX_ITEMS} are read")
    path = unquote(raw_path)
    if "\0" in path:
        raise UnreadableRequest(400, "the path has a NUL in it")
    check_host(fields, is_http11)
    if authority:
        fields = replace_host(fields, authority)
    return RequestHead(
        method=line[1].decode(),
        version="1.1" if is_http11 else "1.0",
        raw_path=raw_path.encode(),
        path=path,
        query=query.encode(),
        fields=fields,
        length=body_length(fields, is_http11),
        closes=not is_http11 or b"close" in field_items(fields, b"connection"),
        expects_continue=expects_continue(fields) and is_http11,
    )


def read_fields(lines: list[bytes]) -> HeaderFields:
    """Parse header fields.  Raises UnreadableRequest."""
    fields: HeaderFields = []
    for line in lines:
        name, colon, value = line.partition(b":")
        value = value.strip(b" \t")
        if not colon or not name or name.translate(None, TOKEN_CHARS) or value.translate(None, VALUE_CHARS):
            where = f"header field {len(fields) + 1}"
            raise UnreadableRequest(
                400, f"{where} is not of the form NAME: VALUE on one line, without control characters"
            )
        fields.append((name.lower(), value))
    return fields


def check_items(fields: HeaderFields) -> None:
    """Count the items of lists before any is read: each costs as much as hundreds of bytes that stand in no list.

    Raises UnreadableRequest, also for a field that may be ignored (RFC 9110, section 12.5): a part of a list would be
    another list.
    """
    items = Counter[bytes]()
    for name, value in fields:
        if name not in LIST_SEPARATORS:
            continue
        items[name] += 1 + sum(map(value.count, LIST_SEPARATORS[name]))
        if items[name] > MAX_ITEMS:
            field = name.decode().title()
            raise UnreadableRequest(
                431, f"{field}: has {items[name]} items and parameters, at most {MAX_ITEMS} are read"
            )


def split_target(method: bytes, target: bytes) -> tuple[str, str, str]:
    """Authority, path and query of a request target.

    Only the form http://host/path, which clients send to proxies, has an authority.
    """
    text = target.decode("ascii")
    absolute = ABSOLUTE_URI.match(text)
    authority, rest = (absolute[1], text[absolute.end() :]) if absolute else ("", text)
    path, _, query = rest.partition("?")
    if rest != text and not path:
        path = "/"
    if not path.startswith("/") and (method, path) != (b"OPTIONS", "*"):
        raise UnreadableRequest(400, "the target of a request must begin with / or with http://HOST")
    return authority, path, query


def replace_host(fields: HeaderFields, authority: str) -> HeaderFields:
    """`fields` with the host of the target instead of the header's, which is ignored then (RFC 9112, section 3.2.2)."""
    if not HOST_PATTERN.fullmatch(authority.encode()):
        raise UnreadableRequest(400, f"the target of a request must name {HOST_FORM}, and no user")
    return [(b"host", authority.encode()), *(pair for pair in fields if pair[0] != b"host")]


def check_host(fields: HeaderFields, is_http11: bool) -> None:
    hosts = field_values(fields, b"host")
    if len(hosts) > 1 or (is_http11 and not hosts):
        raise UnreadableRequest(400, f"a request has one Host field, this one has {len(hosts)}")
    if hosts and not HOST_PATTERN.fullmatch(hosts[0]):
        raise UnreadableRequest(400, f"Host: must be {HOST_FORM}")


def body_length(fields: HeaderFields, is_http11: bool) -> int:
    """The length of the body in bytes; CHUNKED_LENGTH if it is sent in chunks."""
    codings, lengths = field_values(fields, b"transfer-encoding"), field_values(fields, b"content-length")
    if codings and (lengths or not is_http11):
        conflict = "Content-Length" if lengths else "HTTP/1.0"
        raise UnreadableRequest(400, f"Transfer-Encoding: cannot stand beside {conflict}")
    if codings and (len(codings) > 1 or codings[0].lower() != b"chunked"):
        raise UnreadableRequest(501, "Transfer-Encoding: only chunked, once, is understood")
    if codings:
        return CHUNKED_LENGTH
    if len(lengths) > 1 or (lengths and not lengths[0].isdigit()):
        raise UnreadableRequest(400, "Content-Length: must be one number of bytes, in digits alone")
    if lengths and len(lengths[0]) > MAX_LENGTH_DIGITS:
        raise UnreadableRequest(
            413, f"Content-Length: has {len(lengths[0])} digits, at most {MAX_LENGTH_DIGITS} are read"
        )
    return int(lengths[0]) if lengths else 0


def expects_continue(fields: HeaderFields) -> bool:
    expected = field_items(fields, b"expect")
    if expected - {b"100-continue"}:
        raise UnreadableRequest(417, "Expect: only 100-continue is understood")
    return bool(expected)


def field_values(fields: HeaderFields, name: bytes) -> list[bytes]:
    return [value for known, value in fields if known == name]


def field_items(fields: HeaderFields, name: bytes) -> set[bytes]:
    """The comma-separated items of a field, in lower case."""
    return {part.strip(b" \t").lower() for value in field_values(fields, name) for part in value.split(b",")} - {b""}
