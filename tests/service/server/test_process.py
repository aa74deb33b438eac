"""Real processes: `polyhead serve` on a free port, from the first probe to the last signal.

Tests of a start, of an end and of a second signal start processes from nothing; the other tests use the fork server."""

import asyncio
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from polyhead.service.config.settings import Settings, SettingsError
from polyhead.service.resources.process_info import start_background_task
from polyhead.service.server.process import EXIT_SECONDS, ExitTimer, ServerProcess, Telemetry, bind_socket
from tests.support.faults import Fault
from tests.support.processes import PATIENCE, SERVE, FaultServer, Process

BODY = b'{"model": "chat", "prompt": "The fox", "max_tokens": 3, "ignore_eos": true}'
HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
PROBE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(("access", "is_named"), [("public", False), ("key", True)])
def test_keys_are_named_on_a_page_that_needs_a_key(access: str, is_named: bool) -> None:
    settings = Settings(api_key="one", api_keys="customer=two", metrics_access=access)  # type: ignore[arg-type]
    metrics = Telemetry.from_settings(settings).metrics
    metrics.record_response("POST", "/v1/completions", 200, "customer")
    page = metrics.render("")[0].decode()
    counted = 'key="customer"' if is_named else 'key=""'
    assert f'polyhead_key_requests_total{{{counted},status="200"}} 1.0' in page
    assert ("customer" in page) is is_named


@pytest.fixture
def launch() -> Iterator[Callable[..., Process]]:
    launched: list[Process] = []

    def start(*arguments: str, entry: tuple[str, ...] = ("serve",)) -> Process:
        launched.append(Process(*arguments, entry=entry))
        return launched[-1]

    yield start
    for process in launched:
        process.child.kill()
        process.child.wait()


@pytest.fixture
def slow() -> Iterator[socket.socket]:
    with socket.socket() as connection:
        yield connection


def stay(slow: socket.socket, server: Process) -> None:
    """A request whose body never ends: it is running for as long as the server waits."""
    slow.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    slow.sendall(HEAD + BODY[:1])
    server.until(lambda: "polyhead_http_requests_in_flight 1.0" in server.get("/metrics").text)


def streamed(url: str, tokens: int) -> Iterator[str]:
    asked = {"model": "chat", "prompt": "The fox", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=PATIENCE) as response:
        assert response.status_code == 200, response.read()
        yield from (line for line in response.iter_lines() if line)


def test_from_the_first_probe_to_a_drained_end(
    launch: Callable[..., Process], tiny_generator: Path, tiny_classifier: Path, slow: socket.socket
) -> None:
    server = launch(f"chat={tiny_generator}", f"judge={tiny_classifier}", entry=SERVE)
    assert server.get("/livez").status_code == 200  # in any state of the loads
    assert server.ready().json()["models"] == {name: {"state": "ready"} for name in ("chat", "judge")}
    server.until(lambda: f"ready on {server.url}: chat, judge of 2 models in " in server.log)
    stages = ("interpreter and imports", "fetch", "listening", "describe", "read and pack", "warm up")
    assert re.search(r" s \(" + ", ".join(rf"{stage} \d+\.\d\d" for stage in stages) + r"\)", server.log)

    answer = httpx.post(f"{server.url}/predict", json={"inputs": "a good film"}, timeout=PATIENCE)
    assert sum(label["score"] for label in answer.json()) == pytest.approx(1.0)

    check_metrics(server)
    children = Path(f"/proc/{server.child.pid}/task").glob("*/children")
    assert not [path for path in children if path.read_text()], "a process is left after kill -9"
    stay(slow, server)
    kept, begun = (socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) for _ in range(2))
    for line in (kept, begun):
        line.sendall(PROBE)
        assert line.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
    begun.sendall(PROBE[:9])
    server.child.send_signal(signal.SIGTERM)
    server.until(lambda: "leaving: 1 requests in flight have 30 s to finish" in server.log)
    kept.settimeout(25)  # seconds; requests in flight have 30
    assert kept.recv(1) == b"", "the idle connection is closed"
    begun.sendall(PROBE[9:])
    assert b"connection: close" in begun.makefile("rb").read(), (
        "an answer begun before the signal is the last on its connection"
    )
    draining = server.get("/readyz")
    assert (draining.status_code, draining.json()["draining"]) == (503, True)
    assert server.get("/livez").status_code == 200
    refused = httpx.post(f"{server.url}/predict", json={"inputs": "a good film"}, timeout=PATIENCE)
    assert (refused.status_code, refused.headers["Retry-After"].isdecimal()) == (503, True)
    slow.sendall(BODY[1:])  # requests in flight are finished
    answer = slow.makefile("rb").read().decode()
    assert answer.startswith("HTTP/1.1 200 OK")
    assert json.loads(answer.partition("\r\n\r\n")[2])["usage"]["completion_tokens"] == 3
    assert server.child.wait(PATIENCE) == 0


