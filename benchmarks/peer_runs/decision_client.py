"""Clients that ask for decisions over HTTP, one call after the other, from a separate process.

    python -m benchmarks.peer_runs.decision_client URL CALLS [--clients 32] [--seconds 6] [--warm 2] [--first 0]

CALLS is a JSON file: `path`, and `states`, each with the calls that all decisions about one state need, which one
client sends in their order. A client takes the next state when it has the answers about the last. Only answers between
the seconds of warming up and the end are counted.
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
class Counted:
    """When the answers about a state were complete, and how many seconds after its first call."""

    times: list[tuple[float, float]] = field(default_factory=list)


async def ask(client: httpx.AsyncClient, path: str, states: Iterator[Calls], end: float, counted: Counted) -> None:
    while perf_counter() < end:
        began = perf_counter()
        for body in next(states):
            (await client.post(path, json=body)).raise_for_status()
        counted.times.append((perf_counter(), perf_counter() - began))


async def run(options: argparse.Namespace) -> dict[str, float]:
    given = json.loads(options.calls.read_text())
    states = itertools.islice(itertools.cycle(given["states"]), options.first, None)
    counted, limits = Counted(), httpx.Limits(max_connections=options.clients)
    async with httpx.AsyncClient(base_url=options.url, timeout=600, limits=limits) as client:
        began = perf_counter()
        end = began + options.warm + options.seconds
        await asyncio.gather(*(ask(client, given["path"], states, end, counted) for _ in range(options.clients)))
    within = [took for when, took in counted.times if began + options.warm <= when < end]
    if not within:
        raise SystemExit(f"no answers within {options.seconds} s")
    return {
        "states": len(counted.times),
        "decisions/s": len(within) * given["decisions"] / options.seconds,
        "p50": statistics.median(within) * 1000,
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
