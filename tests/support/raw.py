"""HTTP as bytes on a socket, for requests that no client library sends."""

import json
import socket
from dataclasses import dataclass
from typing import Any

PATIENCE = 120.0


@dataclass
class Said:
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def connected(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def heard(client: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    parts = []
    while part := client.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def answers(content: bytes, *heads: int) -> list[Said]:
    """All answers in `content`; those to the requests with these numbers have no body, whatever their headers are."""
    found: list[Said] = []
    while content:
        head, _, content = content.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        size = 0 if len(found) in heads else int(headers.get("content-length", 0))
        found.append(Said(int(first.split()[1]), headers, content[:size]))
        content = content[size:]
    return found


def said(port: int, *parts: bytes) -> list[Said]:
    """The answers to `parts` until the server closes the connection."""
    with connected(port) as client:
        for part in parts:
            client.sendall(part)
        return answers(heard(client))


def post(body: bytes, *fields: bytes, path: bytes = b"/v1/completions") -> bytes:
    """A whole request with a Content-Length and `Connection: close`."""
    lines = [b"POST %s HTTP/1.1" % path, b"Host: localhost", b"Connection: close", *fields]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


def chunked(*chunks: bytes, path: bytes = b"/v1/completions") -> bytes:
    """The same in chunks, without the last one; `chunks` are sent as they are."""
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n" % path
    return head + b"".join(chunks)


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


LAST = b"0\r\n\r\n"
