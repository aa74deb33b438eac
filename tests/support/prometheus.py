"""A real Prometheus for tests, of the Debian package, on a free port of 127.0.0.1 with the deployed rules.

Where it is not installed (deploy/tools.sh fetches it for `make test`) the tests that need it are skipped."""

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.places import ROOT

DEPLOYED = ROOT / "deploy" / "prometheus"
FETCHED = Path(sys.prefix) / "tools"
PATIENCE = 120.0


def tool(name: str) -> str:
    """The path of `prometheus` or `promtool`; the test is skipped if there is none."""
    found = shutil.which(name) or shutil.which(name, path=FETCHED)
    if not found:
        pytest.skip(f"{name} is not here; deploy/tools.sh .venv/tools fetches it where there is apt")
    return found


def promtool(*arguments: str, given: str = "") -> str:
    """The output of promtool, which must succeed."""
    command = [tool("promtool"), *arguments]
    ran = subprocess.run(command, input=given, capture_output=True, text=True, cwd=DEPLOYED, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@cache
def rule_groups() -> list[dict[str, Any]]:
    """The groups of all deployed rules."""
    files = sorted((DEPLOYED / "rules").glob("*.yml"))
    return [group for file in files for group in yaml.safe_load(file.read_text("utf-8"))["groups"]]


def rules(kind: str) -> list[dict[str, Any]]:
    """`alert` or `record`."""
    return [rule for group in rule_groups() for rule in group["rules"] if kind in rule]


class Prometheus:
    """As deployed, except for the addresses and a scrape interval of a second; `others` are targets of further jobs."""

    def __init__(self, folder: Path, target: str, **others: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        config = yaml.safe_load((DEPLOYED / "prometheus.yml").read_text("utf-8"))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DEPLOYED / path) for path in config["rule_files"]]
        [job] = [job for job in config["scrape_configs"] if job["job_name"] == "polyhead"]
        job["static_configs"] = [{"targets": [target]}]
        further = [{"job_name": name, "static_configs": [{"targets": [other]}]} for name, other in others.items()]
        config["scrape_configs"] = [job, *further]
        (folder / "prometheus.yml").write_text(json.dumps(config), "utf-8")
        self.log = folder / "prometheus.log"
        command = [
            tool("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.address}",
        ]
        with self.log.open("w") as log:
            self.child = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def ready(self) -> None:
        """Until then it answers 503 while it reads its storage."""
        self.until(lambda: httpx.get(f"http://{self.address}/-/ready", timeout=PATIENCE, verify=False).is_success)

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API."""
        answer = httpx.get(f"http://{self.address}/api/v1/{path}", params=parameters, timeout=PATIENCE, verify=False)
        body = answer.json()
        assert body["status"] == "success", body
        return body["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series of an instant query, with their labels and value."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def until(self, condition: Callable[[], Any]) -> Any:
        """The first result of `condition` that is not empty; until Prometheus is up its errors are ignored."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            assert self.child.poll() is None, self.log.read_text()
            try:
                if found := condition():
                    return found
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise TimeoutError(self.log.read_text())

    def stop(self) -> None:
        self.child.terminate()
        self.child.wait(PATIENCE)
