"""The parsers of heads and bodies compared with another HTTP parser: both accept the same requests, and read them
alike.

Every byte of a few valid requests is removed, doubled, and replaced by each byte with a meaning.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import h11
import pytest

from polyhead.service.api.http.request_body import ChunkedBody
from polyhead.service.api.http.request_head import (
    CHUNKED_LENGTH,
    CRLF,
    HEAD_END,
    LIST_SEPARATORS,
    MAX_ITEMS,
    RequestHead,
    find_head_end,
    read_head,
)
from polyhead.service.core.errors import UnreadableRequest

MEANT = b"\r\n\t \0:;,/?%#-+=0Aa\x7f\xff"
HEADS = (
    b"GET /v1/models?a=b HTTP/1.1\r\nHost: x:80\r\nX-A:  b c \r\n\r\n",
    b"POST /a%20b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 12\r\nConnection: close\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n",
)
BODIES = (b"5\r\nhello\r\n0\r\n\r\n", b"0a;b=c\r\n0123456789\r\n1\r\n!\r\n0\r\nX: y\r\n\r\n")
START = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def changed(content: bytes) -> Iterator[bytes]:
    for at in range(len(content)):
        before, after = content[:at], content[at + 1 :]
        yield before + after
        for byte in MEANT:
            yield before + bytes([byte]) + after
            yield before + bytes([byte]) + content[at:]


def ours(content: bytes) -> RequestHead | None:
    try:
        end = find_head_end(bytearray(content), 0)
        return read_head(content[:end]) if end else None
    except UnreadableRequest:
        return None


def theirs(content: bytes) -> h11.Request | None:
    connection = h11.Connection(h11.SERVER, 1 << 20)
    connection.receive_data(content)
    try:
        found = connection.next_event()
    except h11.RemoteProtocolError:
        return None
    return found if isinstance(found, h11.Request) else None


@pytest.mark.parametrize("head", HEADS)
def test_accepted_heads_are_read_like_another_parser(head: bytes) -> None:
    taken = refused = 0
    for content in changed(head):
        mine, others = ours(content), theirs(content)
        if mine is None:
            refused += 1
            continue
        taken += 1
        assert others is not None, content
        raw = mine.raw_path + (b"?" + mine.query if mine.query else b"")
        assert others.method == mine.method.encode()
        assert others.target.rstrip(b"?").endswith(raw.rstrip(b"?")), content
        assert [(name, value) for name, value in others.headers if name != b"content-length"] == [
            (name, value.lower() if name == b"transfer-encoding" else value)
            for name, value in mine.fields
            if name != b"content-length"
        ]
        lengths = [int(value) for name, value in others.headers if name == b"content-length"]
        coded = any(name == b"transfer-encoding" for name, _ in others.headers)
        assert mine.length == (CHUNKED_LENGTH if coded else (lengths or [0])[0])
    assert taken > 100
    assert refused > 100


def refusal(content: bytes, cuts: Iterable[int]) -> str:
    """Why a head is refused that comes in pieces; empty if it is not refused before its end, or if it has none."""
    buffer, searched = bytearray(), 0
    for start, end in pairwise((0, *cuts, len(content))):
        buffer += content[start:end]
        try:
            if find_head_end(buffer, searched):
                return ""
        except UnreadableRequest as error:
            return error.message
        searched = len(buffer)
    return ""


@pytest.mark.parametrize("head", HEADS)
def test_a_head_is_refused_for_the_same_reason_wherever_it_is_cut(head: bytes) -> None:
    refused = 0
    for content in changed(head):
        whole = refusal(content, ())
        refused += bool(whole)
        assert refusal(content, range(1, len(content))) == whole, content
        for cut in range(1, len(content)):
            assert refusal(content, (cut,)) == whole, (content, cut)
    assert refused > 20


class CountedBuffer(bytearray):
    """Counts the bytes in which line ends are searched, by what is searched."""

    def __init__(self) -> None:
        super().__init__()
        self.searched = Counter[bytes]()

    def count(self, sought: Any, start: Any = 0, end: Any = None) -> int:
        self.searched[sought] += max((len(self) if end is None else end) - start, 0)
        return super().count(sought, start, len(self) if end is None else end)

    def find(self, sought: Any, start: Any = 0, end: Any = None) -> int:
        self.searched[sought] += max((len(self) if end is None else end) - start, 0)
        return super().find(sought, start, len(self) if end is None else end)


def test_a_head_that_comes_byte_by_byte_is_searched_once() -> None:
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"\r" * 4000
    buffer = CountedBuffer()
    for at in range(len(head)):
        buffer += head[at : at + 1]
        assert find_head_end(buffer, at) == 0
    for sought in (CRLF, HEAD_END):
        assert buffer.searched[sought] <= 4 * len(head), sought


def test_a_trailer_that_comes_byte_by_byte_is_searched_once() -> None:
    reader, buffer = ChunkedBody(), CountedBuffer()
    trailer = b"0\r\nX: " + b"\r" * 4000
    for byte in trailer:
        buffer.append(byte)
        reader.consume(buffer, bytearray())
    assert buffer.searched[HEAD_END] <= 4 * len(trailer)


def decoded(content: bytes, size: int) -> bytes | None:
    """The content of a body that is read in pieces of such a size; nothing if it is invalid or does not end."""
    reader, buffer, body = ChunkedBody(), bytearray(), bytearray()
    try:
        for start in range(0, len(content), size):
            buffer += content[start : start + size]
            if not reader.complete:
                reader.consume(buffer, body)
    except UnreadableRequest:
        return None
    return bytes(body) if reader.complete else None


def decoded_by_others(content: bytes) -> bytes | None:
    connection, body = h11.Connection(h11.SERVER), b""
    connection.receive_data(START + content)
    try:
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                return None
            body += bytes(event.data) if isinstance(event, h11.Data) else b""
    except h11.RemoteProtocolError:
        return None
    return body


@pytest.mark.parametrize("body", BODIES)
def test_accepted_bodies_are_read_like_another_parser(body: bytes) -> None:
    taken = 0
    for content in changed(body):
        mine = decoded(content, 1 << 16)
        assert mine in (None, decoded_by_others(content)), content
        assert mine == decoded(content, 1) == decoded(content, 3), content
        taken += mine is not None
    assert taken > 20


@pytest.mark.parametrize("body", BODIES)
def test_after_a_fault_a_body_never_ends(body: bytes) -> None:
    """Whatever follows, in pieces of any size, is discarded."""
    faults = 0
    for content in changed(body):
        reader, into = ChunkedBody(), bytearray()
        try:
            reader.consume(bytearray(content), into)
        except UnreadableRequest:
            faults += 1
            before = bytes(into)
            for rest in (b"0\r\n\r\n", b"\r\n0\r\n\r\n", content, *(body[at : at + 1] for at in range(len(body)))):
                buffer = bytearray(rest)
                reader.consume(buffer, into)
                assert (reader.complete, buffer, bytes(into)) == (False, b"", before), (content, rest)
    assert faults > 20


def test_the_end_of_a_head_is_found_wherever_it_is_cut() -> None:
    for head in HEADS:
        for cut in range(1, len(head)):
            buffer = bytearray(head[:cut])
            assert find_head_end(buffer, 0) == 0
            searched = len(buffer)
            buffer += head[cut:] + b"GET / HTTP/1.1" + HEAD_END
            assert find_head_end(buffer, searched) == len(head)


def head_with(*fields: bytes, query: bytes = b"") -> bytes:
    return CRLF.join((b"GET /?" + query + b" HTTP/1.1", b"Host: localhost", *fields, b"", b""))


@pytest.mark.parametrize("separator", [b",", b";"])
@pytest.mark.parametrize("name", [b"accept", b"accept-encoding", b"connection", b"content-encoding", b"expect"])
def test_a_list_of_thousands_of_items_is_refused_before_it_is_read(name: bytes, separator: bytes) -> None:
    """Whether it stands in one field, or in many of the same name.  The refusal names the field."""
    assert separator in LIST_SEPARATORS[name]
    for fields in ([separator * MAX_ITEMS], [*2 * [separator * (MAX_ITEMS // 2 - 1)], b""]):
        with pytest.raises(UnreadableRequest, match=f"(?i)^{name.decode()}: has {MAX_ITEMS + 1} items") as refused:
            read_head(head_with(*(name + b": " + value for value in fields)))
        assert refused.value.status == 431


@pytest.mark.parametrize("name", LIST_SEPARATORS)
def test_a_list_of_many_items_is_read_whole(name: bytes) -> None:
    value = b"100-continue" + LIST_SEPARATORS[name][0] * (MAX_ITEMS - 1)
    assert (name, value) in read_head(head_with(name + b": " + value)).fields
    with pytest.raises(UnreadableRequest):
        read_head(head_with(name + b": " + value, name + b": "))


def test_the_escapes_of_cookies_are_counted() -> None:
    """Each is replaced by itself where cookies are read: thousands take milliseconds."""
    value = b'a="' + rb"\303" * (MAX_ITEMS - 1) + b'"'
    assert (b"cookie", value) in read_head(head_with(b"cookie: " + value)).fields
    with pytest.raises(UnreadableRequest, match=r"^Cookie: has 257 ") as refused:
        read_head(head_with(b"cookie: " + value + rb"\303"))
    assert refused.value.status == 431


def test_what_is_no_list_may_have_any_number_of_commas() -> None:
    fields = [(b"user-agent", b"a;" * 4000), (b"cookie", b"," * 4000), (b"authorization", b"," * 4000)]
    found = read_head(head_with(*(name + b": " + value for name, value in fields)))
    assert found.fields[1:] == fields


def test_a_query_of_thousands_of_parameters_is_refused_before_it_is_read() -> None:
    assert read_head(head_with(query=b"a&" * (MAX_ITEMS - 1))).query.count(b"a") == MAX_ITEMS - 1
    with pytest.raises(UnreadableRequest, match=f"the query has {MAX_ITEMS + 1} parameters") as refused:
        read_head(head_with(query=b"a&" * MAX_ITEMS))
    assert refused.value.status == 414
