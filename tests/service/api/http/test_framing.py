"""Framing over raw sockets: invalid requests, requests that are too large, and requests that come too slowly.

One real server with short timeouts. Every rejection is an answer: a status, a body in OpenAI's format, a request id,
and the end of the connection."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Process
from tests.support.raw import LAST, Said, answers, chunk, chunked, connected, heard, post, said

LIMIT = 50_000  # bytes of a body
SHORT, LONGER = 1.0, 2.0  # seconds for a header and an idle connection, and for a body
GO_ON = json.dumps({"model": "chat", "prompt": [40, 41], "max_tokens": 1, "temperature": 0}).encode()
HOST = b"Host: localhost\r\n"
CLOSE = b"Connection: close\r\n"


@pytest.fixture(scope="module")
def server(tiny_generator: Path) -> Iterator[Process]:
    times = {"header": SHORT, "keep-alive": SHORT, "body": LONGER}
    flags = [part for name, seconds in times.items() for part in (f"--{name}-seconds", str(seconds))]
    process = Process(f"chat={tiny_generator}", "--cache-tokens", "4096", "--max-body-bytes", str(LIMIT), *flags)
    process.ready()
    yield process
    assert process.stop() == 0, process.log
    assert "traceback" not in "".join(map(str, process.lines))


@pytest.fixture
def port(server: Process) -> int:
    return int(server.url.rpartition(":")[2])


def get(*fields: bytes, first: bytes = b"GET /livez HTTP/1.1") -> bytes:
    return b"\r\n".join([first, *fields, b"", b""])


def posting(*fields: bytes, body: bytes = b"") -> bytes:
    return get(b"Host: localhost", *fields, first=b"POST /v1/completions HTTP/1.1") + body


def fields(count: int, size: int = 0) -> list[bytes]:
    """So many fields besides Host, which have so many bytes together, with their line ends."""
    names = [b"x-%d: " % number for number in range(count)]
    names[-1] += b"a" * max(size - len(HOST) - sum(len(name) + 2 for name in names), 0)
    return names


# Invalid requests: each is answered once, and what follows is not read


NO_REQUESTS = {
    # the request line
    "two spaces": (400, get(b"Host: localhost", first=b"GET  / HTTP/1.1")),
    "no version": (400, get(b"Host: localhost", first=b"GET /")),
    "a space at the end": (400, get(b"Host: localhost", first=b"GET / HTTP/1.1 ")),
    "a space in the target": (400, get(b"Host: localhost", first=b"GET /a b HTTP/1.1")),
    "a tab": (400, get(b"Host: localhost", first=b"GET\t/ HTTP/1.1")),
    "small letters": (400, get(b"Host: localhost", first=b"GET / http/1.1")),
    "no dot": (400, get(b"Host: localhost", first=b"GET / HTTP/11")),
    "letters beyond ASCII": (400, get(b"Host: localhost", first=b"GET /\xc3\xa9 HTTP/1.1")),
    "a target without a slash": (400, get(b"Host: localhost", first=b"GET livez HTTP/1.1")),
    "a star that is not for OPTIONS": (400, get(b"Host: localhost", first=b"GET * HTTP/1.1")),
    "a tunnel": (400, get(b"Host: localhost", first=b"CONNECT x:80 HTTP/1.1")),
    "a NUL in the path": (400, get(b"Host: localhost", first=b"GET /livez%00 HTTP/1.1")),
    "a method with an @": (400, get(b"Host: localhost", first=b"G@T / HTTP/1.1")),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    "a space before everything": (400, get(b"Host: localhost", first=b" GET / HTTP/1.1")),
    "three empty lines before": (400, b"\r\n" * 3 + get(b"Host: localhost")),
    "empty lines alone": (400, b"\r\n" * 30_000),
    "HTTP/2": (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "HTTP/0.9": (505, get(b"Host: localhost", first=b"GET / HTTP/0.9")),
    # line ends
    "LF alone": (400, b"GET / HTTP/1.1\nHost: x\n\n"),
    "one LF alone": (400, get(b"Host: x\nX: y")),
    "CR in a value": (400, get(b"Host: localhost", b"X: a\rb")),
    "a folded line": (400, get(b"Host: localhost", b"X: a", b" b")),
    "a line folded at once": (400, get(b" X: a", b"Host: localhost")),
    # header fields
    "a space before the colon": (400, get(b"Host: localhost", b"X : a")),
    "no colon": (400, get(b"Host: localhost", b"X")),
    "no name": (400, get(b"Host: localhost", b": a")),
    "a bracket in a name": (400, get(b"Host: localhost", b"X(): a")),
    "a NUL in a value": (400, get(b"Host: localhost", b"X: a\0b")),
    "ESC in a value": (400, get(b"Host: localhost", b"X: \x1b[2J")),
    "another expectation": (417, get(b"Host: localhost", b"Expect: tea")),
    # host
    "no host": (400, get(b"X: a")),
    "an empty host": (400, get(b"Host:")),
    "an empty host in HTTP/1.0": (400, get(b"Host: ", first=b"GET / HTTP/1.0")),
    "a port without a host": (400, get(b"Host: :80")),
    "a port without a host in the target": (400, get(b"Host: x", first=b"GET http://:80/ HTTP/1.1")),
    "a host of 256 characters": (400, get(b"Host: " + b"a" * 245 + b".localhost" + b"x")),
    "an address of 256 characters": (400, get(b"Host: [" + b":" * 256 + b"]")),
    "a host of 256 characters in the target": (400, get(b"Host: x", first=b"GET http://%s/ HTTP/1.1" % (b"a" * 256))),
    "two hosts": (400, get(b"Host: localhost", b"Host: y")),
    "the same host twice": (400, get(b"Host: localhost", b"Host: localhost")),
    "two hosts in HTTP/1.0": (400, get(b"Host: localhost", b"Host: y", first=b"GET / HTTP/1.0")),
    "a host of two words": (400, get(b"Host: x y")),
    "a host with a path": (400, get(b"Host: x/y")),
    "a port in letters": (400, get(b"Host: x:http")),
    # length of the body
    "a negative length": (400, posting(b"Content-Length: -1")),
    "a length with a plus": (400, posting(b"Content-Length: +5")),
    "a hexadecimal length": (400, posting(b"Content-Length: 0x5")),
    "a length in parts": (400, posting(b"Content-Length: 5 5")),
    "a list of lengths": (400, posting(b"Content-Length: 5, 5")),
    "an empty length": (400, posting(b"Content-Length:")),
    "a broken length": (400, posting(b"Content-Length: 5.0")),
    "a length in other digits": (400, posting("Content-Length: ٥".encode())),
    "the same length twice": (400, posting(b"Content-Length: 5", b"Content-Length: 5")),
    "two lengths": (400, posting(b"Content-Length: 5", b"Content-Length: 6")),
    "a length of many digits": (413, posting(b"Content-Length: " + b"9" * 5000)),
    "a length beside chunks": (400, posting(b"Content-Length: 5", b"Transfer-Encoding: chunked")),
    "chunks beside a length": (400, posting(b"Transfer-Encoding: chunked", b"Content-Length: 5")),
    "chunks in HTTP/1.0": (400, get(b"Transfer-Encoding: chunked", first=b"POST / HTTP/1.0")),
    "chunks twice": (501, posting(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked")),
    "chunks of chunks": (501, posting(b"Transfer-Encoding: chunked, chunked")),
    "compressed chunks": (501, posting(b"Transfer-Encoding: gzip, chunked")),
    "chunks that are no last": (501, posting(b"Transfer-Encoding: chunked, identity")),
    "no coding": (501, posting(b"Transfer-Encoding: identity")),
    "an empty coding": (501, posting(b"Transfer-Encoding:")),
    "nearly chunks": (501, posting(b"Transfer-Encoding: xchunked")),
    "chunks with a control character": (400, posting(b"Transfer-Encoding: \x0bchunked")),
    "chunks behind a space": (400, posting(b"Transfer-Encoding : chunked")),
    # size
    "a line over 8 KiB": (414, get(b"Host: localhost", first=b"GET /".ljust(8192 - 8, b"a") + b" HTTP/1.1")),
    "a line without an end": (414, b"GET /" + b"a" * 9000),
    "a hundred and one fields": (431, get(b"Host: localhost", *fields(100))),
    "fields over 32 KiB": (431, get(b"Host: localhost", *fields(5, 32 * 1024 + 1))),
    "fields without an end": (431, b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000),
    "fields without a name": (431, b"GET / HTTP/1.1\r\n" + b":\r\n" * 200),
}


@pytest.mark.parametrize("name", NO_REQUESTS)
def test_an_invalid_request_is_rejected_and_nothing_after_it_is_read(port: int, name: str) -> None:
    status, content = NO_REQUESTS[name]
    found = said(port, content + get(b"Host: localhost") * 2)
    assert [one.status for one in found] == [status]
    refused(found[0])


def refused(answer: Said) -> None:
    assert answer.headers["connection"] == "close"
    assert len(answer.headers["x-request-id"]) == 32
    assert answer.json["error"].keys() == {"message", "type", "param", "code"}
    assert answer.json["error"]["type"] == ("server_error" if answer.status > 499 else "invalid_request_error")


def test_refusals_are_counted_and_logged(server: Process, port: int) -> None:
    before = server.page.total("http_requests_total", status="505")
    [answer] = said(port, NO_REQUESTS["HTTP/2"][1])
    assert server.page.total("http_requests_total", status="505", route="", method="other") == before + 1
    asked = answer.headers["x-request-id"]
    [line] = server.until(lambda: [line for line in server.lines if line.get("request_id") == asked])
    assert line["message"].startswith("505 127.0.0.1:")
    assert "HTTP/2.0 is not supported; HTTP/1.1 is" in line["message"]
    assert line["level"] == "info"


# Valid requests


def livez(answer: Said) -> bool:
    return answer.status == 200 and bool(answer.body) and answer.json.get("live") is True


REQUESTS = {
    "an address in the target": get(b"Host: y", CLOSE[:-2], first=b"GET http://localhost:80/livez HTTP/1.1"),
    "an empty line before": b"\r\n" + get(b"Host: localhost", CLOSE[:-2]),
    "two empty lines before": b"\r\n\r\n" + get(b"Host: localhost", CLOSE[:-2]),
    "HTTP/1.0, which needs no host": get(first=b"GET /livez HTTP/1.0"),
    "a version to come": get(b"Host: localhost", CLOSE[:-2], first=b"GET /livez HTTP/1.9"),
    "any letters": get(b"hOST: localhost", b"CONNECTION: Close"),
    "an address of numbers": get(b"Host: [::1]:8000", CLOSE[:-2]),
    "a host of 255 characters": get(b"Host: " + b"a" * 245 + b".localhost:65535", CLOSE[:-2]),
    "spaces and tabs around": get(b"Host: \t localhost \t", CLOSE[:-2]),
    "bytes beyond ASCII": get(b"Host: localhost", b"X: \xff\xe9", CLOSE[:-2]),
    "an upgrade": get(b"Host: localhost", b"Connection: upgrade, close", b"Upgrade: h2c"),
    "a body": get(b"Host: localhost", CLOSE[:-2], b"Content-Length: 5") + b"hello",
    "a hundred fields": get(b"Host: localhost", CLOSE[:-2], *fields(98)),
    "a line of 8 KiB": get(b"Host: localhost", CLOSE[:-2], first=b"GET /livez?".ljust(8192 - 9, b"a") + b" HTTP/1.1"),
    "fields of 32 KiB": get(b"Host: localhost", CLOSE[:-2], *fields(3, 32 * 1024 - len(CLOSE))),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_may_have(port: int, name: str) -> None:
    [answer] = said(port, REQUESTS[name])
    assert livez(answer), answer
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    "path", ["/%", "/%zz", "/%ff%fe", "/%0dX:%20y", "//", "/..%2f..%2fetc", "/v1/models/%e2%80%ae"]
)
def test_invalid_paths_are_404(port: int, path: str) -> None:
    [answer] = said(port, get(b"Host: localhost", CLOSE[:-2], first=f"GET {path} HTTP/1.1".encode()))
    assert answer.status == 404


def test_options_of_the_server_are_answered(port: int) -> None:
    [answer] = said(port, get(b"Host: localhost", CLOSE[:-2], first=b"OPTIONS * HTTP/1.1"))
    assert answer.status in (404, 405)


def test_requests_in_a_row_are_answered_in_their_order(port: int) -> None:
    """Also if they come in pieces of any size."""
    row = get(b"Host: localhost") + posting(b"Content-Length: %d" % len(GO_ON), body=GO_ON)
    row += get(b"Host: localhost", first=b"HEAD /livez HTTP/1.1")
    row += posting(b"Transfer-Encoding: chunked", body=chunk(GO_ON) + LAST) + get(b"Host: localhost", CLOSE[:-2])
    for size in (1, 7, len(row)):
        with connected(port) as client:
            for start in range(0, len(row), size):
                client.sendall(row[start : start + size])
            found = answers(heard(client), 2)
        assert [one.status for one in found] == [200] * 5
        assert [livez(one) for one in found] == [True, False, False, False, True]
        assert found[1].json["choices"] == found[3].json["choices"]
        assert found[2].headers["content-length"] == found[0].headers["content-length"]


def test_a_body_is_never_a_request(port: int) -> None:
    inside = get(b"Host: localhost", first=b"GET /smuggled HTTP/1.1")
    for content in (post(inside), chunked(chunk(inside), LAST)):
        [answer] = said(port, content)
        assert answer.status == 400
        assert "not valid JSON" in answer.message


def test_100_continue_is_sent_when_the_body_is_read(port: int) -> None:
    with connected(port) as client:
        client.sendall(posting(b"Content-Length: %d" % len(GO_ON), b"Expect: 100-continue", CLOSE[:-2]))
        assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(GO_ON)
        [answer] = answers(heard(client))
    assert answer.status == 200


def test_100_continue_is_not_sent_for_a_body_that_is_not_read(port: int) -> None:
    [answer] = said(port, posting(b"Content-Length: %d" % (LIMIT + 1), b"Expect: 100-continue"))
    assert answer.status == 413


# Bodies


CHUNKS = {
    "more than it said": b"2\r\nabc\r\n",
    "a plus": b"+5\r\nhello\r\n",
    "a minus": b"-5\r\nhello\r\n",
    "a prefix": b"0x5\r\nhello\r\n",
    "a space": b"5 \r\nhello\r\n",
    "no size": b"\r\nhello\r\n",
    "letters": b"five\r\nhello\r\n",
    "LF alone": b"5\nhello\n0\n\n",
    "LF in an extension": b"5;a\nb\r\nhello\r\n",
    "CR in an extension": b"5;a\rb\r\nhello\r\n",
    "a size of many digits": b"0000000000000005\r\nhello\r\n",
    "a long extension": b"5;" + b"a" * 300 + b"\r\nhello\r\n",
    "many extensions": (b"1;" + b"a" * 200 + b"\r\nx\r\n") * 100,
    "no field in the trailer": b"0\r\nX\r\n\r\n",
}


@pytest.mark.parametrize("name", CHUNKS)
def test_invalid_chunks_are_rejected(port: int, name: str) -> None:
    [answer] = said(port, chunked(CHUNKS[name], LAST, get(b"Host: localhost")))
    assert answer.status == 400
    refused(answer)
    assert answer.json["error"]["code"] == "malformed_request"


def test_trailers_are_limited(port: int) -> None:
    for trailer in (b"X: y\r\n" * 200, b"X: " + b"y" * 20_000):
        [answer] = said(port, chunked(b"0\r\n", trailer, b"\r\n"))
        assert answer.status == 431


def test_extensions_and_trailers_are_ignored(port: int) -> None:
    parts = [b"%X;why=because\r\n%s\r\n" % (1, GO_ON[:1]), chunk(GO_ON[1:]), b"000\r\nX-Sum: 1\r\n\r\n"]
    [answer] = said(port, chunked(*parts))
    assert answer.status == 200


def sized(size: int) -> bytes:
    return GO_ON.ljust(size)


@pytest.mark.parametrize("over", [0, 1])
def test_the_limit_of_a_body_is_exact(port: int, over: int) -> None:
    body = sized(LIMIT + over)
    for content in (post(body), chunked(chunk(body), LAST), chunked(*map(chunk, (body[:-1], body[-1:])), LAST)):
        [answer] = said(port, content)
        assert answer.status == (413 if over else 200)


def test_a_body_with_a_large_length_is_rejected_before_it_is_sent(port: int) -> None:
    [answer] = said(port, posting(b"Content-Length: %d" % (LIMIT + 1)))
    assert answer.status == 413
    assert answer.message == f"the body has {LIMIT + 1} bytes, at most {LIMIT} are taken"
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("framed", [lambda body: post(body), lambda body: chunked(chunk(body), LAST)])
def test_a_client_that_sends_a_large_body_first_can_read_the_error(port: int, framed: Any) -> None:
    """The answer is not lost in a reset, and nothing of the rest of the body is kept."""
    [answer] = said(port, framed(b" " * (8 << 20)))
    assert answer.status == 413


def test_megabytes_of_header_are_not_kept(server: Process, port: int) -> None:
    before, sent = server.resident(), 0
    with connected(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        try:
            while sent < 64 << 20:
                sent += client.send(b"X: " + b"a" * (1 << 16) + b"\r\n")
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert sent < 64 << 20, "it was read to its end"
    assert server.resident() - before < 1  # MiB


# Timeouts


def seconds_until_closed(client: socket.socket, began: float) -> tuple[float, bytes]:
    content = heard(client)
    return time.monotonic() - began, content


def test_idle_and_slow_clients_are_disconnected(server: Process, port: int) -> None:
    """A stream that takes longer than all of these timeouts is not affected."""
    beginnings = {
        "silence": (SHORT, b""),
        "empty lines": (SHORT, b"\r\n\r\n"),
        "half a line": (SHORT, b"GET /li"),
        "half a header": (SHORT, get(b"Host: localhost")[:-2]),
        "an answered request": (SHORT, get(b"Host: localhost")),
        "half a second header": (SHORT, get(b"Host: localhost") + b"GET"),
        "no body": (LONGER, posting(b"Content-Length: 5")),
        "half a body": (LONGER, post(GO_ON)[:-5]),
        "half a chunk": (LONGER, chunked(b"5\r\nhe")),
        "no end of chunks": (LONGER, chunked(chunk(b"he"))),
        "half a trailer": (LONGER, chunked(b"0\r\nX: y\r\n")),
    }
    with ExitStack() as held:
        began, clients = time.monotonic(), {}
        for name, (_, content) in beginnings.items():
            clients[name] = held.enter_context(connected(port))
            clients[name].sendall(content)
        ends = {name: seconds_until_closed(client, began) for name, client in clients.items()}
    for name, (expected, _) in beginnings.items():
        assert ends[name][0] > 0.9 * expected, name
        assert ends[name][0] < expected + 60, name
    statuses = {name: [one.status for one in answers(content)] for name, (_, content) in ends.items()}
    assert statuses.pop("silence") == statuses.pop("empty lines") == []
    assert statuses.pop("an answered request") == [200]
    assert statuses.pop("half a second header") == [200, 408]
    assert set(map(tuple, statuses.values())) == {(408,)}
    assert not server.page.total("http_requests_in_flight")


def test_a_slow_header_has_a_total_timeout(port: int) -> None:
    with connected(port) as client:
        began = time.monotonic()
        client.sendall(b"GET / HTTP/1.1\r\n")
        client.settimeout(SHORT / 20)
        content = b""
        while not content and time.monotonic() < began + 120:
            client.send(b"x")
            try:
                content = client.recv(1000)
            except TimeoutError:
                continue
    assert b" 408 " in content
    assert f"the header was not complete within {SHORT:g} s".encode() in content


def test_a_slow_body_has_a_total_timeout(server: Process, port: int) -> None:
    with connected(port) as client:
        client.sendall(posting(b"Content-Length: 1000"))
        client.settimeout(LONGER / 20)
        began, content = time.monotonic(), b""
        while not content and time.monotonic() < began + 120:
            client.send(b" ")
            try:
                content = client.recv(1000)
            except TimeoutError:
                continue
    assert b" 408 " in content
    assert f"the body was not complete within {LONGER:g} s".encode() in content
    assert time.monotonic() - began > 0.9 * LONGER
