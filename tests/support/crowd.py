"""Many concurrent clients on one event loop, over plain sockets; complete HTTP clients would cost more than the
server."""

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
    """An answer. `parts` and `times` are those of a stream: its chunks, and the time of each."""

    began: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    whole: bool = False  # the answer was complete when the connection ended

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def data(self) -> list[str]:
        """The data of the events of a stream. Decoding is strict: an incomplete character is an error."""
        return [line.removeprefix("data: ") for line in self.body.decode().split("\n") if line.startswith("data: ")]

    @property
    def deltas(self) -> list[str]:
        """The deltas of a streamed completion."""
        events = [json.loads(data) for data in self.data if data != "[DONE]"]
        return [event["choices"][0]["text"] for event in events if "choices" in event]

    @property
    def text(self) -> str:
        """The text of the completion, streamed or not."""
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
        """The error code, in the OpenAI format."""
        return str(self.json["error"]["code"])


async def call(url: str, path: str, body: Any, headers: Mapping[str, str], sent: float = 1.0) -> Connection:
    """A connection on which a request, or the first `sent` part of its body, was sent."""
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
    """When a client disconnects: after so many seconds, or after so many events if these come first.

    `politely`: the socket is closed as by a program that ends; otherwise it is reset. `sent` is the part of the body
    that is sent before."""

    seconds: float = PATIENCE
    events: int = 0
    politely: bool = True
    sent: float = 1.0


async def leave(url: str, path: str, body: Any, moment: Moment, headers: Mapping[str, str] = NOTHING) -> int:
    """Send a request and disconnect; return the number of events that arrived."""
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
    """The results of the tasks, of which at most `most` run at once."""
    places = asyncio.Semaphore(most)

    async def placed(task: Coroutine[Any, Any, T]) -> T:
        async with places:
            return await task

    return list(await asyncio.gather(*map(placed, tasks)))


def completion(prompt: list[int], tokens: int, **others: Any) -> dict[str, Any]:
    """A greedy completion of exactly `tokens` tokens."""
    asked = {"model": "chat", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return asked | others


def prompts(count: int, length: int = 24, seed: int = 0) -> list[list[int]]:
    """Different prompts of tokens from 10 to 199; other tokens are free to mark requests."""
    draw = random.Random(seed)
    return [[draw.randrange(10, 200) for _ in range(length)] for _ in range(count)]


class Alone:
    """Completions of single requests, sent one after the other; each is computed once in a session."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def __call__(self, url: str, bodies: Sequence[dict[str, Any]]) -> list[str]:
        asked = [json.dumps(body) for body in bodies]
        for key, body in zip(asked, bodies, strict=True):
            if key not in self.known:
                self.known[key] = asyncio.run(ask(url, COMPLETIONS, body)).text
        return [self.known[key] for key in asked]
