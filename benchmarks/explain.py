"""Measure the cost of explanations for other requests: throughput with 1 connection in 16 that requests explanations.

    python -m benchmarks.explain [--clients 16] [--seconds 10] [--rounds 5] [--method integrated_gradients]

A separate process (on the same cores) classifies reviews of mixed lengths over `--clients` connections. Each connection
sends its next request after an answer. In every second turn each 16th connection requests /v1/explain instead.
Compared are the classifications a second of the other connections, which are the same ones in both turns.
"""

import argparse
import http.client
import json
import statistics
import threading
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

from benchmarks.prose import documents
from benchmarks.serving import machine, serve
from polyhead.service.config import settings
from polyhead.service.runtime import quickstart

JSON = {"Content-Type": "application/json"}
EVERY = 16
LONGEST = 700  # characters
TEXTS = list[str]()  # of the process that asks
METHODS = ("attention", "gradient_x_input", "integrated_gradients", "occlusion")


def ask(http: http.client.HTTPConnection, path: str, body: str) -> bytes:
    http.request("POST", path, body, JSON)
    answer = http.getresponse()
    said = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status} {said[:200]!r}")
    return said


def connected(port: int, number: int, method: str, until: float, done: list[int]) -> None:
    http_ = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    explains, at = method and number % EVERY == 0, number
    while time.monotonic() < until:
        text = TEXTS[at % len(TEXTS)]
        at += 17
        if explains:
            ask(http_, "/v1/explain", json.dumps({"model": "sentiment", "input": text, "method": method, "top_k": 8}))
        else:
            ask(http_, "/models/sentiment/predict", json.dumps({"inputs": text}))
        done[number] += 1


def load(port: int, clients: int, pipe: Connection) -> None:
    """Answers (method, seconds) with how often each connection was answered, until a message arrives."""
    TEXTS.extend(text for text in documents(settings.default_model_dir()) if 10 < len(text) < LONGEST)
    while (order := pipe.recv()) is not None:
        method, seconds = order
        done, until = [0] * clients, time.monotonic() + seconds
        threads = [
            threading.Thread(target=connected, args=(port, number, method, until, done)) for number in range(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pipe.send(done)


def run(port: int, options: argparse.Namespace) -> None:
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=load, args=(port, options.clients, there), daemon=True)
    process.start()

    def turn(method: str) -> list[int]:
        here.send((method, options.seconds))
        return list(here.recv())

    methods = [options.method] if options.method else list(METHODS)
    for method in ("", *methods):  # what is slow only the first time
        turn(method)
    shares: dict[str, list[float]] = {method: [] for method in methods}
    why: dict[str, list[int]] = {method: [] for method in methods}
    plain = []
    for _ in range(options.rounds):
        for method in methods:
            alone, beside = turn(""), turn(method)
            others = [number for number in range(options.clients) if number % EVERY]
            plain.append(sum(alone) / options.seconds)
            shares[method].append(sum(beside[n] for n in others) / sum(alone[n] for n in others))
            why[method].append(sum(beside) - sum(beside[n] for n in others))
    here.send(None)
    print(
        f"{options.clients} connections, {statistics.median(plain):.0f} classifications a second without explanations"
    )
    print(f"{'method':24s} {'others get':>12s} {'range':>16s} {'explained a second':>20s}")
    for method in methods:
        found = sorted(shares[method])
        spread = f"{found[0]:.1%} to {found[-1]:.1%}"
        rate = statistics.median(why[method]) / options.seconds
        print(f"{method:24s} {statistics.median(found):12.1%} {spread:>16s} {rate:20.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--method", default="", help="one of them instead of several")
    options = parser.parse_args()
    print(machine())
    folder = settings.default_model_dir()
    quickstart.fetch_all(folder)
    source = dict(quickstart.sources(folder))["sentiment"]
    with serve(f"sentiment={source}", "--log-level", "warning") as server:
        run(int(server.url.rpartition(":")[2]), options)


if __name__ == "__main__":
    main()
