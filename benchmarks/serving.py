"""Shared parts of measurements: a Polyhead server on a free port, the machine's name, medians."""

import contextlib
import http.client
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Running:
    """A server that answers at `url`; `ready_s` is the time from its start until it was ready.  `log` reads its log."""

    url: str
    pid: int
    ready_s: float
    log: Callable[[], str]

    def resident_mb(self) -> float:
        """Resident memory of the server process, in MB (Linux)."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024 / 1e6


@contextlib.contextmanager
def serve(*arguments: str, limit_s: float = 120.0, program: Sequence[str] = ("-m", "polyhead")) -> Iterator[Running]:
    """`polyhead serve ARGUMENTS` on a free port of 127.0.0.1 until the block ends; `program` is what Python runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    command = [sys.executable, *program, "serve", *arguments, "--port", str(port)]
    errors = tempfile.TemporaryFile("a+")  # noqa: SIM115  # no pipe: it would be full one day, and the server wait

    def log() -> str:
        errors.seek(0)
        return errors.read()

    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
    url = f"http://127.0.0.1:{port}"
    try:
        while time.monotonic() - began < limit_s and process.poll() is None:
            if answers(port, "/readyz"):
                break
            time.sleep(0.02)
        else:
            raise SystemExit(f"the server did not become ready:\n{log()}")
        yield Running(url, process.pid, time.monotonic() - began, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()  # one that hangs stays no longer than its measurement
            errors.close()


def answers(port: int, path: str) -> bool:
    """Whether a server here answers 200.  It must be cheap, because it uses the same cores."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def machine() -> str:
    """The machine in one line: processor, cores, memory."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"
    )


def report(name: str, ours: Sequence[float], theirs: Sequence[float], unit: str, other: str = "transformers") -> float:
    """Print medians and ranges of interleaved rounds, and the median of the pairwise ratios, which is returned."""
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    for who, values in (("polyhead", ours), (other, theirs)):
        middle = statistics.median(values)
        spread = f"({min(values):.1f} to {max(values):.1f}, {len(values)} rounds)"
        print(f"{name:34s} {who:13s} {middle:9.1f} {unit}   {spread}")
    print(f"{name:34s} ratio         {ratio:9.2f} x")
    return ratio
