"""The cost of input on a real server: a body in many pieces, and more connections than are allowed."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.processes import Process
from tests.support.raw import LAST, answers, chunked, connected, heard, post, said

COUNT = 1_000_000
SLICE = 1 << 14
PROBE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
GO_ON = json.dumps({"model": "chat", "prompt": [40, 41], "max_tokens": 1, "temperature": 0}).encode()


@pytest.fixture
def server(tiny_generator: Path) -> Iterator[Process]:
    process = Process(f"chat={tiny_generator}", "--cache-tokens", "4096")
    process.ready()
    yield process
    assert process.stop() == 0, process.log


def test_a_million_chunks_of_one_byte_cost_as_much_as_one_body(server: Process) -> None:
    """Compared with a server that has read as much in one piece; other requests are answered meanwhile."""
    port = int(server.url.rpartition(":")[2])
    assert [one.status for one in said(port, post(GO_ON.rjust(COUNT)))] == [200]
    content = chunked(*(b"1\r\n%c\r\n" % byte for byte in GO_ON.rjust(COUNT)), LAST)
    server.forget()
    before = server.resident()
    with connected(port) as client:
        for start in range(0, len(content), SLICE):
            client.sendall(content[start : start + SLICE])
            if start % (SLICE * 16) == 0:
                assert [one.status for one in said(port, PROBE)] == [200]
        assert [one.status for one in answers(heard(client))] == [200]
    assert server.resident("VmHWM") - before < COUNT / 2**20 + 1, "MiB beyond the body"


def test_with_few_file_descriptors_requests_are_still_answered(tiny_generator: Path) -> None:
    """Three hundred silent connections where two hundred files may be open: requests are answered, meanwhile and
    afterwards.
    """
    process = Process(f"chat={tiny_generator}", "--cache-tokens", "4096", open_files=200)
    process.ready()
    port = int(process.url.rpartition(":")[2])
    try:
        with ExitStack() as held:
            for _ in range(300):
                held.enter_context(connected(port))
            assert [one.status for one in said(port, post(GO_ON))] == [200]
        assert [one.status for one in said(port, post(GO_ON))] == [200]
        assert process.descriptors() <= 200
        assert "out of system resource" not in process.log
    finally:
        assert process.stop() == 0, process.log
