"""A call of very many texts is worked on in slices: others get their turn, deadlines are looked at, nothing is left."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyhead.models.tokenizer import Tokenizer
from polyhead.service.api.access.app_state import SLICE_TOKENS, AppState, split_requests
from polyhead.service.api.access.request_context import RequestContext
from polyhead.service.api.shared.streaming import NUMPY_OPTION, dumps_sliced
from polyhead.service.concurrency.time_slices import SLICE_SIZE, call_in_slices, iterate_in_slices, split_in_slices
from polyhead.service.core.errors import Expired, Overloaded, Unavailable
from polyhead.service.core.model import Model
from polyhead.service.core.request import DEFAULT_TERMS, Request, Sampling, Terms
from polyhead.service.engine import engine as engine_module
from polyhead.service.engine.engine import Engine
from polyhead.service.engine.event_stream import Stream, StreamContext
from polyhead.service.engine.generator_worker import GeneratorWorker
from polyhead.service.text import tokenization as text_module
from polyhead.service.text.detokenizer import Detokenizer
from polyhead.service.text.encoder_inputs import TEXTS_PER_CHECK, EncodingRequest, read_inputs
from polyhead.service.text.prompts import GenerationRequest, read_prompts
from polyhead.service.text.tokenization import TokenizerJob
from tests.service.api.operations.test_admin import Client
from tests.service.api.operations.test_admin import serving as served
from tests.support.engine_fakes import generate
from tests.support.scripted import WAIT, Connection, Registry, Source, application, echo, until
from tests.support.scripted import model as scripted_model

MANY = 5 * SLICE_SIZE + 17
IDS = [5, 6, 7]


class Beats:
    """What was done between two turns of the event loop, at most, by what it is."""

    def __init__(self) -> None:
        self.most: Counter[str] = Counter()
        self.total: Counter[str] = Counter()
        self._now: Counter[str] = Counter()

    def count(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            self._now[what] += 1
            return function(*given, **named)

        return counted

    def beat(self) -> None:
        """In every turn of the loop."""
        self.most |= self._now
        self.total += self._now
        self._now.clear()
        asyncio.get_running_loop().call_soon(self.beat)


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> Beats:
    found = Beats()
    for what, owner, name in (
        ("submitted", Stream, "start"),
        ("ended", Stream, "_end"),
        ("begun", Detokenizer, "__init__"),
    ):
        monkeypatch.setattr(owner, name, found.count(what, getattr(owner, name)))
    return found


@pytest.mark.parametrize("asked", ["prompts", "texts"])
def test_no_turn_of_the_loop_has_more_than_a_slice(
    beats: Beats, tiny_generator: Path, tiny_embedder: Path, asked: str
) -> None:
    calls = {
        "prompts": ("/v1/completions", {"model": "chat", "prompt": [IDS] * MANY, "max_tokens": 1}, "choices"),
        "texts": ("/v1/embeddings", {"model": "embed", "input": [IDS] * MANY}, "data"),
    }
    path, body, answers = calls[asked]

    async def act(client: Client) -> None:
        beats.beat()
        answer = await client.ask("POST", path, body)
        assert answer.status_code == 200, answer.text[:300]
        assert len(answer.json()[answers]) == MANY

    served(act, {"chat": tiny_generator, "embed": tiny_embedder})
    assert beats.total["submitted"] == beats.total["ended"] == MANY
    assert max(beats.most["submitted"], beats.most["begun"]) <= SLICE_SIZE


def test_a_call_whose_client_leaves_is_given_up_in_slices(
    beats: Beats, tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(client: Client) -> None:
        monkeypatch.setattr(Engine, "_run_step", lambda self: False)  # nothing is computed meanwhile
        beats.beat()
        body = {"model": "chat", "prompt": [IDS] * MANY, "max_tokens": 1}
        asked = asyncio.create_task(client.ask("POST", "/v1/completions", body))
        await until(lambda: beats.total["submitted"] == MANY, 60)
        asked.cancel()
        await until(lambda: beats.total["ended"] == MANY, 60)
        assert float(await client.metric('polyhead_requests_total{model="chat",outcome="aborted"')) == MANY
        assert float(await client.metric("polyhead_tokens_in_flight")) == 0

    served(act, {"chat": tiny_generator})
    assert max(beats.most.values()) <= SLICE_SIZE


def test_the_engine_takes_a_slice_between_two_steps(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = [0]
    turn, submit = Engine._run_step, GeneratorWorker.submit

    def turned(self: Engine) -> bool:
        taken.append(0)
        return turn(self)

    def noted(function: Callable[..., None]) -> Callable[..., None]:
        def note(*given: Any) -> None:
            taken[-1] += 1
            function(*given)

        return note

    async def act(client: Client) -> None:
        monkeypatch.setattr(Engine, "_run_step", turned)
        monkeypatch.setattr(GeneratorWorker, "submit", noted(submit))
        body = {"model": "chat", "prompt": [IDS] * MANY, "max_tokens": 200, "ignore_eos": True}
        asked = asyncio.create_task(client.ask("POST", "/v1/completions", body))
        await until(lambda: sum(taken) >= MANY, 60)
        asked.cancel()

    served(act, {"chat": tiny_generator})
    assert max(taken) <= engine_module.INBOX_LIMIT + SLICE_SIZE


# Deadlines, while texts are made tokens


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A clock that goes on by a second whenever texts are tokenised."""
    now = SimpleNamespace(seconds=0.0, texts=0, perf_counter=lambda: now.seconds)
    real = Tokenizer.encode_batch

    def encode_batch(self: Tokenizer, texts: Sequence[Any], **options: Any) -> Any:
        now.seconds += 1.0
        now.texts += len(texts)
        return real(self, texts, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
    monkeypatch.setattr(text_module, "time", now)
    return now


def test_prompts_are_tokenised_until_the_deadline(clock: SimpleNamespace, tiny_generator: Path) -> None:
    talker, job = scripted_model(tiny_generator, "talker", "generate"), TokenizerJob("prompt", 0, Terms(deadline=5.0))
    clock.seconds = clock.texts = 0
    many = GenerationRequest(field="prompt", prompts=("a fox",) * MANY, sampling=Sampling())
    with pytest.raises(Expired, match="while the text was being made tokens"):
        read_prompts(talker, many, "call", DEFAULT_TERMS, job.check)
    assert clock.texts == 5


def test_texts_are_tokenised_until_the_deadline(clock: SimpleNamespace, tiny_embedder: Path) -> None:
    embedder, job = scripted_model(tiny_embedder, "embedder", "embed"), TokenizerJob("input", 0, Terms(deadline=5.0))
    clock.seconds = clock.texts = 0
    with pytest.raises(Expired):
        read_inputs(
            embedder, EncodingRequest(field="input", inputs=("a fox",) * MANY), "call", DEFAULT_TERMS, job.check
        )
    assert clock.texts == 5 * TEXTS_PER_CHECK


def test_nothing_is_tokenised_for_a_client_that_has_left(clock: SimpleNamespace, tiny_generator: Path) -> None:
    talker, job = scripted_model(tiny_generator, "talker", "generate"), TokenizerJob("prompt", 0, DEFAULT_TERMS)
    clock.seconds = clock.texts = 0
    prompts = ("a fox",) * MANY

    def check() -> None:
        job.is_abandoned = clock.texts == 7
        job.check()

    with pytest.raises(Expired):
        read_prompts(
            talker,
            GenerationRequest(field="prompt", prompts=prompts, sampling=Sampling()),
            "call",
            DEFAULT_TERMS,
            check,
        )
    assert clock.texts == 7


def test_a_client_that_leaves_stops_the_tokenizer(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in its own thread, in the middle of a call."""
    jobs: list[TokenizerJob] = []
    real, talker = TokenizerJob.__init__, scripted_model(tiny_generator, "talker", "generate")

    def noted(self: TokenizerJob, *given: Any, **named: Any) -> None:
        real(self, *given, **named)
        jobs.append(self)

    async def run() -> None:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        encode = Tokenizer.encode_batch

        def encode_batch(self: Tokenizer, texts: Sequence[Any], **options: Any) -> Any:
            loop.call_soon_threadsafe(begun.set)
            while not jobs[0].is_abandoned:
                pass
            return encode(self, texts, **options)

        monkeypatch.setattr(TokenizerJob, "__init__", noted)
        monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
        registry = Registry([talker], echo)
        connection = Connection("/v1/completions", orjson.dumps({"model": "talker", "prompt": ["a fox"] * 9}))
        visit = asyncio.create_task(connection.run(application(registry)))
        await asyncio.wait_for(begun.wait(), 20)
        connection.drop()
        await asyncio.wait_for(visit, 20)
        assert not registry.requests

    asyncio.run(run())
    assert jobs[0].is_abandoned


# All of one call, or none


class Refusing(Registry):
    """Takes so many requests, then none."""

    def __init__(self, talker: Model, most: int) -> None:
        super().__init__([talker], lambda *_: [WAIT])
        self.most = most

    def submit(self, model: Model, requests: Sequence[Request]) -> list[Source]:
        if len(self.requests) + len(requests) > self.most:
            raise Unavailable("it is being unloaded")
        return super().submit(model, requests)


def asked(count: int) -> list[Request]:
    return [replace(generate(IDS), id=f"call-{number}") for number in range(count)]


def submitted(registry: Registry, visit: RequestContext, **settings: Any) -> tuple[AppState, Any]:
    server = cast(AppState, application(registry, **settings).state.server)
    [talker] = registry.models()
    return server, server.submit_in_slices(visit, talker, asked(MANY))


@pytest.fixture
def talker(tiny_generator: Path) -> Model:
    return scripted_model(tiny_generator, "talker", "generate")


def test_where_a_later_slice_is_refused_the_earlier_are_aborted(talker: Model) -> None:
    async def run() -> None:
        registry = Refusing(talker, 3 * SLICE_SIZE)
        server, call = submitted(registry, RequestContext("id"))
        with pytest.raises(Unavailable):
            await call
        await until(lambda: all(source.aborted for source in registry.sources))
        assert len(registry.sources) == 3 * SLICE_SIZE
        assert server.admission._total.reserved_tokens == 0

    asyncio.run(run())


@pytest.mark.parametrize("why", ["deadline", "left"])
def test_a_deadline_or_a_client_that_leaves_ends_the_submitting(talker: Model, why: str) -> None:
    class Hurried(RequestContext):
        def check_deadline(self) -> None:
            if why == "deadline" and len(registry.requests) >= 2 * SLICE_SIZE:
                raise self.deadline_error()

    async def run() -> None:
        server, call = submitted(registry, Hurried("id"))
        task = asyncio.create_task(call)
        if why == "left":
            while len(registry.requests) < 2 * SLICE_SIZE:
                await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(Expired if why == "deadline" else asyncio.CancelledError):
            await task
        await until(lambda: all(source.aborted for source in registry.sources))
        assert 2 * SLICE_SIZE <= len(registry.sources) < MANY
        assert server.admission._total.reserved_tokens == 0

    registry = Registry([talker], lambda *_: [WAIT])
    asyncio.run(run())


def test_the_room_of_a_call_is_its_own_while_it_is_submitted(talker: Model) -> None:
    async def run() -> None:
        registry = Registry([talker], lambda *_: [WAIT])
        server, call = submitted(registry, RequestContext("id"), max_tokens_in_flight=MANY * len(IDS))
        task = asyncio.create_task(call)
        while not registry.requests:
            await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            server.submit(RequestContext("other"), talker, asked(2 * SLICE_SIZE))
        assert len(await task) == MANY
        assert server.admission._total.reserved_tokens == 0

    asyncio.run(run())


def test_a_call_without_room_is_refused_whole(talker: Model) -> None:
    async def run() -> None:
        registry = Registry([talker], lambda *_: [WAIT])
        server, call = submitted(registry, RequestContext("id"), max_tokens_in_flight=MANY)
        cast(Any, server.engine).tokens = 1
        with pytest.raises(Overloaded):
            await call
        assert not registry.requests

    asyncio.run(run())


def test_a_group_is_submitted_at_once() -> None:
    groups = [f"g{number // 3}" if number % 9 < 6 else "" for number in range(MANY)]
    requests = [replace(one, group=group) for one, group in zip(asked(MANY), groups, strict=True)]
    slices = [list(some) for some in split_requests(requests)]
    assert [request for some in slices for request in some] == requests
    assert all(SLICE_SIZE <= len(some) < SLICE_SIZE + 3 for some in slices[:-1])
    ends = [(some[-1].group, after[0].group) for some, after in pairwise(slices)]
    assert all(last != first or not last for last, first in ends)


def test_long_prompts_are_submitted_in_slices_and_the_prompt_of_a_group_counts_once() -> None:
    long = tuple(range(SLICE_TOKENS // 2))
    requests = [replace(one, tokens=long, group=f"g{number // 8}") for number, one in enumerate(asked(32))]
    slices = [list(some) for some in split_requests(requests)]
    assert [request for some in slices for request in some] == requests
    assert [{request.group for request in some} for some in slices] == [{"g0", "g1"}, {"g2", "g3"}]


# The pieces


def link() -> StreamContext:
    return StreamContext("m", "generate", lambda *_: None, lambda _: None, lambda _: None, lambda _: None)


def test_streams_of_one_deadline_have_one_timer() -> None:
    async def run() -> None:
        one, ends = link(), list[int]()
        deadline = text_module.time.perf_counter() + 0.01
        streams = [Stream(generate(IDS, terms=Terms(deadline=deadline)), one) for _ in range(MANY)]
        endless = Stream(generate(IDS), one)
        for stream in (*streams, endless):
            stream.start()
        assert len(one.timers) == 1
        streams[0].close()
        while any(stream.is_open for stream in streams):
            await asyncio.sleep(0)
            ends.append(sum(not stream.is_open for stream in streams))
        assert max(after - before for before, after in pairwise(ends)) <= SLICE_SIZE
        assert endless.is_open
        assert len(one.timers) == 0
        streams[0].start()  # it has ended, and is watched no more
        assert len(one.timers) == 0

    asyncio.run(run())


def test_slices() -> None:
    assert [list(some) for some in split_in_slices([1, 2, 3, 4, 5], 2)] == [[1, 2], [3, 4], [5]]
    done: list[int] = []

    async def run() -> None:
        assert [item async for item in iterate_in_slices(range(7), 3)] == list(range(7))
        call_in_slices(done.append, range(7), 3)
        assert done == [0, 1, 2]
        await asyncio.sleep(0)
        assert done == [0, 1, 2, 3, 4, 5]
        await asyncio.sleep(0)

    asyncio.run(run())
    assert done == list(range(7))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=60,
)


@given(JSON)
def test_json_in_parts_is_the_same_json(value: Any) -> None:
    assert dumps_sliced(value) == orjson.dumps(value)


def test_so_are_numbers_and_long_lists() -> None:
    rows = np.arange(30_000, dtype=np.float32).reshape(100, 300) / 7
    for value in (
        rows,
        list(rows),
        [rows, rows[:2]],
        list(range(20_000)),
        {"data": [{"index": index, "embedding": row} for index, row in enumerate(rows)], "model": 'a"b'},
        [],
        {},
    ):
        assert dumps_sliced(value) == orjson.dumps(value, option=NUMPY_OPTION)
