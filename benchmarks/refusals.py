"""Measure the time until an invalid value is refused while other requests are answered, and attribute it to its causes.

    python -m benchmarks.refusals [--model FOLDER_OR_FILE | --tiny] [--talkers 4] [--rounds 3] [--questions]

Every value that no field can have is sent to every route that generates, one after the other over one connection. With
`--questions` it is a thousand mutated bodies of the routes of decisions; those that are valid are counted apart.
Meanwhile a separate process reads the tokens of other sequences. By turns /livez is requested in the same way, which
waits only for the event loop, and a process that returns what it gets, which waits only for a core. The time for which
this process waited for a core is counted separately (Linux). Server, clients and measurement share the same cores.
With `--tiny` the steps of the served model take almost no time, so only the server's own work is left.
"""

import argparse
import contextlib
import http.client
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Thread

from benchmarks.serving import Running, machine, serve
from polyhead.service.config import settings
from polyhead.service.runtime import quickstart
from tests.support import bad_values, checkpoints, decision_mutations

TOKENS, WARM_S = 100, 3.0
JSON = {"Content-Type": "application/json"}
STORY = {"model": "chat", "prompt": "The quick", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
Timed = dict[str, list[tuple[float, float]]]  # milliseconds, and how many of them this process had no core


def talk(port: int, talkers: int) -> None:
    """So many stories at once, one after the other, until the process is ended."""

    def listen() -> None:
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", "/v1/completions", json.dumps(STORY | {"stream": True}), JSON)
            connection.getresponse().read()

    for _ in range(talkers):
        Thread(target=listen).start()


def echo(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    while said := connection.recv(1 << 16):
        connection.sendall(said)


@contextlib.contextmanager
def beside(target: Callable[..., None], *given: object) -> Iterator[None]:
    process = multiprocessing.get_context("fork").Process(target=target, args=given, daemon=True)
    process.start()
    time.sleep(WARM_S)
    try:
        yield
    finally:
        process.kill()
        process.join()


def stood() -> float:
    """Milliseconds that this thread stood in line for a core so far."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e6


def bad_requests() -> Iterator[tuple[str, bytes]]:
    return ((bad.path, bad.body) for bad in bad_values.asked() if not bad.is_valid and bad.name != "timeout")


def mutated_questions() -> Iterator[tuple[str, bytes]]:
    for mutation in decision_mutations.mutations():
        named = isinstance(mutation.body, dict) and mutation.body.get("model") == "talker"
        yield mutation.path, decision_mutations.written(mutation.body | {"model": "chat"} if named else mutation.body)


def measured(port: int, mirror: socket.socket, calls: Sequence[tuple[str, bytes]], times: Timed) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(verb: str, path: str, body: bytes | None = None) -> int:
        connection.request(verb, path, body, JSON)
        response = connection.getresponse()
        response.read()
        return response.status

    def mirrored() -> int:
        mirror.sendall(b" " * 300)
        return len(mirror.recv(1 << 16))

    def timed(name: str, call: Callable[[], int]) -> None:
        before, began = stood(), time.perf_counter()
        status = call()
        took = (time.perf_counter() - began) * 1000
        named = name if name != "refusal" or 400 <= status < 500 else "answer" if status < 400 else "error"
        times.setdefault(named, []).append((took, stood() - before))

    for path, body in calls:
        timed("refusal", partial(ask, "POST", path, body))
        timed("/livez", lambda: ask("GET", "/livez"))
        timed("echo", mirrored)


def show(times: Timed) -> None:
    print("ms          calls    p50    p99    max   without this process's own waits: p99    max")
    for name, found in times.items():
        took, rest = sorted(all_ for all_, _ in found), sorted(max(all_ - own, 0.0) for all_, own in found)
        p99 = int(len(found) * 0.99)
        line = f"{statistics.median(took):6.2f} {took[p99]:6.1f} {took[-1]:6.1f}"
        print(f"{name:10s} {len(found):6d} {line} {rest[p99]:40.1f} {rest[-1]:6.1f}")


def run(server: Running, talkers: int, calls: Sequence[tuple[str, bytes]]) -> None:
    port, times = int(server.url.rpartition(":")[2]), Timed()
    with socket.create_server(("127.0.0.1", 0)) as listener, beside(echo, listener):
        mirror = socket.create_connection(listener.getsockname())
        mirror.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with beside(talk, port, talkers) if talkers else contextlib.nullcontext():
            measured(port, mirror, calls, times)
    show(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="", help="what `polyhead serve` takes; the quick-start generator if none")
    parser.add_argument("--tiny", action="store_true", help="a random model of a few thousand weights")
    parser.add_argument("--talkers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--questions", action="store_true", help="mutated bodies of decisions")
    options = parser.parse_args()
    folder = settings.default_model_dir()
    print(machine())
    with tempfile.TemporaryDirectory() as scratch:
        source = options.model
        if options.tiny:
            source = str(checkpoints.generator(Path(scratch)))
        elif not source:
            quickstart.fetch_all(folder)
            source = quickstart.sources(folder)["smollm2"]
        with serve(f"chat={source}", "--log-level", "warning") as server:
            calls = list(mutated_questions() if options.questions else bad_requests())
            run(server, options.talkers, calls * options.rounds)


if __name__ == "__main__":
    main()
