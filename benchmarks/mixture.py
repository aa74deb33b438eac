"""A mixed load with known answers: streams, whole answers, chats, classifications, embeddings.

In one of ten requests the client disconnects at a random moment, and one of ten is invalid. Every request is sent once
without other load. After that its answer must be the same under any load.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

KEY = "soaked"
CUT, INVALID = 0.1, 0.1  # shares of all requests
TOLERANCE = 1e-4  # of a score or a component, computed beside others in float32
LATE = 0.02  # seconds that a request is given that takes longer
ENOUGH = 10  # wrong answers that are listed
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "A good film, well acted and beautifully shot.",
    "It rained.",
    "What is the capital of France, and why does everyone ask?",
    "Der schnelle braune Fuchs springt über den faulen Hund.",
    "Dull, far too long: I want my money back!",
    "日本語 и кириллица",
)

Answer = str | list[float]


@dataclass(frozen=True)
class Names:
    """What the served models are called."""

    generator: str = "generator"
    classifier: str = "classifier"
    embedder: str = "embedder"


@dataclass(frozen=True)
class Question:
    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Trap:
    """A request that must be answered with `status`."""

    status: int
    path: str
    content: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Tally:
    """The client's books."""

    sent: int = 0
    answered: int = 0
    cut: int = 0
    refused: Counter[int] = field(default_factory=Counter)  # by status
    wrong: list[str] = field(default_factory=list)

    def complain(self, text: str) -> None:
        if len(self.wrong) < ENOUGH:
            self.wrong.append(text)


def questions(names: Names) -> list[Question]:
    """Prompts and texts of several lengths; answers from a word to some sentences."""
    found = []
    for number in range(len(SENTENCES)):
        text = " ".join((SENTENCES * 2)[number:][: 1 + number % 3])
        drawn: dict[str, Any] = {"temperature": 0} if number % 3 else {"temperature": 0.8, "seed": number}
        asked = {"model": names.generator, "max_tokens": 2 + 11 * number % 30, **drawn}
        said = {"messages": [{"role": "user", "content": text}]}
        found += [
            Question("/v1/completions", {**asked, "prompt": text, "stream": True, "ignore_eos": True}),
            Question("/v1/completions", {**asked, "prompt": text, "stop": "the"}),
            Question("/v1/chat/completions", {**asked, **said, "stream": number % 2 == 0}),
            Question(f"/models/{names.classifier}/predict", {"inputs": text}),
            Question("/v1/embeddings", {"model": names.embedder, "input": text}),
        ]
    return found


def traps(names: Names) -> list[Trap]:
    """One of each kind of request that cannot be answered."""
    path, asked = "/v1/completions", {"model": names.generator, "prompt": "x", "max_tokens": 8}
    slow = {**asked, "max_tokens": 200, "ignore_eos": True}
    return [
        Trap(400, path, json.dumps(asked)[:-1]),
        Trap(400, path, json.dumps({**asked, "temprature": 0})),
        Trap(404, path, json.dumps({**asked, "model": "nobody"})),
        Trap(400, path, json.dumps({**asked, "prompt": "word " * 20_000})),
        Trap(413, f"/models/{names.classifier}/predict", json.dumps({"inputs": "word " * 2_000})),
        Trap(401, path, json.dumps(asked), {"Authorization": "Bearer wrong"}),
        Trap(504, path, json.dumps(slow), {"X-Request-Timeout": str(LATE)}),
    ]


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=60, headers={"Authorization": f"Bearer {KEY}"})


async def ask(http: httpx.AsyncClient, question: Question) -> Answer:
    """Its answer: the text, the scores in order of labels, or the vector.  Raises HTTPStatusError, ValueError."""
    if not question.body.get("stream"):
        response = await http.post(question.path, json=question.body)
        response.raise_for_status()
        return whole(response.json())
    async with http.stream("POST", question.path, json=question.body) as response:
        response.raise_for_status()
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    if lines[-1:] != ["[DONE]"]:
        raise ValueError(f"the stream ended with {lines[-1:]}")
    return "".join(piece(json.loads(line)) for line in lines[:-1])


def whole(answer: Any) -> Answer:
    if isinstance(answer, list):
        return [label["score"] for label in sorted(answer, key=lambda label: str(label["label"]))]
    if "data" in answer:
        return list(answer["data"][0]["embedding"])
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def piece(chunk: Any) -> str:
    choice = chunk["choices"][0]
    return str(choice["delta"].get("content") or "" if "delta" in choice else choice["text"])


def same(answer: Answer, known: Answer) -> bool:
    if isinstance(answer, str) or isinstance(known, str):
        return answer == known
    return len(answer) == len(known) and all(abs(a - b) <= TOLERANCE for a, b in zip(answer, known, strict=True))


class Mixture:
    """The load, and what came of it.  The same `seed` draws the same requests."""

    def __init__(self, names: Names, seed: int = 0) -> None:
        self.questions, self.traps = questions(names), traps(names)
        self.tally, self.random = Tally(), Random(seed)
        self._known: list[Answer] = []
        self._took: list[float] = []  # seconds, the latest answer of each question: when to cut it off

    async def learn(self, url: str) -> None:
        """Ask every question alone, and remember the answer."""
        async with client(url) as http:
            for question in self.questions:
                began = time.perf_counter()
                self._known.append(await ask(http, question))
                self._took.append(time.perf_counter() - began)
        self.tally.sent += len(self.questions)
        self.tally.answered += len(self.questions)

    async def bout(self, url: str, requests: int, width: int) -> None:
        """So many requests by `width` clients, each of which asks one thing after the other; then all connections are
        closed."""
        drawn = iter(range(requests))
        async with client(url) as http, asyncio.TaskGroup() as clients:
            for _ in range(width):
                clients.create_task(self._client(http, drawn))

    async def _client(self, http: httpx.AsyncClient, drawn: Iterator[int]) -> None:
        for _ in drawn:
            self.tally.sent += 1
            kind = self.random.random()
            try:
                if kind < INVALID:
                    await self._trap(http, self.random.choice(self.traps))
                else:
                    await self._question(http, self.random.randrange(len(self.questions)), kind < INVALID + CUT)
            except (httpx.HTTPError, ValueError, LookupError) as error:
                self.tally.complain(f"{error!r}")

    async def _trap(self, http: httpx.AsyncClient, trap: Trap) -> None:
        headers = {"Content-Type": "application/json", **trap.headers}
        response = await http.post(trap.path, content=trap.content, headers=headers)
        self.tally.refused[response.status_code] += 1
        if response.status_code != trap.status:
            self.tally.complain(f"{trap.status} is right, got {response.status_code}: {response.text[:200]}")

    async def _question(self, http: httpx.AsyncClient, number: int, cut: bool) -> None:
        question, began = self.questions[number], time.perf_counter()
        moment = self._took[number] * self.random.random() if cut else None
        try:
            async with asyncio.timeout(moment):
                answer = await ask(http, question)
        except TimeoutError:
            self.tally.cut += 1
            return
        self._took[number] = time.perf_counter() - began
        self.tally.answered += 1
        if not same(answer, self._known[number]):
            self.tally.complain(f"{question.body}: {answer!r} instead of {self._known[number]!r}")
