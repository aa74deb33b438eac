"""Values that no field can have, of every numeric field of every route that generates: refused by its name, never the
server's fault, and nothing to whoever is answered meanwhile."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.bad_values import asked
from tests.support.processes import Process

STORY = {
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


async def story(client: httpx.AsyncClient) -> str:
    return (await client.post("/v1/completions", json=STORY)).text


def words(events: str) -> str:
    return "".join(
        json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        for line in events.split("\n\n")
        if line and not line.endswith("[DONE]")
    )


async def answers(url: str) -> tuple[list[httpx.Response], set[str]]:
    """To all calls, a few at a time; and what a neighbour was told, again and again, until all were answered."""
    calls, found, told = list(asked()), {}, set()

    async def some(client: httpx.AsyncClient, first: int) -> None:
        for index in range(first, len(calls), 4):
            found[index] = await client.post(calls[index].path, content=calls[index].body)

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        told.add(words(await story(client)))
        asking = asyncio.gather(*(some(client, first) for first in range(4)))
        while not asking.done():
            told.add(words(await story(client)))
        await asking
    return [found[index] for index in range(len(calls))], told


def test_no_value_of_any_field_is_the_servers_fault(server: Process) -> None:
    found, told = asyncio.run(answers(server.url))
    assert {len(each) > 50 for each in told} == {True}
    assert len(told) == 1, "a neighbour was told something else"
    refused = 0
    for call, answer in zip(asked(), found, strict=True):
        said = f"{call.path} {call.body.decode()} {answer.status_code} {answer.text}"
        if answer.status_code == 504 and call.name == "timeout":  # a second may be too little for a busy machine
            continue
        assert answer.status_code < (300 if call.fine else 500), said
        if answer.status_code >= 400:
            refused += 1
            assert call.name in answer.text or b"NaN" in call.body, said
    assert refused > len(found) / 3, "most of these values are none"
    rest = server.rest()
    assert rest.books[0] == rest.books[1]
