"""A real fleet on this machine: replicas and an ingress as processes, each pinned to a given core.

    python -m benchmarks.simulation.processes replica CORE SETTINGS replica-0 STEPS
    python -m benchmarks.simulation.processes ingress CORE SETTINGS POLICY PORT ...

Either prints its port and runs until it is stopped. SETTINGS is JSON with the names of a settings file; each PORT is
that of replica-0, replica-1, ...
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from torch import Tensor

from polyhead.models.executors.contract import Executor, StepInput
from polyhead.service.config.settings import Settings
from polyhead.service.fleet.fleet_engine import Fleet
from polyhead.service.fleet.ingress import assemble_ingress
from polyhead.service.fleet.replica import Replica
from polyhead.service.fleet.routing import POLICIES, RoutingPolicy
from polyhead.service.server.process import ServerProcess as Server
from polyhead.service.server.process import bind_socket, tune_interpreter

HOST, SECRET = "127.0.0.1", "both ends of a measurement know it"
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """One of them; it listens on `port`."""

    pid: int
    port: int

    def cpu_s(self) -> float:
        """Seconds of processor that it has taken."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


async def compute(settings: Settings, name: str, steps: str) -> None:
    """Tells of each step in a line of the file `steps`."""
    tune_interpreter()
    with open(steps, "w", buffering=1, encoding="ascii") as told:
        print(await Replica(settings, name, SECRET, partial(timed, told.write)).start(HOST), flush=True)
        await asyncio.Event().wait()


def timed(tell: Callable[[str], object], executor: Executor) -> Executor:
    """Says when each step of the network began and ended, and what was in it."""
    compute = executor.step

    def step(rows: StepInput) -> Tensor:
        began = perf_counter()
        answer = compute(rows)
        looked = sum(rows.positions) + len(rows.positions)
        work = len(rows.tokens), len(rows.output_rows), looked, len(rows.starts) - 1
        tell(json.dumps([began, perf_counter(), *work]) + "\n")
        return answer

    executor.step = step  # type: ignore[method-assign]
    return executor


def speak(settings: Settings, policy: str, replicas: Mapping[str, int]) -> None:
    async def find(fleet: Fleet) -> None:
        fleet.update_replicas("all", {name: (HOST, port) for name, port in replicas.items()})
        await asyncio.Event().wait()

    def routed(random: Random) -> RoutingPolicy:
        return POLICIES[policy](random)

    listener = bind_socket(HOST, 0)
    app = assemble_ingress(settings, SECRET, find, routed)
    print(listener.getsockname()[1], flush=True)
    Server(settings, app, listener).run(sockets=[listener])


@contextlib.contextmanager
def started(role: str, core: int, settings: Mapping[str, Any], *arguments: object) -> Iterator[Process]:
    command = [sys.executable, "-m", __name__, role, str(core), json.dumps(settings), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Process(process.pid, int(process.stdout.readline()))
    finally:
        process.terminate()
        try:
            process.wait(10)
        finally:
            process.kill()


def main() -> None:
    role, core, told, *rest = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    settings = Settings(**json.loads(told))
    if role == "replica":
        asyncio.run(compute(settings, *rest))
    else:
        policy, *ports = rest
        speak(settings, policy, {f"replica-{number}": int(port) for number, port in enumerate(ports)})


if __name__ == "__main__":
    main()
