"""Clients that stop reading: what they cost, that their connections are closed, and that other requests do not
change; over real sockets."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvicorn.server

from polyhead.service.api.http.connection import MIN_PROGRESS, Connection
from polyhead.service.api.http.connection_limits import ConnectionLimits
from polyhead.service.server.process import SEND_BUFFER
from tests.support.crowd import ask, completion
from tests.support.edits import edited
from tests.support.processes import Process

MANY = 50
PATIENCE = 3  # seconds: the server's write limit
PROMPT = [40, 41, 42]


@pytest.fixture(scope="module")
def long_context_generator(tiny_generator: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generator with a context of 20,000 tokens."""
    return edited(tiny_generator, tmp_path_factory.mktemp("patient"), max_position_embeddings=20_000)


@pytest.fixture(scope="module")
def server(long_context_generator: Path) -> Iterator[Process]:
    flags = ("--write-seconds", str(PATIENCE), "--cache-tokens", "400000")
    process = Process(f"chat={long_context_generator}", *flags)
    process.ready()
    yield process
    assert process.stop() == 0, process.log


def unread(server: Process, body: Any, buffer: int = 4096) -> socket.socket:
    """A client that sends a request and never reads: its answer stays in the server's buffers, except for `buffer`
    bytes."""
    content = json.dumps(body).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(content) + content
    )
    return client


def test_connections_that_are_not_read_are_closed_and_other_answers_do_not_change(server: Process) -> None:
    asked = completion(PROMPT, 400, stream=True)
    alone = asyncio.run(ask(server.url, "/v1/completions", asked))
    before = server.resident()
    endless = completion(PROMPT, 19_000, stream=True, logprobs=20)
    with ExitStack() as held:
        for _ in range(MANY):
            held.enter_context(unread(server, endless))
        server.until(lambda: sum(map(server.page.total, ("requests_running", "requests_waiting"))) == MANY)
        beside = asyncio.run(ask(server.url, "/v1/completions", asked))
        server.until(lambda: server.page.total("connections_cut_total") == MANY)
        server.rest()
    assert (beside.whole, beside.text) == (True, alone.text)
    assert server.page.total("requests_total", outcome="aborted") == MANY
    assert server.page.total("requests_total", outcome="done") == 2
    assert server.log.count("read too little of its answer in 3 s: 127.0.0.1:") == MANY
    assert server.resident() - before < 2 * MANY  # MiB


def test_a_connection_with_a_whole_unread_answer_is_closed(server: Process) -> None:
    """The request has ended by then; the rest of its answer is in a buffer."""
    cut, done = server.page.total("connections_cut_total"), server.page.total("requests_total", outcome="done")
    with unread(server, completion([PROMPT] * 8, 200, logprobs=20)):
        server.until(lambda: server.page.total("connections_cut_total") == cut + 1)
    assert server.page.total("requests_total", outcome="done") == done + 8


def test_a_client_that_reads_slowly_is_not_disconnected(server: Process) -> None:
    """As long as it reads some data in each interval."""
    cut, began = server.page.total("connections_cut_total"), time.monotonic()
    with unread(server, completion([PROMPT] * 8, 300, logprobs=20), SEND_BUFFER) as client:  # more than it can read
        client.settimeout(120)
        while time.monotonic() - began < 3 * PATIENCE:
            assert client.recv(SEND_BUFFER)
            time.sleep(PATIENCE / 5)
        client.setblocking(False)
        assert client.recv(1), "everything was sent, so the server did not wait"
        assert server.page.total("connections_cut_total") == cut


def test_slow_readers_take_no_place_from_others(long_context_generator: Path) -> None:
    """They hold all requests and, by their prompts, all tokens that may be in flight, then read a little."""
    flags = ("--max-requests", "2", "--max-tokens-in-flight", "100", "--cache-tokens", "400000")
    process = Process(f"chat={long_context_generator}", *flags)
    process.ready()
    endless = completion([*PROMPT] * 15, 15_000, stream=True, logprobs=20)
    with ExitStack() as held:
        readers = [held.enter_context(unread(process, endless)) for _ in range(2)]
        process.until(lambda: process.page.total("requests_waiting") == 2)
        process.until(lambda: process.page.total("tokens_in_flight") == 0)
        assert process.page.total("http_requests_in_flight") == 2
        whole = asyncio.run(ask(process.url, "/v1/completions", completion([*PROMPT] * 20, 20)))
        assert (whole.status, whole.whole) == (200, True), whole.body
        assert all(reader.recv(2000) for reader in readers)
    assert process.stop() == 0, process.log


class Pipe(asyncio.Transport):
    """A transport whose buffer size a test sets."""

    size = 0
    high: int | None = None
    aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return self.size

    def abort(self) -> None:
        self.aborted = True


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock advances at once to the next timer."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__()
        select = self._selector.select

        def jump(timeout: float | None) -> Any:
            self.now += timeout or 0
            return select(0)

        self._selector.select = jump  # type: ignore[method-assign]

    def time(self) -> float:
        return self.now


def test_a_client_must_read_a_minimum_or_all_that_is_left() -> None:
    """In each `write_seconds`. A few bytes are too little."""

    async def run() -> tuple[int | None, list[bool], int]:
        cuts: list[int] = []
        state = uvicorn.server.ServerState()
        edge = ConnectionLimits(
            header_seconds=60_000,
            keep_alive_seconds=60_000,
            write_seconds=300,
            max_connections=1,
            write_error=str,
            count_refused=print,
            count_cut_off=lambda: cuts.append(1),
        )
        connection = Connection(uvicorn.Config(None), state, {}, edge=edge)  # type: ignore[arg-type]
        pipe, seen = Pipe(), []
        connection.connection_made(pipe)
        pipe.size = 2 * MIN_PROGRESS
        connection.pause_writing()
        await asyncio.sleep(150)
        pipe.size = MIN_PROGRESS  # enough was read in time
        await asyncio.sleep(250)
        seen.append(pipe.aborted)
        connection.resume_writing()  # all was read
        await asyncio.sleep(400)
        seen.append(pipe.aborted)
        pipe.size = 2
        connection.pause_writing()
        await asyncio.sleep(290)
        seen.append(pipe.aborted)
        pipe.size = 1  # one byte of the last two
        await asyncio.sleep(20)
        seen.append(pipe.aborted)
        return pipe.high, seen, len(cuts)

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        assert runner.run(run()) == (0, [False, False, False, True], 1)