def test_a_broken_model_is_not_ready_and_leaves_the_others_alone(
    launch: Callable[..., Process], tiny_classifier: Path
) -> None:
    server = launch("gone=/nowhere", f"judge={tiny_classifier}")
    server.until(lambda: server.get("/startupz").status_code == 200)
    server.until(lambda: f"ready on {server.url}: judge of 2 models in " in server.log)
    probe = server.get("/readyz")
    assert probe.status_code == 503
    [reason] = probe.json()["reasons"]
    assert reason.startswith("gone is broken: nowhere")
    assert probe.json()["models"]["judge"] == {"state": "ready"}
    assert httpx.post(f"{server.url}/models/gone/predict", json={"inputs": "x"}, timeout=PATIENCE).status_code == 503
    assert httpx.post(f"{server.url}/models/judge/predict", json={"inputs": "x"}, timeout=PATIENCE).status_code == 200
    assert server.get("/livez").status_code == 200


def check_metrics(server: Process) -> None:
    """One generated text is counted everywhere, once."""
    assert list(streamed(server.url, 8))[-1] == "data: [DONE]"
    page = server.get("/metrics").text
    labels = 'model="chat",task="generate"'
    for sample in (
        'polyhead_requests_total{model="chat",outcome="done",task="generate"} 1.0',
        f"polyhead_time_to_first_token_seconds_count{{{labels}}} 1.0",
        f"polyhead_inter_token_seconds_count{{{labels}}} 7.0",
        f'polyhead_tokens_total{{kind="generated",{labels}}} 8.0',
        'polyhead_stage_seconds_count{model="chat",stage="tokenise",task="generate"} 1.0',
        f"polyhead_kv_blocks_used{{{labels}}} 0.0",
        f"polyhead_requests_running{{{labels}}} 0.0",
        f"polyhead_requests_waiting{{{labels}}} 0.0",
        "process_resident_memory_bytes",
    ):
        assert f"\n{sample}" in page, sample


def test_a_start_without_any_model_ends_with_1(launch: Callable[..., Process]) -> None:
    server = launch("gone=/nowhere", "lost=/nowhere")
    assert server.child.wait(PATIENCE) == 1
    server.until(lambda: "none of 2 models could be loaded" in server.log)
    assert "gone is broken: /nowhere" in server.log


def test_requests_that_do_not_finish_in_time_are_aborted(
    launch: Callable[..., Process], tiny_classifier: Path, slow: socket.socket
) -> None:
    server = launch(f"judge={tiny_classifier}", "--drain-seconds", "1")
    server.ready()
    stay(slow, server)
    began = time.monotonic()
    assert server.stop(signal.SIGINT) == 0
    assert 1 <= time.monotonic() - began < 28  # by itself it would have 30


def test_aborted_requests_get_an_error(launch: Callable[..., Process], tiny_generator: Path) -> None:
    """A stream ends with an error event and a whole answer with an error, both in the dialect's form."""
    server = launch(f"chat={tiny_generator}", "--drain-seconds", "0", "--cache-tokens", "100000")
    server.ready()
    asked = {"model": "chat", "prompt": ["The fox"] * 32, "max_tokens": 240, "ignore_eos": True}
    url, ends = f"{server.url}/v1/completions", {}

    def whole() -> None:
        ends["whole"] = httpx.post(url, json=asked, timeout=PATIENCE)

    waiting = threading.Thread(target=whole)
    with httpx.stream("POST", url, json={**asked, "stream": True}, timeout=PATIENCE) as response:
        lines = response.iter_lines()
        next(lines)
        waiting.start()
        server.until(lambda: sum(map(server.page.total, ("requests_running", "requests_waiting"))) == 64)
        server.child.send_signal(signal.SIGTERM)
        last = [line for line in lines if line][-1]
    waiting.join(PATIENCE)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopped"
    assert ends["whole"].status_code == 503
    assert ends["whole"].json()["error"]["code"] == "stopped"
    assert server.child.wait(PATIENCE) == 0


def test_a_client_that_does_not_read_does_not_delay_the_exit(
    launch: Callable[..., Process], long_generator: Path, slow: socket.socket
) -> None:
    server = launch(f"chat={long_generator}", "--drain-seconds", "1")
    server.ready()
    asked = {"model": "chat", "prompt": "The fox", "max_tokens": 15_000, "stream": True, "logprobs": 20}
    content = json.dumps(asked | {"ignore_eos": True}).encode()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    slow.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
    )
    server.until(lambda: server.page.total("time_to_first_token_seconds_count") == 1)
    time.sleep(1)  # until all buffers are full
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began > 1
    assert "something hangs" not in server.log


