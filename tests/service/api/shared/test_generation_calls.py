"""Generation calls: their requests are submitted where the call is started, and aborted if the answers are not read."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from polyhead.service.api.shared.streaming import EventStream
from tests.support.scripted import WAIT, Connection, Registry, application, model


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"]
)
def test_what_is_not_read_is_aborted_at_the_end_of_the_request(
    tiny_generator: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The answers are submitted before the stream is opened, which fails here."""
    registry = Registry([model(tiny_generator, "talker", "generate")], lambda *_: [WAIT])
    submitted = list[int]()

    async def fail(*_: Any, **__: Any) -> Any:
        submitted.append(len(registry.sources))
        assert all(source.is_open for source in registry.sources)
        raise RuntimeError("the stream cannot be opened")

    monkeypatch.setattr(EventStream, "open", fail)
    messages = [{"role": "user", "content": "a fox"}]
    fields = {
        "/v1/completions": {"prompt": ["a", "b"]},
        "/v1/chat/completions": {"messages": messages},
        "/v1/messages": {"messages": messages, "max_tokens": 9},
        "/v1/responses": {"input": "a fox"},
        "/api/chat": {"messages": messages},
    }
    body = {"model": "talker", "stream": True, **fields[path]}

    async def run() -> None:
        with pytest.raises(RuntimeError, match="cannot be opened"):
            await Connection(path, orjson.dumps(body)).run(application(registry))

    asyncio.run(run())
    assert submitted == [2 if path == "/v1/completions" else 1]
    assert all(source.aborted for source in registry.sources)
