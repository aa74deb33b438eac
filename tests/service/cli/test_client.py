"""A server that the command line asks may be anybody's: its answers are bounded, and of any form."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from polyhead.service.cli import client, remote_server
from polyhead.service.cli.client import ApiClient, BoundedBody, ClientError
from polyhead.service.cli.main import app
from tests.service.cli.test_main import answering

Ask = Callable[[], object]
DEEP = "[" * 100_000
COMMANDS = [("chat", "--model", "m", "hi"), ("classify", "--model", "m", "hi"), ("embed", "--model", "m", "hi")]


class Endless(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body without end; `read` counts what was read of it."""

    def __init__(self) -> None:
        self.read, self.closed = 0, False

    def __iter__(self) -> Iterator[bytes]:
        while True:
            self.read += 1000
            yield b"a" * 1000

    async def __aiter__(self) -> Any:
        for part in self:
            yield part

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 100_000)


def polyhead(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("command", [*COMMANDS, ("classify", "hi")])
def test_an_answer_without_end_is_read_up_to_a_bound(
    command: tuple[str, ...], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[Endless] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(Endless())
        return httpx.Response(status, stream=bodies[-1], headers={"Content-Type": "text/event-stream"})

    answering(monkeypatch, answer)
    result = polyhead(*command)
    assert result.exit_code == 1
    assert "answered with more than 100000 bytes, which are not read" in result.stderr
    assert [(each.read, each.closed) for each in bodies] == [(101_000, True)]


def test_a_compressed_answer_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    body = Endless()
    headers = {"Content-Encoding": "GZip"}
    seen = answering(monkeypatch, lambda request: httpx.Response(200, stream=body, headers=headers))
    for command in COMMANDS:
        result = polyhead(*command)
        assert result.exit_code == 1
        assert "with Content-Encoding 'GZip', which was not asked for" in result.stderr
    assert {request.headers["accept-encoding"] for request in seen} == {"identity"}
    assert not body.read


def test_a_charset_that_is_a_compression_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'data: {"choices": [{"delta": {"content": "Paris"}}]}\n\n'
    headers = {"Content-Type": "text/event-stream; charset=zlib_codec"}
    answering(monkeypatch, lambda request: httpx.Response(200, content=text.encode(), headers=headers))
    assert polyhead(*COMMANDS[0]).stdout == "Paris\n"
    packed = zlib.compress(text.encode())
    answering(monkeypatch, lambda request: httpx.Response(200, content=packed, headers=headers))
    assert "Paris" not in polyhead(*COMMANDS[0]).stdout


ODD: list[Any] = [
    *(None, 5, "text", [], {}, [1], [[]], [{}], {"data": 5}, {"data": [5]}, {"data": []}, {"data": [{"embedding": 5}]}),
    *({"data": [{"embedding": ["a"]}]}, {"choices": 5}, {"choices": [5]}, {"choices": [{"delta": 5}]}),
    *({"choices": [{"delta": {"content": 5}}]}, {"choices": [{"delta": {"content": "\ud800"}}]}, {"error": 5}),
    *([{"label": 5, "score": 1.0}], [{"label": "a", "score": "b"}], [{"label": "\ud800", "score": 1.0}], {"error": {}}),
]
ODD_TEXTS = [*map(json.dumps, ODD), "<html>", DEEP, '{"a":' * 100_000, "1" * 5000]


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("text", ODD_TEXTS, ids=range(len(ODD_TEXTS)))
def test_an_answer_of_another_form_is_one_message(text: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        is_chat = request.url.path.endswith("/completions") and status == 200
        return httpx.Response(status, content=f"data: {text}\n\n" if is_chat else text)

    answering(monkeypatch, answer)
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 1 << 20)
    for command in (*COMMANDS, ("chat", "hi"), ("classify", "hi")):
        result = polyhead(*command)
        assert result.exit_code == 1, command
        assert len(result.stderr.splitlines()) == 1, command
        assert result.stderr.startswith("polyhead: "), command
        assert isinstance(result.exception, SystemExit), command


def test_the_clients_of_other_commands_have_the_same_bounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`explain` and `calibrate` by `connect_server`; `decide` has its own client."""
    body, packed = Endless(), httpx.Response(200, content=gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"})
    answers = [httpx.Response(200, stream=body), packed]
    real = httpx.AsyncClient

    def connected(**options: Any) -> httpx.AsyncClient:
        return real(transport=httpx.MockTransport(lambda _: answers.pop(0)), **options)

    monkeypatch.setattr(remote_server.httpx, "AsyncClient", connected)

    async def ask() -> None:
        async with remote_server.connect_server("http://other", "") as asked:
            assert asked.headers["accept-encoding"] == "identity"
            with pytest.raises(ClientError, match="more than 100000 bytes"):
                await asked.get("/v1/models")
            with pytest.raises(ClientError, match="Content-Encoding 'gzip'"):
                await asked.get("/v1/models")

    asyncio.run(ask())
    assert (body.read, body.closed) == (101_000, True)
    answers.append(httpx.Response(200, stream=(body := Endless())))
    (tmp_path / "questions.yaml").write_text("questions:\n  urgent: {type: noul, criteria: {true: a, false: b}}\n")
    (tmp_path / "rows.jsonl").write_text('{"state": "a"}\n')
    paths = [str(tmp_path / name) for name in ("questions.yaml", "rows.jsonl")]
    result = polyhead("decide", *paths, "--url", "http://other")
    assert result.exit_code == 1
    assert "more than 100000 bytes" in result.stderr
    assert body.closed


def test_a_body_within_the_bound_is_whole() -> None:
    parts = [b"a" * 50_000, b"b" * 50_000]
    assert list(BoundedBody(parts, "")) == parts
    with pytest.raises(ClientError):
        list(BoundedBody([*parts, b"c"], ""))
    assert ApiClient("http://x", "k").url == "http://x"
