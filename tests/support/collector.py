"""A collector of traces for tests: it decodes and stores the spans that arrive as OTLP over HTTP."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATIENCE = 120.0  # seconds until sent spans have arrived


@dataclass
class Collector:
    """A `silent` collector accepts every request and sends no answer."""

    url: str = ""
    silent: threading.Event = field(default_factory=threading.Event)
    asked: list[str] = field(default_factory=list)  # paths
    bodies: list[bytes] = field(default_factory=list)
    scopes: set[str] = field(default_factory=set)
    resources: list[dict[str, Any]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def take(self, path: str, body: bytes) -> None:
        self.asked.append(path)
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(facts(resource.resource))
            for scope in resource.scope_spans:
                self.scopes.add(scope.scope.name)
                self.spans += scope.spans

    def trace(self, id: str) -> tuple[Span, list[Span]]:
        """The server's span of a trace, then the spans below it in the order of their start; waits until they have
        arrived."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            found = [span for span in list(self.spans) if span.trace_id.hex() == id]
            servers = [span for span in found if span.kind == Span.SPAN_KIND_SERVER]
            if servers:  # it ends after the spans below it and is sent after them
                [server] = servers
                return server, [span for span in found if span is not server]
            time.sleep(0.01)
        raise TimeoutError(f"no trace {id} among {len(self.spans)} spans")


def facts(of: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in of.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if collector.silent.is_set():
                while collector.silent.is_set():
                    time.sleep(0.01)
                return
            collector.take(self.path, body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """-"""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield collector
    finally:
        collector.silent.clear()
        server.shutdown()
        server.server_close()
