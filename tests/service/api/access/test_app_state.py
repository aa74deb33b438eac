"""The submission of a call in slices: all of its requests are submitted, or none."""

import asyncio
import gzip
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import httpx
import orjson
import pytest

from polyhead.service.api.access.app_state import SLICE_TOKENS, AppState, split_requests
from polyhead.service.api.access.request_context import RequestContext
from polyhead.service.concurrency.time_slices import SLICE_SIZE, LoopTurns
from polyhead.service.core.errors import Expired, Overloaded, Unavailable
from polyhead.service.core.model import Model
from polyhead.service.core.request import Request
from tests.support.engine_fakes import generate
from tests.support.scripted import WAIT, Registry, Source, application, echo, until
from tests.support.scripted import model as scripted_model

MANY = 5 * SLICE_SIZE + 17


IDS = [5, 6, 7]


class LimitedRegistry(Registry):
    """Accepts `most` requests, then rejects."""

    def __init__(self, generator: Model, most: int) -> None:
        super().__init__([generator], lambda *_: [WAIT])
        self.most = most

    def submit(self, model: Model, requests: Sequence[Request]) -> list[Source]:
        if len(self.requests) + len(requests) > self.most:
            raise Unavailable("it is being unloaded")
        return super().submit(model, requests)


def requests_of(count: int) -> list[Request]:
    return [replace(generate(IDS), id=f"call-{number}") for number in range(count)]


def submitted(registry: Registry, visit: RequestContext, **settings: Any) -> tuple[AppState, Any]:
    server = cast(AppState, application(registry, **settings).state.server)
    [generator] = registry.models()
    return server, server.submit_in_slices(visit, generator, requests_of(MANY))


@pytest.fixture
def generator(tiny_generator: Path) -> Model:
    return scripted_model(tiny_generator, "talker", "generate")


def test_earlier_slices_are_aborted_when_a_later_slice_is_rejected(generator: Model) -> None:
    async def run() -> None:
        registry = LimitedRegistry(generator, 3 * SLICE_SIZE)
        server, call = submitted(registry, RequestContext("id"))
        with pytest.raises(Unavailable):
            await call
        await until(lambda: all(source.aborted for source in registry.sources))
        assert len(registry.sources) == 3 * SLICE_SIZE
        assert server.admission._total.reserved_tokens == 0

    asyncio.run(run())


@pytest.mark.parametrize("cause", ["deadline", "left"])
def test_a_deadline_or_a_disconnect_stops_the_submission(generator: Model, cause: str) -> None:
    class ExpiringContext(RequestContext):
        def check_deadline(self) -> None:
            if cause == "deadline" and len(registry.requests) >= 2 * SLICE_SIZE:
                raise self.deadline_error()

    async def run() -> None:
        server, call = submitted(registry, ExpiringContext("id"))
        task = asyncio.create_task(call)
        if cause == "left":
            while len(registry.requests) < 2 * SLICE_SIZE:
                await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(Expired if cause == "deadline" else asyncio.CancelledError):
            await task
        await until(lambda: all(source.aborted for source in registry.sources))
        assert 2 * SLICE_SIZE <= len(registry.sources) < MANY
        assert server.admission._total.reserved_tokens == 0

    registry = Registry([generator], lambda *_: [WAIT])
    asyncio.run(run())


def test_the_tokens_of_a_call_are_reserved_while_it_is_submitted(generator: Model) -> None:
    async def run() -> None:
        registry = Registry([generator], lambda *_: [WAIT])
        server, call = submitted(registry, RequestContext("id"), max_tokens_in_flight=MANY * len(IDS))
        task = asyncio.create_task(call)
        while not registry.requests:
            await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            server.submit(RequestContext("other"), generator, requests_of(2 * SLICE_SIZE))
        assert len(await task) == MANY
        assert server.admission._total.reserved_tokens == 0

    asyncio.run(run())


def test_a_call_without_free_tokens_is_rejected_as_a_whole(generator: Model) -> None:
    async def run() -> None:
        registry = Registry([generator], lambda *_: [WAIT])
        server, call = submitted(registry, RequestContext("id"), max_tokens_in_flight=MANY)
        cast(Any, server.engine).tokens = 1
        with pytest.raises(Overloaded):
            await call
        assert not registry.requests

    asyncio.run(run())


def test_a_group_is_in_one_slice() -> None:
    groups = [f"g{number // 3}" if number % 9 < 6 else "" for number in range(MANY)]
    requests = [replace(one, group=group) for one, group in zip(requests_of(MANY), groups, strict=True)]
    slices = [list(some) for some in split_requests(requests)]
    assert [request for some in slices for request in some] == requests
    assert all(SLICE_SIZE <= len(some) < SLICE_SIZE + 3 for some in slices[:-1])
    ends = [(some[-1].group, after[0].group) for some, after in pairwise(slices)]
    assert all(last != first or not last for last, first in ends)


def test_several_large_calls_submit_one_slice_at_a_time(generator: Model) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        server, first = submitted(registry, RequestContext("first"))
        others = [server.submit_in_slices(RequestContext("other"), generator, requests_of(MANY)) for _ in range(5)]
        tasks = [asyncio.create_task(call) for call in (first, *others)]
        before, most = 0, 0

        def count_turn() -> None:
            nonlocal before, most
            most, before = max(most, len(registry.requests) - before), len(registry.requests)
            if not all(task.done() for task in tasks):
                loop.call_soon(count_turn)

        loop.call_soon(count_turn)
        await asyncio.gather(*tasks)
        assert len(registry.requests) == 6 * MANY
        assert most <= SLICE_SIZE

    registry = Registry([generator], lambda *_: [WAIT])
    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "least"),
    [
        ("/v1/embeddings", {"model": "vectors", "input": ["a"] * MANY}, 2 * MANY // SLICE_SIZE),  # and as it is read
        ("/v1/completions", {"model": "talker", "prompt": ["a"] * MANY, "max_tokens": 1}, 3 * MANY // SLICE_SIZE),
        ("/v1/embeddings", {"model": "vectors", "input": "a" * (1 << 20)}, 4),  # its body is compressed
    ],
)
def test_long_calls_take_turns_of_their_key(
    generator: Model, tiny_embedder: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, least: int
) -> None:
    taken, real = list[str](), LoopTurns.take

    async def take(self: LoopTurns, owner: str) -> None:
        taken.append(owner)
        await real(self, owner)

    monkeypatch.setattr(LoopTurns, "take", take)
    registry = Registry([generator, scripted_model(tiny_embedder, "vectors", "embed")], echo)
    app = application(registry, api_keys={"me": "a-key-of-some-length"})

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            content, headers = orjson.dumps(body), {"Authorization": "Bearer a-key-of-some-length"}
            if len(body.get("input", "")) > MANY:
                content, headers = gzip.compress(content), headers | {"Content-Encoding": "gzip"}
            headers["Content-Type"] = "application/json"
            answer = await client.post(path, content=content, headers=headers)
            assert answer.status_code in (200, 400), answer.text[:300]

    asyncio.run(run())
    assert set(taken) == {"me"}
    assert len(taken) >= least


def test_long_prompts_are_submitted_in_slices_and_the_prompt_of_a_group_counts_once() -> None:
    long = tuple(range(SLICE_TOKENS // 2))
    requests = [replace(one, tokens=long, group=f"g{number // 8}") for number, one in enumerate(requests_of(32))]
    slices = [list(some) for some in split_requests(requests)]
    assert [request for some in slices for request in some] == requests
    assert [{request.group for request in some} for some in slices] == [{"g0", "g1"}, {"g2", "g3"}]
