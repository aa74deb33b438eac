"""Many clients at once on one event loop, over plain sockets: as many whole clients would cost more than the server."""

import asyncio
import json
import random
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

PATIENCE = 120.0  # seconds for one answer
T = TypeVar("T")
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
COMPLETIONS = "/v1/completions"
NOTHING: Mapping[str, str] = {}


@dataclass
class Answer:
    """What came back.  `parts` and `times` are of a stream: its chunks and when each came."""

    began: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    whole: bool = False  # it came to its end, not only to the connection's

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def data(self) -> list[str]:
        """What the events of a stream carry; decoding is strict, so half a character anywhere is an error."""
        return [line.removeprefix("data: ") for line in self.body.decode().split("\n") if line.startswith("data: ")]

    @property
    def deltas(self) -> list[str]:
        """Of the completion in a stream."""
        events = [json.loads(data) for data in self.data if data != "[DONE]"]
        return [event["choices"][0]["text"] for event in events if "choices" in event]

    @property
    def text(self) -> str:
        """The completion, streamed or not."""
        assert self.status == 200, self.body
        if "event-stream" not in self.headers["content-type"]:
            return str(self.choice["text"])
        assert self.data[-1] == "[DONE]", self.data[-1]
        return "".join(self.deltas)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def choice(self) -> Any:
        return self.json["choices"][0]

    @property
    def code(self) -> str:
        """The error's, as the OpenAI dialect says it."""
        return str(self.json["error"]["code"])


async def call(url: str, path: str, body: Any, headers: Mapping[str, str], sent: float = 1.0) -> Connection:
    """A connection on which a request was sent, or such a part of its body."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 24)
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + content[: int(len(content) * sent)])
    return reader, writer


async def ask(url: str, path: str, body: Any, headers: Mapping[str, str] = NOTHING) -> Answer:
    answer = Answer(began=time.perf_counter())
    async with asyncio.timeout(PATIENCE):
        reader, writer = await call(url, path, body, headers)
        try:
            await read(reader, answer)
        finally:
            answer.ended = time.perf_counter()
            writer.transport.abort()
    return answer


async def read(reader: asyncio.StreamReader, answer: Answer) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    answer.status = int(head[0].split()[1])
    answer.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:]) if name}
    if "content-length" in answer.headers:
        answer.parts.append(await reader.readexactly(int(answer.headers["content-length"])))
        answer.whole = True
        return
    while line := await reader.readline():
        size = int(line, 16)
        part = (await reader.readexactly(size + 2))[:-2]
        if not size:
            answer.whole = True
            return
        answer.parts.append(part)
        answer.times.append(time.perf_counter())


@dataclass(frozen=True)
class Moment:
    """When a client leaves: after so many seconds, or events if those come first.

    `politely` is as a program that ends, otherwise it is as a line that breaks.  `sent` is how much of its body it
    sends before.
    """

    seconds: float = PATIENCE
    events: int = 0
    politely: bool = True
    sent: float = 1.0


async def leave(url: str, path: str, body: Any, moment: Moment, headers: Mapping[str, str] = NOTHING) -> int:
    """Ask and go; returns how many events came."""
    reader, writer = await call(url, path, body, headers, moment.sent)
    came = 0
    try:
        async with asyncio.timeout(moment.seconds):
            while not moment.events or came < moment.events:
                line = await reader.readline()
                if not line:
                    break
                came += line.startswith(b"data: ")
    except TimeoutError:
        pass
    finally:
        if moment.politely:
            writer.close()
        else:
            writer.transport.abort()
    return came


async def together(tasks: Iterable[Coroutine[Any, Any, T]], most: int = 1 << 30) -> list[T]:
    """What they return, at most so many at once."""
    places = asyncio.Semaphore(most)

    async def placed(task: Coroutine[Any, Any, T]) -> T:
        async with places:
            return await task

    return list(await asyncio.gather(*map(placed, tasks)))


def completion(prompt: list[int], tokens: int, **others: Any) -> dict[str, Any]:
    """A greedy completion of exactly so many tokens."""
    asked = {"model": "chat", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return asked | others


def prompts(count: int, length: int = 24, seed: int = 0) -> list[list[int]]:
    """Different ones, of tokens from 10 to 199, so that others are free to be marks."""
    draw = random.Random(seed)
    return [[draw.randrange(10, 200) for _ in range(length)] for _ in range(count)]


class Alone:
    """What completions say with nobody beside them, asked one by one and only once a session."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def __call__(self, url: str, bodies: Sequence[dict[str, Any]]) -> list[str]:
        asked = [json.dumps(body) for body in bodies]
        for key, body in zip(asked, bodies, strict=True):
            if key not in self.known:
                self.known[key] = asyncio.run(ask(url, COMPLETIONS, body)).text
        return [self.known[key] for key in asked]
