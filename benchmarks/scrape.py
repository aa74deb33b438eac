"""Measure the time of a scrape of /metrics while the server is at full load, and its cost for the streams of clients.

    python -m benchmarks.scrape [--tiny] [--talkers 16] [--seconds 10] [--rounds 3] [--plain]

A separate process reads `--talkers` streams at once; a new one starts when one ends. A scraper requests the page every
200 ms as Prometheus would (OpenMetrics, gzipped), over one connection. Rounds alternate with rounds without scrapes.
One client reads another stream all the time; the gaps between its tokens show the cost of scrapes. The quick-start
models are served. With `--tiny` the steps of the served model take almost no time, so only the server's own work is
left. The page has vLLM's names, except with `--plain`. Server, clients and scraper share the same cores.
"""

import argparse
import contextlib
import gzip
import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.refusals import JSON, STORY, beside, talk
from benchmarks.serving import machine, serve
from polyhead.service.config import settings
from polyhead.service.runtime import quickstart
from tests.support import checkpoints

EVERY_S = 0.2
PROMETHEUS = {
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.4,*/*;q=0.1",
    "Accept-Encoding": "gzip",
}


def connection(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=60)


class Witness:
    """Reads stories, one after the other, and notes the gaps between their events while it is asked to."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.gaps: list[float] | None = None
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        body = json.dumps(STORY | {"stream": True})
        with contextlib.suppress(OSError, http.client.HTTPException):  # until the server is gone
            while True:
                self.hear(body)

    def hear(self, body: str) -> None:
        asked = connection(self.port)
        asked.request("POST", "/v1/completions", body, JSON)
        answer, before = asked.getresponse(), 0.0
        while line := answer.readline():
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if before and self.gaps is not None:
                    self.gaps.append((now - before) * 1000)
                before = now

    @contextlib.contextmanager
    def noting(self, gaps: list[float]) -> Iterator[None]:
        self.gaps = gaps
        yield
        self.gaps = None


def scrape(http: http.client.HTTPConnection) -> tuple[float, bytes]:
    """Milliseconds, and the page as it came."""
    began = time.perf_counter()
    http.request("GET", "/metrics", headers=PROMETHEUS)
    page = http.getresponse().read()
    return (time.perf_counter() - began) * 1000, page


def scrapes(port: int, seconds: float) -> list[float]:
    """Milliseconds of each of the scrapes of so long a time."""
    http, took = connection(port), []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        took.append(scrape(http)[0])
        time.sleep(max(began + EVERY_S - time.perf_counter(), 0))
    return took


def show(name: str, found: list[float]) -> None:
    if not found:  # every place was taken
        print(f"{name:34s} {0:6d}")
        return
    found = sorted(found)
    p99 = found[int(len(found) * 0.99)]
    print(f"{name:34s} {len(found):6d} {statistics.median(found):8.1f} {p99:8.1f} {found[-1]:8.1f}")


def run(port: int, options: argparse.Namespace) -> None:
    page = gzip.decompress(scrape(connection(port))[1])
    print(f"the page has {len(page)} bytes in {page.count(10)} lines, {len(scrape(connection(port))[1])} bytes gzipped")
    print(f"{'ms':34s} {'count':>6s} {'p50':>8s} {'p99':>8s} {'max':>8s}")
    show("a scrape, at rest", scrapes(port, options.seconds))
    scraped, alone, took = list[float](), list[float](), list[float]()
    with beside(talk, port, options.talkers):
        witness = Witness(port)
        for _ in range(options.rounds):
            with witness.noting(alone):
                time.sleep(options.seconds)
            with witness.noting(scraped):
                took += scrapes(port, options.seconds)
    show(f"a scrape, beside {options.talkers} talkers", took)
    show("between two tokens, no scrapes", alone)
    show("between two tokens, scraped", scraped)


def served(tiny: bool, scratch: Path) -> Mapping[str, str]:
    if tiny:
        return {"chat": str(checkpoints.generator(scratch))}
    folder = settings.default_model_dir()
    quickstart.fetch_all(folder)
    sources = dict(quickstart.sources(folder))
    return {"chat": sources.pop("smollm2"), **sources}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tiny", action="store_true", help="a random model of a few thousand weights")
    parser.add_argument("--plain", action="store_true", help="without vLLM's names")
    parser.add_argument("--talkers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as scratch:
        sources = [f"{name}={source}" for name, source in served(options.tiny, Path(scratch)).items()]
        vllm = str(not options.plain).lower()
        with serve(*sources, "--log-level", "warning", "--vllm-metrics", vllm) as server:
            run(int(server.url.rpartition(":")[2]), options)


if __name__ == "__main__":
    main()
