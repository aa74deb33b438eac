"""Measure the cost of traces: requests a second, and processor time for each, with traces off, none or all recorded.

    python -m benchmarks.tracing [--rounds 9] [--seconds 1.5] [--clients 8]

Three servers have the same tiny models and get requests in turns, so only the server's own work is measured: short
completions of eight tokens, and texts to label. A collector that accepts spans without reading them runs on the same
cores as everything else.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from benchmarks.serving import Running, machine, serve
from tests.support import checkpoints

JSON = {"Content-Type": "application/json"}
ASKED = {
    "completion": ("/v1/completions", {"model": "chat", "prompt": "The quick", "max_tokens": 8, "ignore_eos": True}),
    "label": ("/models/judge/predict", {"inputs": "a good film"}),
}
Rate = tuple[float, float]  # requests a second; milliseconds of a processor for each


class Swallow(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[str]:
    listener = ThreadingHTTPServer(("127.0.0.1", 0), Swallow)
    process = multiprocessing.get_context("fork").Process(target=listener.serve_forever, daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}"
    finally:
        process.kill()
        process.join()
        listener.server_close()


def processor(pid: int) -> float:
    """Seconds that a process had of processors so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def asked(server: Running, what: str, clients: int, seconds: float) -> Rate:
    path, body = ASKED[what]
    counts, content = [0] * clients, json.dumps(body)
    began, used = time.perf_counter(), processor(server.pid)

    def ask(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=60)
        while time.perf_counter() - began < seconds:
            connection.request("POST", path, content, JSON)
            response = connection.getresponse()
            response.read()
            assert response.status == 200, response.status
            counts[number] += 1

    threads = [Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took, done = time.perf_counter() - began, sum(counts)
    return done / took, (processor(server.pid) - used) * 1000 / done


def shown(what: str, rates: dict[str, list[Rate]]) -> None:
    print(f"\n{what:12s} requests/s                 processor ms each         beside no traces")
    for name, found in rates.items():
        columns = ""
        for values in zip(*found, strict=True):
            columns += f" {statistics.median(values):7.2f} [{min(values):7.2f}, {max(values):7.2f}]"
        pairs = zip(found, rates["none"], strict=True)
        ratios = [(one[0] / none[0], one[1] / none[1]) for one, none in pairs]
        rate, cost = (statistics.median(values) for values in zip(*ratios, strict=True))
        print(f"{name:10s}{columns}   {rate:.3f} x requests, {cost:.3f} x processor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as scratch, collector() as url, ExitStack() as stack:
        folders = [Path(scratch) / name for name in ("chat", "judge")]
        models = f"chat={checkpoints.generator(folders[0])}", f"judge={checkpoints.classifier(folders[1])}"
        kinds = {"none": [], "ratio 0": ["--trace-ratio", "0"], "ratio 1": ["--trace-ratio", "1"]}
        servers = {
            name: stack.enter_context(serve(*models, *flags, *(["--otlp-endpoint", url] if flags else [])))
            for name, flags in kinds.items()
        }
        for what in ASKED:
            rates: dict[str, list[Rate]] = {name: [] for name in servers}
            for server in servers.values():
                asked(server, what, options.clients, options.seconds)  # warm
            for number in range(options.rounds):
                names = list(servers)[:: 1 if number % 2 else -1]
                for name in names:
                    rates[name].append(asked(servers[name], what, options.clients, options.seconds))
            shown(what, rates)
        for name, server in servers.items():
            print(f"{name}: {server.log().count('Queue full')} times the queue was full")


if __name__ == "__main__":
    main()
