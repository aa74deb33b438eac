"""A Ray cluster of two nodes on this machine, each with its own process tree, and a server on it.

A node has room for one replica of each model. The node of each replica is therefore known, and a killed node loses
exactly one replica of each model.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.support.processes import Page

HOST = "127.0.0.1"
PATIENCE = 420.0
RAY = str(Path(sys.executable).with_name("ray"))
TITLE = re.compile(r"^ray::ServeReplica:polyhead[-:](?P<model>[\w-]+)")
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_SERVE_LOG_TO_STDERR": "0", "RAY_worker_niceness": "0"}


def until(condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
    deadline = time.monotonic() + patience
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{condition} has waited for {patience} s"
        time.sleep(0.5)
    return value


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind((HOST, 0))
        return int(chosen.getsockname()[1])


class Node:
    """A node of the cluster. Its processes are one session, so that all of them can be killed at once."""

    def __init__(self, *flags: str) -> None:
        command = [
            RAY,
            "start",
            *flags,
            "--node-ip-address",
            HOST,
            "--num-cpus",
            "1",
            "--disable-usage-stats",
            "--block",
        ]
        self.child = subprocess.Popen(
            command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def kill(self) -> None:
        """Kills all processes of the node, as if the machine were switched off."""
        for process in process_tree(self.child.pid):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.child.wait()


def process_tree(root: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, open_ = [], [root]
    while open_:
        found.append(open_.pop())
        open_ += children.get(found[-1], [])
    return found


def replicas(model: str) -> set[int]:
    """The processes that are replicas of a model."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            title = (entry / "cmdline").read_text()
        except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
            continue
        if (match := TITLE.match(title)) and match["model"] == model:
            found.add(int(entry.name))
    return found


class Cluster:
    """`dashboard` is the address to which `serve deploy` sends its file."""

    def __init__(self, folder: Path) -> None:
        self.address = f"{HOST}:{free_port()}"
        port, dashboard_port = self.address.rpartition(":")[2], str(free_port())
        self.dashboard = f"http://{HOST}:{dashboard_port}"
        flags = ("--head", "--port", port, "--dashboard-port", dashboard_port, "--temp-dir", str(folder))
        self.nodes = [Node(*flags)]
        until(self.answers)
        self.add()

    def answers(self) -> bool:
        """Whether the cluster answers, and the dashboard that `serve deploy` needs."""
        status = subprocess.run([RAY, "status", "--address", self.address], env=ENVIRONMENT, capture_output=True)
        with suppress(httpx.TransportError):
            return status.returncode == 0 and httpx.get(f"{self.dashboard}/api/version").is_success
        return False

    def ids(self) -> list[str]:
        """The ids of the running nodes except the head."""
        command = [RAY, "list", "nodes", "--address", self.dashboard, "--format", "json", "--filter", "state=ALIVE"]
        listed = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout
        return [node["node_id"] for node in json.loads(listed) if not node["is_head_node"]]

    def add(self) -> Node:
        self.nodes.append(Node("--address", self.address))
        return self.nodes[-1]

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.kill()


class ServedCluster:
    """`polyhead serve --ray` on the cluster."""

    def __init__(self, cluster: Cluster, *arguments: str) -> None:
        flags = ("--ray", "--ray-address", cluster.address, "--port", "0", "--log-format", "json", *arguments)
        self.child = subprocess.Popen(
            [sys.executable, "-m", "polyhead", "serve", *flags], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        threading.Thread(target=self.read_log, daemon=True).start()
        self.url = str(until(self.listening_url))

    def read_log(self) -> None:
        """Reads the log until the server ends: a full pipe would block the server."""
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.lines.append(line)

    def listening_url(self) -> str:
        """The URL that the server logged, or "" while it starts."""
        assert self.child.poll() is None, "".join(self.lines)
        found = re.search(r"listening on (http://\S+?),", "".join(self.lines))
        return found[1] if found else ""

    @property
    def page(self) -> Page:
        return Page(httpx.get(f"{self.url}/metrics", timeout=10).text)

    def count(self, model: str) -> int:
        return int(self.page.total("replicas", model=model))

    def wait_for_count(self, model: str, count: int) -> None:
        until(lambda: self.count(model) == count)

    def close(self) -> None:
        self.child.send_signal(signal.SIGTERM)
        try:
            assert self.child.wait(60) == 0
        finally:
            self.child.kill()
