"""Load that goes on while something is done to those who answer: streams and classifications, each answer looked at.

Knows neither who answers nor what is done to them: `async with load(url, asked) as report: ...`, and afterwards the
report says what came of every request.  The one idea: a request is only counted as answered if all of it came and it is
what it always is; whatever else happens to it is a failure, in words.

Each request has a connection of its own and one chance.  Clients that keep theirs send again where the official ones
do: after a 503, or when the connection was closed before a byte of an answer came.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

PATIENCE = 120.0
TRIES = 3  # of one request, as openai's client has it
GONE = (httpx.RemoteProtocolError, httpx.ConnectError, httpx.ReadError, httpx.WriteError)


@dataclass(frozen=True)
class Asked:
    """Names of the models, how long a streamed answer is, how many clients of either kind there are, whether they keep
    their connections, and how long each rests between an answer and its next request."""

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
    """What has come of it so far."""

    answered: Counter[str] = field(default_factory=Counter)  # by kind: stream, call
    again: Counter[str] = field(default_factory=Counter)  # sent again, by why
    failures: list[str] = field(default_factory=list)
    expected: dict[str, str] = field(default_factory=dict)  # the answer, by kind: always the same

    def came(self, kind: str, answer: str) -> None:
        if answer != self.expected.setdefault(kind, answer):
            self.failures.append(f"{kind}: another answer than before: {answer[:80]!r}")
        self.answered[kind] += 1

    async def more(self, count: int) -> None:
        """Until so many more of either kind were answered."""
        wanted = {kind: self.answered[kind] + count for kind in ("stream", "call")}
        async with asyncio.timeout(PATIENCE):
            while any(self.answered[kind] < number for kind, number in wanted.items()):
                await asyncio.sleep(0.01)


class Unanswered(Exception):
    """It may be tried again elsewhere."""


async def stream(client: httpx.AsyncClient, asked: Asked, came: asyncio.Event | None = None) -> str:
    """The text of a whole stream, of which something `came`.  One that has begun is not tried again."""
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
    """A stream that has said something, and goes on."""
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
    """What `send` comes to, in the end."""
    for _ in range(tries - 1):
        try:
            return await send()
        except (Unanswered, *GONE) as why:
            report.again[str(why) if isinstance(why, Unanswered) else type(why).__name__] += 1
    return await send()


Send = Callable[[httpx.AsyncClient, Asked], Awaitable[str]]


@dataclass(frozen=True)
class Client:
    """One who asks for one kind of answer, again and again."""

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
    """Clients that ask one after the other, from the first answers on until the block is left; what they have begun by
    then they bring to its end."""
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
