"""Measure the time of probes and refusals while many clients connect at once to a server without free places.

    python -m benchmarks.arrivals [--model FOLDER_OR_FILE] [--clients 2560] [--within 3] [--rounds 5] [--again SECONDS]
        [--one-port]

First `--taken` requests, as many as the server accepts (`max_requests`), ask for long answers. Then `--clients` clients
connect evenly within `--within` seconds, each on its own connection. Each posts a completion and reads the answer, a
429. With `--again` each client connects again at once after its answer, for so many seconds. Meanwhile /livez is
requested every 50 ms in three ways: on a new connection each time, on a kept connection, and on a new connection to the
server's port for probes.

The server has one core and everything else another (Linux; with fewer than two cores they share one). A time is from
before the connection is opened (with a kept connection: from before the request is sent) to the end of the answer. The
load generator is one thread. Its longest turn is printed, too, because it is part of the measured times. The figures
are those of each round, and their medians.
"""

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import resource
import selectors
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.serving import Running, machine, serve
from tests.support import checkpoints

EVERY_S = 0.05
LONG = {"model": "chat", "prompt": "The quick", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
ASKED = json.dumps(LONG | {"max_tokens": 4}).encode()
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(ASKED), ASKED)
)
LATEST_S = 60.0  # after the last arrival


@dataclass
class Client:
    """One connection on which a completion is asked for."""

    sock: socket.socket
    began: float
    sent: float = 0.0
    answer: bytearray = field(default_factory=bytearray)

    @property
    def status(self) -> int:
        """0: the connection ended without an answer."""
        return int(self.answer.split(b" ", 2)[1]) if self.answer.startswith(b"HTTP/") else 0


