"""Contract: probes are answered at once while a prompt of 20 MB is tokenised, 64 streams run and many requests wait."""

import http.client
import json
import logging
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.crowd import COMPLETIONS, completion
from tests.support.edits import edited
from tests.support.places import ROOT
from tests.support.processes import Process

log = logging.getLogger(__name__)
TALKING = 64
LIMIT = 0.1  # seconds, for 99 of 100
ROUNDS = 10  # at most, of five seconds each; the first is the slowest, and two are enough on an idle machine
CONTEXT = 400_000  # tokens: so that a text of 20 MB might fit
SENTENCE = "The quick brown fox jumps over the lazy dog; größer, schöner, naïve café. "


def waiting(full: bool) -> int:
    return 1000 if full else 300


@pytest.fixture
def server(tiny_generator: Path, tmp_path: Path) -> Iterator[Process]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    folder = edited(tiny_generator, tmp_path / "wide", max_position_embeddings=CONTEXT)
    process = Process(
        f"chat={folder}",
        *("--cache-tokens", str(CONTEXT), "--max-running", str(TALKING), "--max-requests", "1100"),
        *("--max-tokens-in-flight", str(1 << 30), "--max-body-bytes", str(32 << 20)),
    )
    process.ready()
    yield process
    process.child.kill()
    process.child.wait()


@pytest.fixture
def loaded_server(server: Process, full: bool) -> Iterator[Process]:
    """The server with 64 running streams and many waiting requests."""
    command = [
        sys.executable,
        str(ROOT / "tests" / "support" / "waiting_clients.py"),
        server.url,
        str(TALKING),
        str(waiting(full)),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as crowd:
        assert crowd.stdout is not None
        assert crowd.stdout.readline() == "sent\n"
        server.until(lambda: server.page.total("requests_waiting") == waiting(full))
        yield server
        crowd.kill()


def latencies(server: Process, path: str, enough: threading.Event) -> list[float]:
    """Seconds of each probe, sorted. Probes are sent one after the other, each on its own connection, as by an
    orchestrator."""
    host, port = server.url.removeprefix("http://").split(":")
    took = []
    while not enough.is_set():
        began = time.perf_counter()
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
        connection.request("GET", path)
        answer = connection.getresponse()
        took.append(time.perf_counter() - began)
        assert answer.status == 200, answer.read()
        connection.close()
        time.sleep(0.01)
    return sorted(took)


def tokenised(server: Process, content: bytes, seconds: float) -> bytes:
    """The answer to a prompt, or nothing if it does not come in time."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        client.sendall(head.encode() + content)
        client.settimeout(seconds)
        try:
            return client.recv(1000)
        except TimeoutError:
            return b""


def slowest(server: Process, content: bytes, seconds: float) -> float:
    """The slower p99 of the two probes while the prompt is received, read and tokenised."""
    enough = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        probes = {path: pool.submit(latencies, server, path, enough) for path in ("/livez", "/readyz")}
        try:
            answer = tokenised(server, content, seconds)
        finally:
            enough.set()
    assert not answer or b" tokens. This model's maximum context length is 400000" in answer, answer
    parts = {}
    for path, probe in probes.items():
        times = probe.result()
        p50, parts[path] = (times[int(len(times) * part)] * 1000 for part in (0.5, 0.99))
        line = f"{path}: {len(times)} probes, p50 {p50:.1f}, p99 {parts[path]:.1f}, worst {times[-1] * 1000:.1f} ms"
        log.info(line)
    return max(parts.values()) / 1000


def test_probes_are_answered_at_once_whatever_else_is_done(loaded_server: Process, full: bool) -> None:
    """In at least one round: other processes of this machine may disturb the others."""
    text = SENTENCE * (20_000_000 // len(SENTENCE.encode()))
    content = json.dumps(completion([], 1) | {"prompt": text}, ensure_ascii=False).encode()
    assert any(slowest(loaded_server, content, 60 if full else 5) < LIMIT for _ in range(ROUNDS))
    assert loaded_server.page.total("requests_running") == TALKING
    assert loaded_server.page.total("requests_waiting") == waiting(full)
