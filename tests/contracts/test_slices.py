"""A call with very many texts is processed in slices: other work gets its turn, deadlines are checked, and an
aborted call is freed."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from polyhead.models.tokenizer import Tokenizer
from polyhead.service.concurrency.time_slices import SLICE_SIZE
from polyhead.service.core.errors import Expired
from polyhead.service.core.model import Model
from polyhead.service.core.request import DEFAULT_TERMS, Sampling, Terms
from polyhead.service.engine.engine import Engine
from polyhead.service.engine.event_stream import Stream
from polyhead.service.engine.generator_worker import GeneratorWorker
from polyhead.service.engine.inbox import INBOX_LIMIT
from polyhead.service.text import tokenization as text_module
from polyhead.service.text.detokenizer import Detokenizer
from polyhead.service.text.encoder_inputs import TEXTS_PER_CHECK, EncodingRequest, read_inputs
from polyhead.service.text.generation_request import GenerationRequest
from polyhead.service.text.prompts import read_prompts
from polyhead.service.text.tokenization import TokenizerJob
from tests.service.api.operations.test_admin import Client
from tests.service.api.operations.test_admin import serving as served
from tests.support.scripted import Connection, Registry, application, echo, until
from tests.support.scripted import model as scripted_model

MANY = 5 * SLICE_SIZE + 17


IDS = [5, 6, 7]


class TurnCounter:
    """The most calls of each watched function within one turn of the event loop."""

    def __init__(self) -> None:
        self.most: Counter[str] = Counter()
        self.total: Counter[str] = Counter()
        self._now: Counter[str] = Counter()

    def count(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            self._now[what] += 1
            return function(*given, **named)

        return counted

    def count_turn(self) -> None:
        """Called in every turn of the loop."""
        self.most |= self._now
        self.total += self._now
        self._now.clear()
        asyncio.get_running_loop().call_soon(self.count_turn)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> TurnCounter:
    found = TurnCounter()
    for what, owner, name in (
        ("submitted", Stream, "start"),
        ("ended", Stream, "_end"),
        ("begun", Detokenizer, "__init__"),
    ):
        monkeypatch.setattr(owner, name, found.count(what, getattr(owner, name)))
    return found


@pytest.mark.parametrize("requests_of", ["prompts", "texts"])
def test_no_turn_of_the_loop_has_more_than_a_slice(
    turns: TurnCounter, tiny_generator: Path, tiny_embedder: Path, requests_of: str
) -> None:
    calls = {
        "prompts": ("/v1/completions", {"model": "chat", "prompt": [IDS] * MANY, "max_tokens": 1}, "choices"),
        "texts": ("/v1/embeddings", {"model": "embed", "input": [IDS] * MANY}, "data"),
    }
    path, body, answers = calls[requests_of]

    async def act(client: Client) -> None:
        turns.count_turn()
        answer = await client.ask("POST", path, body)
        assert answer.status_code == 200, answer.text[:300]
        assert len(answer.json()[answers]) == MANY

    served(act, {"chat": tiny_generator, "embed": tiny_embedder})
    assert turns.total["submitted"] == turns.total["ended"] == MANY
    assert max(turns.most["submitted"], turns.most["begun"]) <= SLICE_SIZE


def test_a_call_whose_client_disconnects_is_aborted_in_slices(
    turns: TurnCounter, tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(client: Client) -> None:
        monkeypatch.setattr(Engine, "_run_step", lambda self: False)  # nothing is computed meanwhile
        turns.count_turn()
        body = {"model": "chat", "prompt": [IDS] * MANY, "max_tokens": 1}
        requests_of = asyncio.create_task(client.ask("POST", "/v1/completions", body))
        await until(lambda: turns.total["submitted"] == MANY, 60)
        requests_of.cancel()
        await until(lambda: turns.total["ended"] == MANY, 60)
        assert float(await client.metric('polyhead_requests_total{model="chat",outcome="aborted"')) == MANY
        assert float(await client.metric("polyhead_tokens_in_flight")) == 0

    served(act, {"chat": tiny_generator})
    assert max(turns.most.values()) <= SLICE_SIZE


def test_the_engine_accepts_a_slice_between_two_steps(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        requests_of = asyncio.create_task(client.ask("POST", "/v1/completions", body))
        await until(lambda: sum(taken) >= MANY, 60)
        requests_of.cancel()

    served(act, {"chat": tiny_generator})
    assert max(taken) <= INBOX_LIMIT + SLICE_SIZE


# Deadlines during tokenisation


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A clock that advances by a second at each call of the tokenizer."""
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
    generator, job = (
        scripted_model(tiny_generator, "talker", "generate"),
        TokenizerJob("prompt", 0, Terms(deadline=5.0)),
    )
    clock.seconds = clock.texts = 0
    many = GenerationRequest(field="prompt", prompts=("a fox",) * MANY, sampling=Sampling())
    with pytest.raises(Expired, match="while the text was being made tokens"):
        read_prompts(generator, many, "call", DEFAULT_TERMS, job.check)
    assert clock.texts == 5


def test_texts_are_tokenised_until_the_deadline(clock: SimpleNamespace, tiny_embedder: Path) -> None:
    embedder, job = scripted_model(tiny_embedder, "embedder", "embed"), TokenizerJob("input", 0, Terms(deadline=5.0))
    clock.seconds = clock.texts = 0
    with pytest.raises(Expired):
        read_inputs(
            embedder, EncodingRequest(field="input", inputs=("a fox",) * MANY), "call", DEFAULT_TERMS, job.check
        )
    assert clock.texts == 5 * TEXTS_PER_CHECK


def test_nothing_is_tokenised_for_a_client_that_has_disconnected(clock: SimpleNamespace, tiny_generator: Path) -> None:
    generator, job = scripted_model(tiny_generator, "talker", "generate"), TokenizerJob("prompt", 0, DEFAULT_TERMS)
    clock.seconds = clock.texts = 0
    prompts = ("a fox",) * MANY

    def check() -> None:
        job.is_abandoned = clock.texts == 7
        job.check()

    with pytest.raises(Expired):
        read_prompts(
            generator,
            GenerationRequest(field="prompt", prompts=prompts, sampling=Sampling()),
            "call",
            DEFAULT_TERMS,
            check,
        )
    assert clock.texts == 7


def test_a_client_that_disconnects_stops_the_tokenizer(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer runs on its own thread, in the middle of a call."""
    jobs: list[TokenizerJob] = []
    real, generator = TokenizerJob.__init__, scripted_model(tiny_generator, "talker", "generate")

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
        registry = Registry([generator], echo)
        connection = Connection("/v1/completions", orjson.dumps({"model": "talker", "prompt": ["a fox"] * 9}))
        visit = asyncio.create_task(connection.run(application(registry)))
        await asyncio.wait_for(begun.wait(), 20)
        connection.drop()
        await asyncio.wait_for(visit, 20)
        assert not registry.requests

    asyncio.run(run())
    assert jobs[0].is_abandoned


@pytest.fixture
def generator(tiny_generator: Path) -> Model:
    return scripted_model(tiny_generator, "talker", "generate")
