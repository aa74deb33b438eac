"""A real server for tests: `polyhead serve` as a child on a free port, its log read along."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

PATIENCE = 60.0  # seconds; a busy machine imports slowly


class Process:
    """A server as a child; its log is read along."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "service", "serve", "--port", "0", "--log-format", "json", *arguments]
        self.child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[dict[str, Any]] = []
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.lines.append(json.loads(line) if line.startswith("{") else {"message": line})

    @property
    def log(self) -> str:
        return "\n".join(line["message"] for line in list(self.lines))

    def until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.01)
        raise TimeoutError(self.log)

    @property
    def url(self) -> str:
        return str(self.until(lambda: re.search(r"listening on (http://\S+),", self.log))[1])

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE)

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
