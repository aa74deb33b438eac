"""Invalid values for every numeric field of every route that generates: each is rejected with the field's name, none
causes a 5xx, and the answer of another request does not change."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.bad_values import asked
from tests.support.processes import Process

NEIGHBOUR = {
    "model": "chat",
    "prompt": "The quick",
    "max_tokens": 100,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


@pytest.fixture(scope="module")
def server(tiny_generator: Path) -> Iterator[Process]:
    process = Process(f"chat={tiny_generator}", "--executor", "torch")
    process.ready()
    yield process
    assert process.stop() == 0, process.log


async def stream_neighbour(client: httpx.AsyncClient) -> str:
    return (await client.post("/v1/completions", json=NEIGHBOUR)).text


def text_of(events: str) -> str:
    return "".join(
        json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        for line in events.split("\n\n")
        if line and not line.endswith("[DONE]")
    )


async def answers(url: str) -> tuple[list[httpx.Response], set[str]]:
    """The answers of all calls, sent a few at a time, and the texts of a stream that is requested again and again until
    all calls are answered."""
    calls, found, texts = list(asked()), {}, set()

    async def send_every_fourth(client: httpx.AsyncClient, first: int) -> None:
        for index in range(first, len(calls), 4):
            found[index] = await client.post(calls[index].path, content=calls[index].body)

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        texts.add(text_of(await stream_neighbour(client)))
        pending = asyncio.gather(*(send_every_fourth(client, first) for first in range(4)))
        while not pending.done():
            texts.add(text_of(await stream_neighbour(client)))
        await pending
    return [found[index] for index in range(len(calls))], texts


def test_no_value_of_a_numeric_field_causes_a_server_error(server: Process) -> None:
    found, texts = asyncio.run(answers(server.url))
    assert {len(each) > 50 for each in texts} == {True}
    assert len(texts) == 1, "the text of the other stream changed"
    refused = 0
    for call, answer in zip(asked(), found, strict=True):
        request = f"{call.path} {call.body.decode()} {answer.status_code} {answer.text}"
        if answer.status_code == 504 and call.name == "timeout":  # a second may be too short on a busy machine
            continue
        assert answer.status_code < (300 if call.is_valid else 500), request
        if answer.status_code >= 400:
            refused += 1
            assert call.name in answer.text or b"NaN" in call.body, request
    assert refused > len(found) / 3, "too few of these values are invalid"
    rest = server.rest()
    assert rest.received_and_ended[0] == rest.received_and_ended[1]