class Crowd:
    """The clients of one round, in one thread.  `times` are milliseconds by status."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.selector = selectors.DefaultSelector()
        self.times: dict[int, list[float]] = {}
        self.longest_turn = 0.0

    def connect(self) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        client = Client(sock, time.perf_counter())
        sock.connect_ex(("127.0.0.1", self.port))
        self.selector.register(sock, selectors.EVENT_WRITE, client)

    def advance(self, client: Client) -> bool:
        """Whether this client is done."""
        try:
            if not client.sent:
                client.sock.send(POST)
                client.sent = time.perf_counter()
                self.selector.modify(client.sock, selectors.EVENT_READ, client)
                return False
            part = client.sock.recv(1 << 16)
        except OSError:
            part = b""
        client.answer += part
        return not part

    def end(self, client: Client) -> None:
        self.selector.unregister(client.sock)
        client.sock.close()
        self.times.setdefault(client.status, []).append((time.perf_counter() - client.began) * 1000)

    def run(self, clients: int, within: float, again: float) -> None:
        began, arrived = time.perf_counter(), 0
        while arrived < clients or (
            self.selector.get_map() and time.perf_counter() < began + within + again + LATEST_S
        ):
            turn = time.perf_counter()
            due = min(int((turn - began) / within * clients) + 1, clients)
            for _ in range(due - arrived):
                self.connect()
            arrived = due
            for key, _ in self.selector.select(within / clients if arrived < clients else 0.1):
                if self.advance(key.data):
                    self.end(key.data)
                    if time.perf_counter() < began + again:
                        self.connect()
            self.longest_turn = max(self.longest_turn, time.perf_counter() - turn)
        for key in list(self.selector.get_map().values()):
            self.end(key.data)


def probe(port: int, kept: bool, results: Connection) -> None:
    """Probe until a message arrives; then send the milliseconds of each probe."""
    line, times = http.client.HTTPConnection("127.0.0.1", port, timeout=LATEST_S), []
    while not results.poll(EVERY_S):
        began = time.perf_counter()
        line.request("GET", "/livez")
        line.getresponse().read()
        times.append((time.perf_counter() - began) * 1000)
        if not kept:
            line.close()
    results.send(times)


@contextlib.contextmanager
def probed(ports: dict[str, int]) -> Iterator[dict[str, list[float]]]:
    """Whose values are there once the block has ended; of the line that is called "kept" the connection is kept."""
    found, lines = dict[str, list[float]](), {}
    for name, port in ports.items():
        lines[name], theirs = multiprocessing.Pipe()
        asked = (port, name == "kept", theirs)
        multiprocessing.get_context("fork").Process(target=probe, args=asked, daemon=True).start()
    time.sleep(0.5)
    yield found
    for line in lines.values():
        line.send("stop")
    found |= {name: line.recv() for name, line in lines.items()}


@contextlib.contextmanager
def taken(port: int, places: int) -> Iterator[None]:
    """So many requests with long answers are under way."""
    body = json.dumps(LONG | {"stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    with contextlib.ExitStack() as held:
        connections = [held.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(places)]
        for connection in connections:
            connection.sendall(head + body)
        reader = multiprocessing.get_context("fork").Process(target=drain, args=(connections,), daemon=True)
        reader.start()
        time.sleep(2)
        yield
        reader.kill()
        reader.join()
    time.sleep(2)


def drain(connections: list[socket.socket]) -> None:
    selector = selectors.DefaultSelector()
    for connection in connections:
        selector.register(connection, selectors.EVENT_READ)
    while True:
        time.sleep(0.05)  # in large pieces: its time is not what is measured
        for key, _ in selector.select():
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if not sock.recv(1 << 20):
                selector.unregister(sock)


def p(times: list[float], part: float) -> float:
    return sorted(times)[min(int(len(times) * part), len(times) - 1)] if times else 0.0


def run(server: Running, probes: int, options: argparse.Namespace) -> None:
    port = int(server.url.rpartition(":")[2])
    ports = {"new": port, "kept": port} | ({"own": probes} if probes else {})
    rounds: list[list[float]] = []
    columns = [f"{name} {part}" for name in ports for part in ("p50", "max")] + ["429 p50", "429 p99", "429 max"]
    print("ms     " + " ".join(f"{name:>9s}" for name in columns) + "  answers by status; longest turn of the clients")
    for number in range(options.rounds):
        crowd = Crowd(port)
        with taken(port, options.taken), probed(ports) as times:
            crowd.run(options.clients, options.within, options.again)
        refused = crowd.times.get(429, [])
        row = [p(times[name], part) for name in ports for part in (0.5, 1.0)]
        rounds.append([*row, *(p(refused, part) for part in (0.5, 0.99, 1.0))])
        counts = {status: len(found) for status, found in sorted(crowd.times.items())}
        show(str(number + 1), rounds[-1], f"{counts}; {crowd.longest_turn * 1000:.0f} ms")
    show("median", [statistics.median(column) for column in zip(*rounds, strict=True)], "")


def show(name: str, row: list[float], rest: str) -> None:
    print(f"{name:7s}" + " ".join(f"{value:9.1f}" for value in row) + f"  {rest}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="", help="what `polyhead serve` takes; a tiny random one if none")
    parser.add_argument("--clients", type=int, default=2560)
    parser.add_argument("--within", type=float, default=3.0, help="seconds")
    parser.add_argument("--again", type=float, default=0.0, help="seconds for which clients come back once answered")
    parser.add_argument("--taken", type=int, default=256, help="requests under way, and max_requests of the server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one-port", action="store_true", help="the server has no port for probes")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    cores = sorted(os.sched_getaffinity(0))
    print(machine())
    with tempfile.TemporaryDirectory() as scratch:
        source = options.model or str(checkpoints.generator(Path(scratch)))
        flags: tuple[str, ...] = (
            "--log-level",
            "warning",
            "--max-requests",
            str(options.taken),
            "--cache-tokens",
            str(1 << 15),
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            probes = 0 if options.one_port else int(free.getsockname()[1])
        flags += ("--probe-port", str(probes)) if probes else ()
        os.sched_setaffinity(0, cores[:1])
        with serve(f"chat={source}", *flags) as server:
            os.sched_setaffinity(0, cores[1:2] or cores)
            run(server, probes, options)


if __name__ == "__main__":
    main()
