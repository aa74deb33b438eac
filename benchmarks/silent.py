"""Measure the cost of silent clients for others: the same requests with and without them, by turns.

    python -m benchmarks.silent [--model FOLDER_OR_FILE] [--silent 500] [--half 500] [--asked 300] [--rounds 7]

`silent` connections are opened and send nothing. `half` connections send all of a header except its last line. They are
opened before each second half of a round and closed after it. The figures are the medians of the rounds, and of the
ratios within them. Without a model the served model has a few thousand weights, so only the HTTP layer is measured.
"""

import argparse
import contextlib
import http.client
import json
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.serving import Running, machine, serve
from tests.support import checkpoints

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ASKED = {"model": "chat", "prompt": [40, 41, 42], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
WAITED = 1000.0  # seconds that the server waits for a header: those who keep silent are still there


@contextlib.contextmanager
def beside(port: int, beginnings: list[bytes]) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        for beginning in beginnings:
            client = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(beginning)
        time.sleep(0.5)
        yield


def measured(port: int, count: int) -> tuple[float, float]:
    """Milliseconds of `count` requests one after the other: half of them, and all but a hundredth, take no longer."""
    connection, times = http.client.HTTPConnection("127.0.0.1", port, timeout=60), []
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(count):
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(ASKED), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
        times.append((time.perf_counter() - began) * 1e3)
    connection.close()
    return statistics.median(times), sorted(times)[int(count * 0.99)]


def run(server: Running, beginnings: list[bytes], asked: int, rounds: int) -> None:
    port = int(server.url.rpartition(":")[2])
    measured(port, asked)
    alone, crowded = [], []
    for _ in range(rounds):
        alone.append(measured(port, asked))
        before = server.resident_mb()
        with beside(port, beginnings):
            grown = server.resident_mb() - before
            crowded.append(measured(port, asked))
    for index, name in enumerate(("p50", "p99")):
        first, second = ([one[index] for one in found] for found in (alone, crowded))
        ratio = statistics.median(b / a for a, b in zip(first, second, strict=True))
        middle = f"{statistics.median(first):7.2f} ms alone, {statistics.median(second):7.2f} ms beside them"
        print(f"{name}: {middle}, ratio {ratio:.2f}")
    print(f"{len(beginnings)} connections took {grown:.1f} MB the last time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="", help="what `polyhead serve` takes; a tiny random one if none")
    parser.add_argument("--silent", type=int, default=500)
    parser.add_argument("--half", type=int, default=500)
    parser.add_argument("--asked", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print(machine())
    with tempfile.TemporaryDirectory() as scratch:
        source = options.model or str(checkpoints.generator(Path(scratch)))
        flags = ("--log-level", "warning", "--header-seconds", str(WAITED))
        with serve(f"chat={source}", *flags) as server:
            run(server, [b""] * options.silent + [HALF] * options.half, options.asked, options.rounds)


if __name__ == "__main__":
    main()
