"""Contract: probes are answered at once while a prompt of 20 MB is tokenised, 64 streams run and many requests wait.

"At once" is counted in processor time that the server takes between a probe and its answer: it does not count what
other processes of the machine take, and a thread that keeps the event loop from its work takes processor time."""

import http.client
import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.crowd import COMPLETIONS, completion
from tests.support.edits import edited
from tests.support.places import ROOT
from tests.support.processes import Process

resource = pytest.importorskip("resource")

log = logging.getLogger(__name__)
TALKING = 64
LIMIT = 0.2  # seconds of processor time, for 99 of 100: a tenth of a second of two threads that compute
WORST = 2.0  # seconds of processor time, for all
PROBES = 150  # to each of two paths in a round
ROUNDS = 10  # at most; the first is the slowest
PATIENCE = 300.0  # seconds for a round
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
        *("--threads", "1"),
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


def processor_time(server: Process) -> float:
    """Seconds, of all threads of the server."""
    return time.clock_gettime(~server.child.pid << 3 | 2)  # the clock of a process: see clock_getcpuclockid(3)


def costs(server: Process, path: str) -> list[float]:
    """Seconds of processor time for each probe, sorted. Probes are sent one after the other, each on its own
    connection, as by an orchestrator."""
    host, port = server.url.removeprefix("http://").split(":")
    cost = []
    for _ in range(PROBES):
        before = processor_time(server)
        connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
        connection.request("GET", path)
        answer = connection.getresponse()
        cost.append(processor_time(server) - before)
        assert answer.status == 200, answer.read()
        connection.close()
        time.sleep(0.01)
    return sorted(cost)


@contextmanager
def tokenising(server: Process, content: bytes) -> Iterator[None]:
    """While the server receives, reads and tokenises a prompt. A refused prompt fails the test."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(client.sendall, head.encode() + content)
            yield
            sent.result()
        client.setblocking(False)
        with suppress(BlockingIOError):
            answer = client.recv(1000)
            assert b" tokens. This model's maximum context length is 400000" in answer, answer


def are_answered_at_once(server: Process, content: bytes) -> bool:
    """Both probes while the prompt is received, read and tokenised."""
    with tokenising(server, content), ThreadPoolExecutor(2) as pool:
        probes = {path: pool.submit(costs, server, path) for path in ("/livez", "/readyz")}
        found = {path: probe.result() for path, probe in probes.items()}
    for path, cost in found.items():
        p50, p99 = (cost[int(len(cost) * part)] * 1000 for part in (0.5, 0.99))
        log.info(f"{path}: p50 {p50:.1f}, p99 {p99:.1f}, worst {cost[-1] * 1000:.1f} ms of processor time")
    return all(cost[int(len(cost) * 0.99)] < LIMIT and cost[-1] < WORST for cost in found.values())


def test_probes_are_answered_at_once_whatever_else_is_done(loaded_server: Process, full: bool) -> None:
    """In at least one round: threads of the server that wait for a processor go on later, and count too."""
    text = SENTENCE * (20_000_000 // len(SENTENCE.encode()))
    content = json.dumps(completion([], 1) | {"prompt": text}, ensure_ascii=False).encode()
    assert any(are_answered_at_once(loaded_server, content) for _ in range(ROUNDS))
    assert loaded_server.page.total("requests_running") == TALKING
    assert loaded_server.page.total("requests_waiting") == waiting(full)
