"""A hub on 127.0.0.1 with the routes that downloads call: a repository's description, and contents with ranges and
redirects."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DRIP_SECONDS, DRIPS = 0.01, 10_000  # between two pieces of an answer that does not end, and their number
SMALL_BYTES = 1000  # longer files are stored apart, as the hub does with large ones, and answered by a redirect


@dataclass
class HubStub:
    """`repositories` has the files by repository; `gated` and `failing` name repositories that are refused, or answered
    by a status of the server's fault. `cut_after` bytes of a content the connection ends, `cuts` times. `requests` are
    the method, the path and the header Range of all requests. `ranges`: whether ranges are answered.
    `drips` are what an answer to a path begins with, and what follows it again and again until the client is gone;
    `dripping` is set then. `answers` are the status, the headers and the content of what is answered to a path,
    whatever else is there.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    digests: dict[str, str] = field(default_factory=dict)  # false ones, by file
    sizes: dict[str, Any] = field(default_factory=dict)  # the same
    cut_after: int = 0
    cuts: int = 0
    ranges: bool = True
    answers: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    drips: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    dripping: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)

    def contents(self) -> list[str]:
        """The names of the files whose content was asked for."""
        return [path.rpartition(f"/{COMMIT}/")[2] for _, path, _ in self.requests if "/resolve/" in path]


def describe(stub: HubStub, name: str) -> dict[str, Any]:
    siblings = []
    for file, content in stub.repositories[name].items():
        sha1 = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        entry: dict[str, Any] = {"rfilename": file, "size": stub.sizes.get(file, len(content)), "blobId": sha1}
        if len(content) > SMALL_BYTES:
            sha256 = stub.digests.get(file, hashlib.sha256(content).hexdigest())
            entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
        siblings.append(entry)
    return {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}


def request_handler(stub: HubStub) -> type[BaseHTTPRequestHandler]:
    class Routes(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            stub.requests.append(("GET", path, self.headers.get("Range", "")))
            stub.tokens.append(self.headers.get("Authorization", ""))
            name, revision, file = "", "", ""
            if path in stub.drips:
                self.drip(*stub.drips[path])
                return
            if path in stub.answers:
                status, headers, content = stub.answers[path]
                self.answer(status, content, headers)
                return
            if path.startswith("/api/models/"):
                name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            elif "/resolve/" in path:
                name, _, rest = path[1:].partition("/resolve/")
                revision, _, file = rest.partition("/")
            elif path.startswith("/store/"):
                organization, repository, file = path.removeprefix("/store/").split("/", 2)
                name = f"{organization}/{repository}"
            if name in stub.failing:
                self.answer(503, b"", {})
            elif name in stub.gated and self.headers.get("Authorization") != "Bearer hf_right":
                self.answer(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
            elif name not in stub.repositories:
                self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif revision not in ("", "main", "v2", COMMIT):
                self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif not file:
                self.answer(200, json.dumps(describe(stub, name)).encode(), {"Content-Type": "application/json"})
            elif file not in stub.repositories[name]:
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            elif path.startswith("/store/") or len(stub.repositories[name][file]) <= SMALL_BYTES:
                self.send_content(stub.repositories[name][file])
            else:
                self.answer(302, b"", {"Location": f"{stub.url}/store/{name}/{file}"})

        def send_content(self, content: bytes) -> None:
            asked = self.headers.get("Range", "")
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and stub.ranges else 0
            part = content[start:]
            shown = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
            if stub.cuts and len(part) > stub.cut_after:
                stub.cuts -= 1
                self.answer(206 if start else 200, part, shown, sent=part[: stub.cut_after])
                self.close_connection = True
                return
            self.answer(206 if start else 200, part, shown)

        def drip(self, start: bytes, unit: bytes) -> None:
            self.close_connection = True
            with suppress(OSError):  # the client is gone
                self.wfile.write(start)
                stub.dripping.set()
                for _ in range(DRIPS):
                    self.wfile.write(unit)
                    time.sleep(DRIP_SECONDS)

        def answer(self, status: int, body: bytes, headers: Mapping[str, str], sent: bytes | None = None) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if sent is None else sent)

        def log_message(self, *_: object) -> None:
            pass

    return Routes


@contextmanager
def serve_hub() -> Iterator[HubStub]:
    stub = HubStub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), request_handler(stub))
    stub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
