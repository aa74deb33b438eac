"""A server under adverse conditions: SIGSTOP and SIGCONT, signals, an engine thread that has ended, a full disk, clocks
that jump, too few file descriptors, model files that change while they are served."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from polyhead.service.engine import pause_detector as pulse
from polyhead.service.engine.pause_detector import PauseDetector
from tests.support.faults import Fault
from tests.support.processes import FaultServer, Process

ADMIN = "an admin's key"
FAKETIME = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
LIBRARIES = str(FAKETIME)


def complete(url: str, most: int, **named: Any) -> httpx.Response:
    body = {"model": "chat", "prompt": "The fox", "max_tokens": most, **named.pop("body", {})}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60, verify=False, **named)


@pytest.fixture
def launched() -> Iterator[Callable[..., Process]]:
    there: list[Process] = []

    def launch(*arguments: str, **named: Any) -> Process:
        there.append(Process(*arguments, **named))
        return there[-1]

    yield launch
    for process in there:
        process.child.send_signal(signal.SIGCONT)
        if process.child.poll() is None:
            process.child.kill()
            process.child.wait()


# Stopped and continued


def test_a_pause_of_the_process_is_not_counted_as_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(pulse, "perf_counter", lambda: now)
    seen = PauseDetector()
    now = 101.5
    assert seen.paused_since(99) == 0, "a delayed heartbeat counts as a pause"
    now = 162.5
    assert seen.paused_since(99) == 60
    assert seen.paused_since(163) == 0, "time after the pause counts as paused"
    for _ in range(60):
        now += 1
        seen._check()
    assert seen.paused_since(99) == 60, "a step that hangs counts as a pause"


def test_a_server_that_was_stopped_goes_on(launched: Callable[..., Process], tiny_generator: Path) -> None:
    """Requests, streams and probes are in flight, and more arrive meanwhile. The server's stall limit is shorter than
    the stop."""
    limits = ("--stall-seconds", "1.5", "--hang-seconds", "1.5", "--write-seconds", "1", "--body-seconds", "1")
    server = launched(f"chat={tiny_generator}", *limits)
    server.ready()
    url = server.url

    def stream() -> bool:
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json={"model": "chat", "prompt": "a", "max_tokens": 200, "stream": True},
            timeout=60,
            verify=False,
        ) as answer:
            return list(answer.iter_lines())[-2] == "data: [DONE]"

    def probe() -> int:
        return httpx.get(f"{url}/livez", timeout=60, verify=False).status_code

    with ThreadPoolExecutor(32) as pool:
        streams = [pool.submit(stream) for _ in range(4)]
        whole = [pool.submit(complete, url, 200) for _ in range(4)]
        short = [pool.submit(complete, url, 240, headers={"X-Request-Timeout": "2"}) for _ in range(2)]
        server.until(lambda: server.page.total("requests_received_total") >= 5)
        server.child.send_signal(signal.SIGSTOP)
        probes = [pool.submit(probe) for _ in range(10)]
        time.sleep(4)  # longer than each limit above, so that no condition can be waited for
        server.child.send_signal(signal.SIGCONT)
        assert all(one.result() == 200 for one in probes), "a stopped process is reported as hanging"
        assert all(one.result() for one in streams)
        assert [one.result().status_code for one in whole] == [200] * 4
        assert {one.result().status_code for one in short} <= {200, 504}
    for _ in range(100):
        server.child.send_signal(signal.SIGSTOP)
        server.child.send_signal(signal.SIGCONT)
    assert complete(url, 4).status_code == 200
    received, ended = server.rest().received_and_ended
    assert received == ended
    assert server.stop() == 0


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_drains(launched: Callable[..., Process], tiny_generator: Path, sig: signal.Signals) -> None:
    server = launched(f"chat={tiny_generator}")
    server.ready()
    url = server.url
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(complete, url, 240)
        server.until(lambda: server.page.total("requests_received_total") == 1)
        assert server.stop(sig) == 0
        assert answer.result().status_code == 200


def test_a_signal_while_models_load_ends_it(launched: Callable[..., Process], tiny_generator: Path) -> None:
    server = launched(*(f"chat-{number}={tiny_generator}" for number in range(20)))
    server.until(lambda: "is ready" in server.log)
    assert server.stop() == 0


def test_signals_without_a_handler_change_nothing(launched: Callable[..., Process], tiny_generator: Path) -> None:
    server = launched(f"chat={tiny_generator}")
    server.ready()
    for sig in (signal.SIGPIPE, signal.SIGWINCH, signal.SIGURG, signal.SIGCHLD):
        server.child.send_signal(sig)
    assert complete(server.url, 4).status_code == 200
    assert server.stop() == 0


# The engine thread has ended


def test_when_the_engine_thread_ends_every_request_fails_and_probes_report_it(
    start_fault_server: Callable[..., FaultServer], tiny_generator: Path
) -> None:
    server = start_fault_server(f"chat={tiny_generator}", "--hang-seconds", "3600")
    server.ready()
    url = server.url
    server.arm(Fault("hang"))
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(complete, url, 4, body={"stream": bool(number % 2)}) for number in range(12)]
        server.until(lambda: server.page.total("requests_received_total") == 12)
        server.arm(Fault("die"))
        answers = [one.result() for one in asked]
    assert all(one.status_code == 503 or "the engine has stopped" in one.text for one in answers)
    assert server.get("/livez").json() == {"live": False, "reasons": ["the engine thread has ended"]}
    assert server.get("/livez").status_code == server.get("/readyz").status_code == 503
    again = complete(url, 4)
    assert (again.status_code, "must be restarted" in again.text) == (503, True)
    received, ended = server.rest().received_and_ended
    assert received == ended
    assert "the engine thread has died" in server.log
    assert server.stop() == 0


# A full disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("a file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=False)


def fill(folder: Path) -> None:
    try:
        (folder / "rest").write_bytes(bytes(1 << 20))
    except OSError:
        return
    raise AssertionError("it is not full")


def test_a_full_disk_for_models_and_costs(
    launched: Callable[..., Process], disk: Path, tiny_generator: Path, tmp_path: Path
) -> None:
    """Costs are not stored, a load through /admin returns the error, no partial file stays, and models answer."""
    fill(disk)
    flags = ("--model-dir", str(disk), "--admin-key", ADMIN, "--model-root", str(tiny_generator.parent))
    server = launched(f"chat={tiny_generator}", *flags, "--precision", "int8")
    server.ready()
    assert "is not kept: [Errno 28]" in server.log
    assert complete(server.url, 4).status_code == 200
    assert server.stop() == 0
    assert not [file for file in disk.rglob("*") if file.is_file() and file.name != "rest"]
    (disk / "rest").unlink()
    again = launched(f"chat={tiny_generator}", *flags, "--precision", "int8")
    again.ready()
    assert again.stop() == 0
    assert list(disk.rglob("*.json")), "costs are stored once the disk has space"


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=60, verify=False).status_code == 200
    except httpx.ConnectError:  # it does not listen yet
        return False


def test_a_log_that_cannot_be_written_does_not_stop_requests(tiny_generator: Path) -> None:
    """Standard output and standard error are a device that is full."""
    with Path("/dev/full").open("w") as full:
        server = Process(f"chat={tiny_generator}", entry=("-c", SHUT, full.name))
        try:
            assert server.until(lambda: any(line["message"].startswith("http") for line in server.lines))
            url = next(line["message"].strip() for line in server.lines if line["message"].startswith("http"))
            server.until(lambda: answers(f"{url}/readyz"))
            assert complete(url, 4).status_code == 200
        finally:
            assert server.stop() == 0


# Writes its address to the given pipe; its output and its log are a full device.
SHUT = """
import os, socket, sys
said = os.dup(2)
full = os.open(sys.argv[1], os.O_WRONLY)
os.dup2(full, 1); os.dup2(full, 2)
from polyhead.service.server import process
listen = process.bind_socket
def bound(host, port):
    listener = listen(host, port)
    os.write(said, b"http://%s:%d\\n" % (host.encode(), listener.getsockname()[1]))
    return listener
