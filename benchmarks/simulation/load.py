"""A client of real replicas: turns of conversations over HTTP, and the times of their tokens."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import httpx

from benchmarks.simulation.processes import HOST, Process, started
from benchmarks.simulation.traffic import Traffic, Turn
from polyhead.service.config import settings
from polyhead.service.runtime import quickstart

WORDS, FIRST = 40_000, 1_000  # tokens that prompts are made of
CACHE = 16_384  # tokens of a replica's
WARMING = Turn(1 << 20, 0, 0, 0, 40, 4, 0.0)


@dataclass
class Heard:
    """What clients saw, in seconds."""

    waits: list[float] = field(default_factory=list)  # to the first token
    gaps: list[float] = field(default_factory=list)  # between two
    prompts: int = 0  # tokens,
    cached: int = 0  # of them found
    ended: int = 0
    tokens: int = 0  # said
    last: float = 0.0  # when the last token came


@dataclass(frozen=True)
class Scene:
    http: httpx.AsyncClient
    began: float
    heard: Heard = field(default_factory=Heard)


def served() -> dict[str, object]:
    folder = settings.default_model_dir()
    quickstart.fetch_all(folder)
    model = str(quickstart.sources(folder)["smollm2"])
    return {"models": {"llm": model}, "precision": "int8", "threads": 1, "cache_tokens": CACHE, "draft_tokens": 0}


@contextlib.contextmanager
def fleet(replicas: int, policy: str, steps: Path) -> Iterator[tuple[Process, list[Process]]]:
    """An ingress on the first core; replicas from the second on, in turns.  `steps` begins the names of their files."""
    told = served()
    with contextlib.ExitStack() as stack:
        behind = [
            stack.enter_context(started("replica", (number + 1) % 2, told, f"replica-{number}", f"{steps}{number}"))
            for number in range(replicas)
        ]
        before = stack.enter_context(started("ingress", 0, told, policy, *(each.port for each in behind)))
        yield before, behind


def wire(turn: Turn) -> dict[str, object]:
    prompt = [FIRST + (token * 2_654_435_761 >> 7) % WORDS for token in turn.tokens()]
    asked = {"model": "llm", "prompt": prompt, "max_tokens": turn.answer, "ignore_eos": True, "temperature": 0}
    return asked | {"stream": True, "stream_options": {"include_usage": True}}


async def ask(scene: Scene, turn: Turn) -> None:
    heard, came, last, usage = scene.heard, perf_counter(), 0.0, None
    async with scene.http.stream("POST", "/v1/completions", json=wire(turn)) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now, chunk = perf_counter(), json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            if any(choice["text"] for choice in chunk["choices"]):
                (heard.gaps if last else heard.waits).append(now - (last or came))
                last = now
    assert usage is not None
    assert usage["completion_tokens"] == turn.answer
    heard.prompts += usage["prompt_tokens"]
    heard.cached += usage["prompt_tokens_details"]["cached_tokens"]
    heard.ended += 1
    heard.tokens += turn.answer
    heard.last = last - scene.began


@contextlib.asynccontextmanager
async def talking(port: int) -> AsyncIterator[httpx.AsyncClient]:
    """Once it is ready, and warm."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=600, limits=limits) as http:
        while (await http.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.1)
        await ask(Scene(http, 0.0), WARMING)
        yield http


async def converse(scene: Scene, begins: float, turns: Sequence[Turn], until: float) -> None:
    pause = scene.began + begins - perf_counter()
    for turn in turns:
        if perf_counter() - scene.began + pause >= until:
            return
        await asyncio.sleep(pause)
        await ask(scene, turn)
        pause = turn.pause


async def replayed(port: int, traffic: Traffic) -> Heard:
    """All of it, in real time."""
    async with talking(port) as http:
        scene, arrivals = Scene(http, perf_counter()), list(traffic.arrivals())
        await asyncio.gather(*(converse(scene, when, turns, traffic.seconds) for when, turns in arrivals))
    return scene.heard


async def asked(port: int, turns: Iterator[Turn], together: int = 1, seconds: float = 600.0) -> Heard:
    """So many at once, one after the other, until there are no more or the time is over."""
    async with talking(port) as http:
        scene = Scene(http, perf_counter())

        async def some() -> None:
            for turn in turns:
                await ask(scene, turn)
                if perf_counter() - scene.began > seconds:
                    return

        await asyncio.gather(*(some() for _ in range(together)))
    return scene.heard
