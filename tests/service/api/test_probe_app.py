"""Probes while many clients connect: connections accepted in a turn, the backlog, and the port for probes."""

import asyncio
import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from polyhead.service.api.openapi import PROBE_PATHS
from polyhead.service.server.process import ACCEPT_BATCH, LISTEN_BACKLOG
from tests.support.processes import Process
from tests.support.raw import answers, heard

resource = pytest.importorskip("resource")

CROWD = 2560  # connections that wait
ASKING = 500  # of them with a request
MANY = 32  # connections that one turn of the loop takes, at least
SOMAXCONN = Path("/proc/sys/net/core/somaxconn")
PROBE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
OTHER = b"GET /v1/models/nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def started(folder: Path, *flags: str) -> tuple[Process, int]:
    probes = free()
    server = Process(f"chat={folder}", "--cache-tokens", "4096", "--probe-port", str(probes), *flags)
    server.ready()
    return server, probes


def test_a_turn_of_the_loop_takes_many_connections() -> None:
    """All waiting connections, up to `TAKEN`, are accepted within the few turns that one of them needs."""
    made = []

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            made.append(transport)

    async def run() -> int:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Protocol, "127.0.0.1", 0, backlog=ACCEPT_BATCH)
        address = server.sockets[0].getsockname()
        with ExitStack() as held:
            for _ in range(ACCEPT_BATCH):
                held.enter_context(socket.create_connection(address))
            turns = 0
            while not made:
                await asyncio.sleep(0)
                turns += 1
            assert turns < 10
            count = len(made)
            for transport in made:
                transport.abort()
            server.close()
        return count

    assert asyncio.run(run()) == ACCEPT_BATCH >= MANY


@pytest.mark.skipif(
    not SOMAXCONN.exists() or int(SOMAXCONN.read_text()) < LISTEN_BACKLOG, reason="the system keeps fewer"
)
def test_a_probe_is_answered_before_waiting_connections(tiny_generator: Path) -> None:
    """All clients that wait while the server stands still are connected later; none of them delays a probe.

    The server's own log has the order in which it answered.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    server, probes = started(tiny_generator, "--log-level", "debug")
    port = int(server.url.rpartition(":")[2])
    server.child.send_signal(signal.SIGSTOP)
    try:
        with ExitStack() as held:
            for number in range(CROWD):
                one = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
                if number < ASKING:
                    one.sendall(OTHER)
            probe = held.enter_context(socket.create_connection(("127.0.0.1", probes), timeout=60))
            probe.sendall(PROBE)
            before = len(server.lines)
            server.child.send_signal(signal.SIGCONT)
            assert [answer.status for answer in answers(heard(probe))] == [200]

            def answered() -> list[str]:
                said = [line["message"].split(" ")[1] for line in server.lines[before:] if "status" in line]
                return said if said.count("/v1/models/nowhere") == ASKING else []

            order = server.until(answered)
        assert order.index("/livez") <= 10 * ACCEPT_BATCH < ASKING
    finally:
        server.child.send_signal(signal.SIGCONT)
        assert server.stop() == 0, server.log


def test_the_port_for_probes_answers_nothing_else(tiny_generator: Path) -> None:
    server, probes = started(tiny_generator)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{probes}", verify=False) as client:
            assert {client.get(path).status_code for path in PROBE_PATHS} == {200}
            assert client.head("/readyz").status_code == 200
            assert client.get("/readyz").json() == server.get("/readyz").json()
            for method, path in (("GET", "/metrics"), ("GET", "/v1/models"), ("POST", "/livez"), ("GET", "/")):
                refused = client.request(method, path)
                assert refused.status_code == 404
                assert refused.json()["error"]["message"].startswith("this port answers probes only: GET /health, ")
    finally:
        assert server.stop() == 0, server.log


def test_a_probe_port_that_is_in_use_is_an_error(tiny_generator: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        server = Process(f"chat={tiny_generator}", "--probe-port", str(taken))
        assert server.child.wait(60) != 0
        server.until(lambda: f"cannot listen on 127.0.0.1 port {taken}" in server.log)
        assert "choose another by --probe-port" in server.log