def test_a_load_does_not_delay_the_exit(tmp_path: Path, tiny_generator: Path) -> None:
    server = FaultServer(tmp_path, f"chat={tiny_generator}")
    server.arm(Fault("slow", seconds=1))  # every step of the warm-up
    try:
        server.until(lambda: "listening on" in server.log)
        server.until(lambda: "progress" in server.get("/readyz").json()["models"]["chat"])
        assert server.get("/livez").status_code == 200
        assert server.stop() == 0
        assert "is ready" not in server.log
        assert "something hangs" not in server.log
    finally:
        server.child.kill()
        server.child.wait()


def test_a_second_signal_does_not_wait(
    launch: Callable[..., Process], tiny_classifier: Path, slow: socket.socket
) -> None:
    server = launch(f"judge={tiny_classifier}", entry=SERVE)
    server.ready()
    stay(slow, server)
    server.child.send_signal(signal.SIGTERM)
    server.until(lambda: "leaving: 1 requests" in server.log)
    assert server.stop() == 128 + signal.SIGTERM


class StalledProcess(Process):
    """A server whose log is not read any more once it listens."""

    def listen(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.lines.append(json.loads(line) if line.startswith("{") else {"message": line})
            if "listening on" in line:
                return


def test_a_log_that_nobody_reads_stops_neither_answers_nor_the_exit(tiny_classifier: Path) -> None:
    """More is logged than the pipe takes; probes and requests are answered, and the first signal ends the server."""
    server = StalledProcess(f"judge={tiny_classifier}")
    try:
        server.ready()
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            for _ in range(2 * (1 << 16) // 300):  # a line has more than 300 characters
                assert client.get("/" + "a" * 190).status_code == 404
            assert client.get("/livez").status_code == 200
        assert server.stop() == 0
    finally:
        server.child.kill()
        server.child.wait()


def test_the_time_to_exit_is_limited_before_anything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    order = list[object]()
    drained: Any = SimpleNamespace(
        is_draining=False,
        exit_timer=SimpleNamespace(limit=order.append),
        admission=SimpleNamespace(close=lambda: order.append("closed"), unfinished=0),
        drain_seconds=30,
    )
    with caplog.at_level("INFO"):
        caplog.handler.addFilter(lambda record: order.append(record.getMessage()) or True)
        ServerProcess.start_draining(drained)
    assert order == [30 + EXIT_SECONDS, "closed", "leaving: 0 requests in flight have 30 s to finish"]


def test_the_exit_timer_follows_the_last_limit() -> None:
    ended = threading.Event()
    timer = ExitTimer(ended.set)
    timer.limit(1e6)  # before it runs
    timer.start()
    timer.limit(1e6)
    timer.cancel()
    assert not ended.is_set()
    timer.limit(0)
    assert ended.wait(PATIENCE)


def test_an_answer_to_a_get_has_the_time_of_a_drain(
    launch: Callable[..., Process], tiny_classifier: Path, tmp_path: Path, slow: socket.socket
) -> None:
    """A kept file that is downloaded slowly is complete; a public page that is not read is not waited for."""
    server = launch(f"judge={tiny_classifier}", "--files-dir", str(tmp_path))
    server.ready()
    content = json.dumps({"custom_id": "x" * (1 << 20)}).encode()
    form = {"file": ("a.jsonl", content)}
    file = httpx.post(f"{server.url}/v1/files", files=form, data={"purpose": "batch"}, timeout=PATIENCE).json()["id"]
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    slow.sendall(f"GET /v1/files/{file}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    received = len(slow.recv(1000))
    server.child.send_signal(signal.SIGTERM)
    server.until(lambda: "leaving: 1 requests in flight" in server.log)
    while part := slow.recv(1 << 20):
        received += len(part)
    assert received > len(content)
    assert server.child.wait(PATIENCE) == 0
    assert "aborted" not in server.log


def test_a_port_in_use_is_an_error_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SettingsError, match="it is in use by another program; choose another by --port"):
            bind_socket("127.0.0.1", taken.getsockname()[1])


def test_small_answers_are_sent_at_once() -> None:
    """asyncio switches Nagle's algorithm off only if the socket was created with its protocol."""
    with bind_socket("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_a_failing_background_task_is_logged_as_critical(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise LookupError("gone")

    async def run() -> None:
        await asyncio.wait([start_background_task(fail())])
        await asyncio.sleep(0)
        cancelled = start_background_task(asyncio.sleep(60))
        cancelled.cancel()
        await asyncio.wait([cancelled])

    asyncio.run(run())
    [record] = caplog.records
    assert record.levelname == "CRITICAL"
    assert "fail has failed and does not run any more" in record.getMessage()
