"""Continuous load while servers are changed: streams and classifications, of which each answer is checked.

`async with load(url, asked) as report: ...`; afterwards `report` has the outcome of every request. A request counts
as answered only if its answer is complete and equal to all others; anything else is a failure with its text.

Each request has its own connection and is sent once. With kept connections it is sent again where the official
clients do: after a 503, or when the connection was closed before a byte of an answer."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

PATIENCE = 120.0
TRIES = 3  # of one request, as in openai's client
GONE = (httpx.RemoteProtocolError, httpx.ConnectError, httpx.ReadError, httpx.WriteError)


@dataclass(frozen=True)
class Asked:
    """Names of the models, the length of a streamed answer, the number of clients of each kind, whether they keep
    their connections, and the pause between an answer and the next request."""

    generator: str = "chat"
    classifier: str = "judge"
    tokens: int = 64
    streams: int = 2
    calls: int = 2
    keep: bool = False
    rest: float = 0.05

    @property
    def stream(self) -> dict[str, Any]:
        talk = {"prompt": [5, 6, 7, 8], "max_tokens": self.tokens, "temperature": 0, "ignore_eos": True}
        return talk | {"model": self.generator, "stream": True, "stream_options": {"include_usage": True}}


@dataclass
class Report:
    """The outcomes so far."""

    answered: Counter[str] = field(default_factory=Counter)  # by kind: stream, call
    again: Counter[str] = field(default_factory=Counter)  # sent again, by cause
    failures: list[str] = field(default_factory=list)
    expected: dict[str, str] = field(default_factory=dict)  # the answer, by kind: always the same

    def came(self, kind: str, answer: str) -> None:
        if answer != self.expected.setdefault(kind, answer):
            self.failures.append(f"{kind}: another answer than before: {answer[:80]!r}")
        self.answered[kind] += 1

    async def more(self, count: int) -> None:
        """Wait until so many more of each kind were answered."""
        wanted = {kind: self.answered[kind] + count for kind in ("stream", "call")}
        async with asyncio.timeout(PATIENCE):
            while any(self.answered[kind] < number for kind, number in wanted.items()):
                await asyncio.sleep(0.01)


class Unanswered(Exception):
    """No answer; the request may be sent again."""


async def stream(client: httpx.AsyncClient, asked: Asked, came: asyncio.Event | None = None) -> str:
    """The text of a whole stream, whose events are reported to `came`. A stream that has begun is not sent again."""
    lines: list[str] = []
    async with client.stream("POST", "/v1/completions", json=asked.stream) as answer:
        await checked(answer)
        try:
            async for line in answer.aiter_lines():
                lines += [line.removeprefix("data: ")] if line else []
                if came:
                    came.set()
        except GONE as error:
            raise AssertionError(f"a stream broke off: {error!r}") from None
    assert lines[-1:] == ["[DONE]"], f"a stream broke off after {lines[-1:]}"
    events = [json.loads(line) for line in lines[:-1]]
    assert not any("error" in event for event in events), events[-1]
    used = events[-1]["usage"]["completion_tokens"]
    assert used == asked.tokens, f"{used} tokens of {asked.tokens}"
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def begun(url: str, asked: Asked) -> asyncio.Task[str]:
    """A stream that has sent an event and goes on."""
    came = asyncio.Event()

    async def whole() -> str:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, verify=False) as client:
            return await stream(client, asked, came)

    task, waiting = asyncio.create_task(whole()), asyncio.create_task(came.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return task


async def call(client: httpx.AsyncClient, asked: Asked) -> str:
    """The label of a classified text."""
    answer = await client.post(f"/models/{asked.classifier}/predict", json={"inputs": "a good film"})
    await checked(answer)
    return str(answer.json()[0]["label"])


async def checked(answer: httpx.Response) -> None:
    if answer.status_code == 503:
        raise Unanswered("503")
    if answer.status_code != 200:
        raise AssertionError(f"{answer.status_code}: {(await answer.aread())[:200]!r}")


async def answered(send: Callable[[], Awaitable[str]], tries: int, report: Report) -> str:
    """The answer to `send`, with repeated attempts."""
    for _ in range(tries - 1):
        try:
            return await send()
        except (Unanswered, *GONE) as why:
            report.again[str(why) if isinstance(why, Unanswered) else type(why).__name__] += 1
    return await send()


Send = Callable[[httpx.AsyncClient, Asked], Awaitable[str]]


@dataclass(frozen=True)
class Client:
    """A client that sends requests of one kind, one after the other."""

    url: str
    asked: Asked
    kind: str
    send: Send

    async def ask(self, report: Report, over: asyncio.Event) -> None:
        limits, tries = httpx.Limits(max_keepalive_connections=int(self.asked.keep)), TRIES if self.asked.keep else 1
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, limits=limits, verify=False) as client:
            while not over.is_set():
                try:
                    text = await answered(lambda: self.send(client, self.asked), tries, report)
                    report.came(self.kind, text)
                except (Unanswered, httpx.HTTPError, AssertionError) as error:
                    report.failures.append(f"{self.kind}: {type(error).__name__} {error}")
                await asyncio.sleep(self.asked.rest)


@asynccontextmanager
async def load(url: str, asked: Asked | None = None) -> AsyncGenerator[Report]:
    """Clients that send one request after the other, from the first answers on until the block is left; their last
    requests are completed."""
    asked, report, over = asked or Asked(), Report(), asyncio.Event()
    kinds: list[tuple[str, Send, int]] = [("stream", stream, asked.streams), ("call", call, asked.calls)]
    clients = [Client(url, asked, kind, send).ask(report, over) for kind, send, count in kinds for _ in range(count)]
    asking = asyncio.gather(*clients)
    try:
        await report.more(1)
        yield report
    finally:
        over.set()
        await asking
