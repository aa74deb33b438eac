"""Measure how long one call with very many texts delays other requests, and by how much it exceeds its deadline.

    python -m benchmarks.batches [--texts 16384] [--rounds 3] [--only completions]

A server of tiny models answers calls with the maximum number of texts, one call at a time. A separate process requests
/livez over one connection, one request after the other. The longest time is the time for which the event loop (or the
interpreter's lock) was held. The same call is then made with a deadline, and by a client that disconnects; measured is
how long after that the call was still answered, or the engine still had tokens of it. All processes share the cores.
"""

import argparse
import http.client
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.serving import Running, machine, serve
from tests.support import checkpoints

PAUSE_S = 0.002  # between two requests for /livez
DEADLINE_S = 1.0
LEFT_S = 1.0  # after which a client leaves
TEXT = "A good film, well acted and beautifully shot; I loved it."
IN_FLIGHT = "polyhead_tokens_in_flight"
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    body: Mapping[str, Any]


def cases(texts: int) -> list[Case]:
    many = [f"{number} {TEXT}" for number in range(texts)]
    ids = [[number % 200 + 3] * 8 for number in range(texts)]
    tensor = {"name": "text", "shape": [texts], "datatype": "BYTES", "data": many}
    return [
        Case("completions", "/v1/completions", {"model": "chat", "prompt": many, "max_tokens": 1}),
        Case("completions of ids", "/v1/completions", {"model": "chat", "prompt": ids, "max_tokens": 1}),
        Case("embeddings", "/v1/embeddings", {"model": "embed", "input": many}),
        Case("embeddings of ids", "/v1/embeddings", {"model": "embed", "input": ids}),
        Case("rerank", "/v1/rerank", {"model": "rank", "query": TEXT, "documents": many}),
        Case("hf classify", "/models/judge", {"inputs": many}),
        Case("hf generate", "/models/chat", {"inputs": many, "parameters": {"max_new_tokens": 1}}),
        Case("tei embed", "/models/embed/embed", {"inputs": many}),
        Case("tei tokenize", "/models/embed/tokenize", {"inputs": many}),
        Case("tei decode", "/models/embed/decode", {"ids": ids}),
        Case("oip infer", "/v2/models/judge/infer", {"inputs": [tensor]}),
    ]


def probe(port: int, pipe: Connection) -> None:
    """Until something is received, asks for /livez; then sends the longest wait in seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    longest = 0.0
    pipe.send(0.0)
    while not pipe.poll(PAUSE_S):
        began = time.perf_counter()
        connection.request("GET", "/livez")
        connection.getresponse().read()
        longest = max(longest, time.perf_counter() - began)
    pipe.send(longest)


class Probe:
    """The longest wait for /livez while the block runs, in seconds."""

    longest = 0.0

    def __init__(self, port: int) -> None:
        self.here, there = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=probe, args=(port, there), daemon=True)

    def __enter__(self) -> "Probe":
        self.process.start()
        self.here.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self.here.send(True)
        self.longest = self.here.recv()
        self.process.join()


def post(port: int, case: Case, **headers: str) -> tuple[int, float, str]:
    """Status, seconds after the last byte was sent, and the beginning of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    body = json.dumps(case.body)
    connection.request("POST", case.path, body, JSON | headers)
    began = time.perf_counter()
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    return response.status, time.perf_counter() - began, answer[:200].decode(errors="replace")


def leave(port: int, case: Case) -> float:
    """Seconds after the client's disconnect with tokens of the call in the engine, or without any answered request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", case.path, json.dumps(case.body), JSON)
    time.sleep(LEFT_S)
    assert connection.sock is not None
    connection.sock.close()
    began = time.perf_counter()
    while time.perf_counter() - began < 120:
        page = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        page.request("GET", "/metrics")
        lines = page.getresponse().read().decode().splitlines()
        page.close()
        values = [float(line.split()[-1]) for line in lines if line.startswith(IN_FLIGHT)]
        flights = [float(line.split()[-1]) for line in lines if line.startswith("polyhead_http_requests_in_flight")]
        if not any(values) and max(flights, default=0) <= 1:
            break
        time.sleep(0.01)
    return time.perf_counter() - began


def measure(server: Running, case: Case, rounds: int) -> None:
    port = int(server.url.rpartition(":")[2])
    small = Case(case.name, case.path, shortened(case.body))
    status, _, said = post(port, small)
    assert status == 200, said
    held, took, late, held_late, gone = [], [], [], [], []
    statuses = set[int]()
    for _ in range(rounds):
        with Probe(port) as heard:
            status, seconds, said = post(port, case)
        statuses.add(status)
        held.append(heard.longest)
        took.append(seconds)
        with Probe(port) as heard:
            status, seconds, said = post(port, case, **{"X-Request-Timeout": f"{DEADLINE_S:g}"})
        statuses.add(status)
        late.append(max(seconds - DEADLINE_S, 0.0) if status != 200 or seconds > DEADLINE_S else 0.0)
        held_late.append(heard.longest)
        gone.append(leave(port, case))
    middle = statistics.median
    print(
        f"{case.name:20s} {middle(took):8.2f} {middle(held):8.3f} {middle(late):8.2f} {middle(held_late):8.3f} "
        f"{middle(gone):8.2f}   {sorted(statuses)}",
        flush=True,
    )


def shortened(value: Any) -> Any:
    """The same call with two texts."""
    if isinstance(value, Mapping):
        return {key: [2] if key == "shape" else shortened(one) for key, one in value.items()}
    return [shortened(one) for one in value[:2]] if isinstance(value, list) else value


def models(folder: Path) -> Sequence[str]:
    return [
        f"chat={checkpoints.generator(folder / 'chat')}",
        f"judge={checkpoints.classifier(folder / 'judge')}",
        f"rank={checkpoints.ranker(folder / 'rank')}",
        f"embed={checkpoints.embedder(folder / 'embed')}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--texts", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="the cases with this in their name")
    options = parser.parse_args()
    print(machine())
    print(f"{options.texts} texts a call; seconds, medians of {options.rounds}")
    print("call                  answer     held   missed  held too   left   status")
    flags = ("--log-level", "warning", "--max-tokens-in-flight", str(1 << 24))
    with tempfile.TemporaryDirectory() as folder, serve(*models(Path(folder)), *flags) as server:
        for case in cases(options.texts):
            if options.only in case.name:
                measure(server, case, options.rounds)


if __name__ == "__main__":
    main()
