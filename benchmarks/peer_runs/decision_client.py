"""Clients that ask for decisions over HTTP, one call after the other, from a separate process.

    python -m benchmarks.peer_runs.decision_client URL CALLS [--clients 32] [--seconds 6] [--warm 2] [--first 0]

CALLS is a JSON file: `path`, and `states`, each with the calls that all decisions about one state need, which one
client sends in their order. A client takes the next state when it has the answers about the last. Answers are counted
after the seconds of warming up: for so many seconds, and longer if there are fewer answers than clients.
"""

import argparse
import asyncio
import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx

from benchmarks.peer_runs.workload import print_figures

Calls = list[dict[str, Any]]


@dataclass
class Window:
    """The answers that are counted: those from `opens` on until `closes`, and until there are `least` of them.

    `answers` has for each state when its answers were complete, and how many seconds after its first call.
    """

    opens: float
    closes: float
    least: int
    answers: list[tuple[float, float]] = field(default_factory=list)
    closed: float = 0.0

    def counted(self) -> list[float]:
        """The seconds of the states that are counted."""
        return [took for when, took in self.answers if self.opens <= when and (not self.closed or when <= self.closed)]

    def is_open(self) -> bool:
        now = perf_counter()
        if not self.closed and now >= self.closes and len(self.counted()) >= self.least:
            self.closed = now
        return not self.closed


async def ask(client: httpx.AsyncClient, path: str, states: Iterator[Calls], window: Window) -> None:
    while window.is_open():
        began = perf_counter()
        for body in next(states):
            (await client.post(path, json=body)).raise_for_status()
        window.answers.append((perf_counter(), perf_counter() - began))


async def run(options: argparse.Namespace) -> dict[str, float]:
    given = json.loads(options.calls.read_text())
    states = itertools.islice(itertools.cycle(given["states"]), options.first, None)
    limits = httpx.Limits(max_connections=options.clients)
    async with httpx.AsyncClient(base_url=options.url, timeout=600, limits=limits) as client:
        opens = perf_counter() + options.warm
        window = Window(opens, opens + options.seconds, options.clients)
        await asyncio.gather(*(ask(client, given["path"], states, window) for _ in range(options.clients)))
    counted = window.counted()
    return {
        "states": len(window.answers),
        "decisions/s": len(counted) * given["decisions"] / (window.closed - opens),
        "p50": statistics.median(counted) * 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("url")
    parser.add_argument("calls", type=Path)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--warm", type=float, default=2)
    parser.add_argument("--first", type=int, default=0, help="the number of the first state")
    print_figures(dict(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
