"""A real server for tests: `polyhead serve` as a child on a free port; a thread reads its log.

`FaultServer` is the same server with faults that a test changes while it runs."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.support.faults import Fault, write
from tests.support.fork_server import ForkedProcess, start_forked

if sys.platform != "win32":
    import resource

PATIENCE = 120.0  # seconds; a busy machine imports slowly
SERVE = ("-m", "polyhead", "serve")
PROGRAMS = {"serve": SERVE, "faulty": (str(Path(__file__).with_name("fault_server.py")),)}
BUSY = ("requests_running", "requests_waiting", "kv_blocks_used", "tokens_in_flight", "http_requests_in_flight")
SAMPLE = re.compile(r"^(?P<name>polyhead_\w+)(\{(?P<labels>[^}]*)\})? (?P<value>\S+)$", re.MULTILINE)


class Page:
    """The metrics at one moment."""

    def __init__(self, text: str) -> None:
        self.samples = list(SAMPLE.finditer(text))

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of a metric that have these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(sample["value"])
            for sample in self.samples
            if sample["name"] == f"polyhead_{name}" and all(label in (sample["labels"] or "") for label in wanted)
        )

    @property
    def at_rest(self) -> bool:
        return not any(map(self.total, BUSY))

    @property
    def received_and_ended(self) -> tuple[float, float]:
        """The numbers of received and of ended requests; they are equal when idle."""
        return self.total("requests_received_total"), self.total("requests_total")


def started(entry: tuple[str, ...], flags: Sequence[str], open_files: int = 0) -> subprocess.Popen[str] | ForkedProcess:
    """`entry` begins with a program of the fork server, or with an argument of the interpreter."""
    program, *more = entry
    if program in PROGRAMS and sys.platform == "linux":
        return start_forked(program, (*more, *flags), open_files)
    command = [sys.executable, *PROGRAMS.get(program, (program,)), *more, *flags]
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (open_files, open_files)) if open_files else None
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=limit)


class Process:
    """A server as a child process whose log is read. It is forked by the fork server, or started from nothing:
    `SERVE`. `open_files`: how many files it may have open; 0: as many as this process."""

    def __init__(self, *arguments: str, entry: tuple[str, ...] = ("serve",), open_files: int = 0) -> None:
        self.child = started(entry, ("--port", "0", "--log-format", "json", *arguments), open_files)
        self.lines: list[dict[str, Any]] = []
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.lines.append(json.loads(line) if line.startswith("{") else {"message": line})

    @property
    def log(self) -> str:
        return "\n".join(line["message"] for line in list(self.lines))

    def until(self, condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if found := condition():
                return found
            if self.child.poll() is not None:  # its last lines may still come
                deadline = min(deadline, time.monotonic() + 5)
            time.sleep(0.01)
        raise TimeoutError(self.log)

    @property
    def url(self) -> str:
        return str(self.until(lambda: re.search(r"listening on (https?://\S+),", self.log))[1])

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE, verify=False)  # else it loads all system certificates

    def ready(self) -> httpx.Response:
        def answer() -> httpx.Response | None:
            answer = self.get("/readyz")
            return answer if answer.status_code == 200 else None

        found = self.until(answer)
        assert isinstance(found, httpx.Response)
        return found

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> int:
        self.child.send_signal(sig)
        return self.child.wait(PATIENCE)

    @property
    def page(self) -> Page:
        return Page(self.get("/metrics").text)

    def rest(self, patience: float = PATIENCE) -> Page:
        """The metrics as soon as no request is in flight."""
        found = self.until(lambda: page if (page := self.page).at_rest else None, patience)
        assert isinstance(found, Page)
        return found

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.child.pid}/fd"))

    def resident(self, kind: str = "VmRSS") -> float:
        """MiB now, or the maximum since `forget` ("VmHWM")."""
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{self.child.pid}/status").read_text().splitlines())
        return int(lines[kind].split()[0]) / 1024

    def forget(self) -> None:
        Path(f"/proc/{self.child.pid}/clear_refs").write_text("5")


class FaultServer(Process):
    """The server of tests/support/fault_server.py; `folder` is where its faults are written."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.faults = folder / "faults.json"
        self.arm()
        super().__init__(*arguments, entry=("faulty", str(self.faults)))

    def arm(self, *faults: Fault) -> None:
        """Replace the faults, from the next step on."""
        write(self.faults, faults)

    def census(self) -> tuple[int, int]:
        """The number of tasks of the event loop and of threads, which the server logs at SIGUSR1."""
        before = [line for line in list(self.lines) if line["message"] == "census"]
        self.child.send_signal(signal.SIGUSR1)
        self.until(lambda: len([line for line in list(self.lines) if line["message"] == "census"]) > len(before))
        last = [line for line in list(self.lines) if line["message"] == "census"][-1]
        return last["tasks"], last["threads"]
