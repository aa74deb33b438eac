"""The metrics page of an ingress with two replicas, for tests of what scrapes it: the rows of the table, with
numbers that grow.

Nothing is routed. The counts of an ingress are tested elsewhere; here they only have their declared names."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from polyhead.service.metrics.metric_table import ALL_METRICS
from polyhead.service.metrics.series import MetricSeries

MODEL = "chat"
REPLICAS = ("127.0.0.1:9100", "127.0.0.1:9101")
WHYS = ("affinity", "load", "only")


def counted(page: MetricSeries) -> bytes:
    """Increase each counter."""
    page.gauge("replicas", MODEL).set(len(REPLICAS))
    page.gauge("wanted_replicas", MODEL).set(len(REPLICAS))
    for number, replica in enumerate(REPLICAS):
        page.gauge("replica_queued_tokens", MODEL, replica).set(100 * (number + 1))
    for why in WHYS:
        page.counter("routed", MODEL, why).inc()
    for name in ("replicas_lost", "rerouted"):
        page.counter(name, MODEL).inc()
    return page.render("")[0]


@contextmanager
def ingress_page() -> Iterator[str]:
    """The address of the page while it is served."""
    page = MetricSeries(ALL_METRICS)

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = counted(page)
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