process.bind_socket = bound
from polyhead.service.cli import main as cli
sys.argv = ["polyhead", "serve", *sys.argv[2:]]
cli.app()
"""


# Clocks


@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed")
@pytest.mark.parametrize("jump", ["+400d", "-400d"])
def test_a_jump_of_the_wall_clock_moves_no_deadline(
    launched: Callable[..., Process], tiny_generator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: str
) -> None:
    """Forwards and backwards, while requests are in flight. The monotonic clock does not change."""
    offset, keys = tmp_path / "offset", tmp_path / "keys.yaml"
    offset.write_text("+0d\n")
    keys.write_text(f"one:\n  hash: sha256:{sha256(b'foo').hexdigest()}\n  requests_per_minute: 3\n")
    for name, value in {
        "LD_PRELOAD": LIBRARIES,
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }.items():
        monkeypatch.setenv(name, value)
    server = launched(f"chat={tiny_generator}", "--keys-file", str(keys), entry=("-m", "polyhead", "serve"))
    monkeypatch.delenv("LD_PRELOAD")
    server.ready()
    key = {"Authorization": "Bearer foo"}
    before = complete(server.url, 2, headers=key).json()["created"]
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(complete, server.url, 240, headers={**key, "X-Request-Timeout": "50"})
        server.until(lambda: server.page.total("requests_received_total") == 2)
        offset.write_text(f"{jump}\n")
        assert slow.result().status_code == 200
    third = complete(server.url, 2, headers=key)
    assert abs(third.json()["created"] - before) > 300 * 86400, "the clock did not jump"
    spent = complete(server.url, 2, headers=key)
    assert spent.status_code == 429
    assert 1 <= int(spent.headers["retry-after"]) <= 60
    assert server.get("/readyz").status_code == server.get("/livez").status_code == 200
    assert server.stop() == 0


# File descriptors, threads, model files


def test_a_server_with_few_file_descriptors_goes_on(launched: Callable[..., Process], tiny_generator: Path) -> None:
    server = launched(f"chat={tiny_generator}", open_files=64)
    server.ready()
    address = server.url.removeprefix("http://").split(":")
    crowd = [socket.create_connection((address[0], int(address[1]))) for _ in range(200)]
    assert server.get("/livez").status_code == 200
    assert complete(server.url, 4).status_code == 200
    for one in crowd:
        one.close()
    assert complete(server.url, 4).status_code == 200
    assert server.stop() == 0


def test_model_files_are_not_memory_mapped_and_may_change_while_served(
    launched: Callable[..., Process], tiny_generator: Path, tmp_path: Path
) -> None:
    """A process that reads a mapped file that was truncated is ended by SIGBUS."""
    folder = shutil.copytree(tiny_generator, tmp_path / "chat")
    server = launched(f"chat={folder}", "--admin-key", ADMIN)
    server.ready()
    assert str(folder) not in Path(f"/proc/{server.child.pid}/maps").read_text()
    before = complete(server.url, 8, body={"temperature": 0}).json()["choices"]
    for file in folder.iterdir():
        os.truncate(file, 10)
    assert complete(server.url, 8, body={"temperature": 0}).json()["choices"] == before
    key = {"Authorization": f"Bearer {ADMIN}"}
    failed = httpx.post(f"{server.url}/admin/models/chat/reload", json={}, headers=key, timeout=60, verify=False)
    assert 400 <= failed.status_code < 500
    explained = httpx.post(
        f"{server.url}/v1/explain",
        json={"model": "chat", "input": "The fox", "method": "attention"},
        timeout=60,
        verify=False,
    )
    assert explained.status_code == 409
    shutil.rmtree(folder)
    assert complete(server.url, 8, body={"temperature": 0}).json()["choices"] == before
    assert server.stop() == 0
