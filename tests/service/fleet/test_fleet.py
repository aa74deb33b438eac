"""Many replicas behind one address: the answers are those of one server, and a fault of one replica does not affect
the others."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from polyhead.service.api.access.app_state import AppState
from polyhead.service.config.settings import Settings
from polyhead.service.core.errors import BadRequest, PolyheadError
from polyhead.service.core.grammar import Grammar
from polyhead.service.core.guide import Guide, GuideSpec
from polyhead.service.core.model import Model
from polyhead.service.core.request import (
    Done,
    Encode,
    Event,
    Failed,
    Generate,
    GeneratedToken,
    PromptScores,
    Sampling,
)
from polyhead.service.engine.block_allocator import block_keys
from polyhead.service.engine.event_stream import Stream
from polyhead.service.fleet import fleet_engine, replica_connection
from polyhead.service.fleet import replica as replica_module
from polyhead.service.fleet.fleet_engine import Fleet
from polyhead.service.fleet.frames import compute_proof, digest_bytes, encode_frame, pack, pack_model
from polyhead.service.fleet.ingress import assemble_ingress
from polyhead.service.fleet.replica import Replica
from polyhead.service.fleet.replica_connection import ConnectionContext
from polyhead.service.server import assembly as serve
from tests.support import decision_models
from tests.support.processes import Page
from tests.support.scripted import routes

SECRET = "a secret of the tests"
HOST = "127.0.0.1"
GREEDY = Sampling(temperature=0)


Act = Callable[["Scene"], Awaitable[None]]


@dataclass
class Scene:
    """An ingress, its replicas, and a client of its routes."""

    app: FastAPI
    fleet: Fleet
    replicas: list[Replica]
    addresses: dict[str, tuple[str, int]]
    http: httpx.AsyncClient
    model: Model = field(init=False)  # of the last request

    def list(self, *names: str) -> None:
        self.fleet.update_replicas("all", {name: self.addresses[name] for name in names or self.addresses})

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(120):
            while not condition():
                await asyncio.sleep(0.01)

    async def start(self, name: str, settings: Settings, secret: str = SECRET) -> Replica:
        replica = Replica(settings, name, secret)
        self.addresses[name] = HOST, await replica.start(HOST)
        self.replicas.append(replica)
        return replica

    async def kill(self, replica: Replica) -> None:
        """End it like a killed process: every connection breaks."""
        replica._listener.close()
        for visitor in list(replica._connections):
            visitor._writer.transport.abort()
        await asyncio.sleep(0)

    def generate(self, prompt: Sequence[int], most: int, **named: Any) -> Stream:
        [self.model] = [model for model in self.fleet.models() if model.name == "chat"]
        model = self.model
        request = Generate("asked", tuple(prompt), most, sampling=GREEDY, **named)
        return self.fleet.submit(model, [request])[0]

    async def page(self) -> str:
        return (await self.http.get("/metrics")).text


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver", timeout=60) as http:
        yield http


@asynccontextmanager
async def scene(settings: Settings, count: int, those: Sequence[str] = ()) -> AsyncIterator[Scene]:
    async def find(_: Fleet) -> None:
        """The test lists the replicas."""

    app = assemble_ingress(settings, SECRET, find)
    server: AppState = app.state.server
    fleet = server.registry
    assert isinstance(fleet, Fleet)
    replicas: list[Replica] = []
    try:
        async with app.router.lifespan_context(app), client_of(app) as http:
            here = Scene(app, fleet, replicas, {}, http)
            for number in range(count):
                await here.start(f"replica-{number}", settings)
            here.list()
            await here.until(
                lambda: all(here.fleet.replicas.ready_counts()[name] == count for name in those or settings.models)
            )
            yield here
    finally:  # after the ingress: while it is there, the last replicas wait for their successors
        await asyncio.gather(*(replica.close() for replica in replicas))


def run_scene(settings: Settings, act: Act, count: int = 2, those: Sequence[str] = ()) -> None:
    async def run() -> None:
        async with scene(settings, count, those) as here:
            await act(here)

    asyncio.run(run())


@contextmanager
def shared_scene(settings: Settings) -> Iterator[Callable[[Act], None]]:
    """Runs tests in one scene with one replica. Each of them leaves the scene as it was, which is checked."""
    with asyncio.Runner() as runner, ExitStack() as cleanup:
        context = scene(settings, 1)
        here = runner.run(context.__aenter__())
        cleanup.callback(lambda: runner.run(context.__aexit__(None, None, None)))
        yield lambda act: runner.run(act_and_rest(here, act))


async def act_and_rest(here: Scene, act: Act) -> None:
    [replica] = here.replicas
    await act(here)
    await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] == 1 and len([*here.fleet.replicas]) == 1)
    await here.until(lambda: len(replica._connections) == 1 and not replica._unauthenticated)
    await here.until(lambda: not replica.queued_tokens and not replica.engine._streams)
    assert here.fleet.tokens == 0


async def read_events(stream: Stream) -> list[Event]:
    return [event async for event in stream]


def ended(events: Sequence[Event]) -> Event:
    return events[-1]


@pytest.fixture(scope="module")
def settings(
    tiny_generator: Path, tiny_classifier: Path, tiny_embedder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Settings:
    decider = decision_models.make_variant("marks", tmp_path_factory.mktemp("deciders") / "marks")
    models = {"chat": tiny_generator, "judge": tiny_classifier, "embed": tiny_embedder, "decider": decider}
    return Settings(models={name: str(path) for name, path in models.items()}, drain_seconds=5, cache_tokens=4096)


@pytest.fixture(scope="module")
def run_shared(settings: Settings) -> Iterator[Callable[[Act], None]]:
    with shared_scene(settings) as run:
        yield run


ASKED: list[tuple[str, Any]] = [
    ("/v1/completions", {"model": "chat", "prompt": "The fox", "max_tokens": 12, "temperature": 0}),
    ("/v1/completions", {"model": "chat", "prompt": ["a", "b c"], "max_tokens": 5, "n": 2, "seed": 3, "logprobs": 2}),
    ("/v1/completions", {"model": "chat", "prompt": "x", "max_tokens": 9, "stream": True, "temperature": 0}),
    ("/v1/completions", {"model": "chat", "prompt": "The", "max_tokens": 4, "echo": True, "logprobs": 1, "seed": 1}),
    ("/v1/completions", {"model": "chat", "prompt": "x" * 900, "max_tokens": 4}),
    (
        "/v1/completions",
        {
            "model": "chat",
            "prompt": "The",
            "max_tokens": 4,
            "echo": True,
            "logprobs": 1,
            "n": 2,
            "use_beam_search": True,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "chat",
            "messages": [{"role": "user", "content": "Paris?"}],
            "max_tokens": 20,
            "temperature": 0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "boolean"}, "strict": True},
            },
        },
    ),
    ("/models/judge/predict", {"inputs": "A good film."}),
    ("/v1/embeddings", {"model": "embed", "input": ["A good film.", "dull"] * 5}),
    ("/v1/explain", {"model": "judge", "input": "A good film.", "method": "attention"}),
    ("/v1/explain", {"model": "chat", "input": "The fox", "method": "gradient_x_input"}),
    (
        "/v1/systemone",
        {
            "model": "decider",
            "state": "a dog runs",
            "questions": {
                "fast": {"type": "score", "instructions": "how", "criteria": ["a", "b"], "explain": {"steps": 5}}
            },
        },
    ),
]
UNIQUE_PARTS = ("id", "created", "request_id", "seconds")  # parts of an answer that no two answers have in common


def reproducible_part(said: Any) -> Any:
    """The parts of an answer that are the same at each request; numbers are rounded as far as batches change them."""
    if isinstance(said, dict):
        return {key: reproducible_part(value) for key, value in said.items() if key not in UNIQUE_PARTS}
    if isinstance(said, list):
        return [reproducible_part(value) for value in said]
    return round(said, 4) if isinstance(said, float) else said


def answered(response: httpx.Response) -> Any:
    if "event-stream" in response.headers["content-type"]:
        events = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: {")]
        return [reproducible_part(json.loads(event)) for event in events]
    return response.status_code, reproducible_part(response.json())


def test_the_answers_are_those_of_one_server(settings: Settings) -> None:
    async def alone() -> list[Any]:
        loaded = asyncio.Event()
        app = serve.assemble(settings, lambda _: loaded.set())
        async with app.router.lifespan_context(app), client_of(app) as http:
            await loaded.wait()
            return [answered(await http.post(path, json=body)) for path, body in ASKED]

    async def together(here: Scene) -> None:
        for (path, body), right in zip(ASKED, expected, strict=True):
            assert answered(await here.http.post(path, json=body)) == right, path
        assert (await here.http.get("/readyz")).json()["ready"]
        assert {model["id"] for model in (await here.http.get("/v1/models")).json()["data"]} == {*settings.models}
        await here.until(lambda: not any(replica.queued_tokens for replica in here.replicas))
        page = await here.page()
        assert 'polyhead_replicas{model="chat"} 2.0' in page
        assert 'polyhead_requests_total{model="embed",outcome="done",task="embed"} 10.0' in page
        assert page.count("polyhead_replica_queued_tokens{") == 8
        assert here.fleet.tokens == 0

    expected = asyncio.run(alone())
    assert [status for status, *_ in expected if isinstance(status, int)].count(200) == len(ASKED) - 2
    run_scene(settings, together)


def test_a_lost_replica_fails_the_answers_it_had_begun_with_one_error(settings: Settings) -> None:
    async def act(here: Scene) -> None:
        streams = [here.generate(range(3, 9 + number), 240) for number in range(6)]
        firsts = [await anext(stream) for stream in streams]
        assert all(isinstance(first, GeneratedToken) for first in firsts)
        lines = {stream: here.fleet._routed[stream].connection.name for stream in streams}
        assert len(set(lines.values())) == 2
        late = [here.generate(range(20, 30), 3) for _ in range(4)]  # none of their events has been sent
        await here.kill(here.replicas[0])
        for stream, rest in zip(streams, await asyncio.gather(*map(read_events, streams)), strict=True):
            last = rest[-1]
            if lines[stream] == "replica-0":
                assert isinstance(last, Failed)
                assert (last.error.code, last.error.status) == ("stopped", 503)
                assert "lost" in last.error.message
            else:
                assert isinstance(last, Done)
                assert last.completion_tokens == 240
        assert all(isinstance(ended(events), Done) for events in await asyncio.gather(*map(read_events, late)))
        here.list("replica-1")
        here.fleet.replicas.set_target(["chat"], 2, "")
        page = await here.page()
        assert 'polyhead_wanted_replicas{model="chat"} 2.0' in page
        [target] = (await here.http.get("/metrics/targets")).json()
        assert target["labels"]["__meta_polyhead_replica"] == "replica-1"
        async with httpx.AsyncClient() as prometheus:
            its = await prometheus.get(f"http://{target['targets'][0]}/metrics")
        assert 'polyhead_kv_blocks{model="chat"' in its.text
        assert 'polyhead_replicas{model="chat"} 1.0' in page
        assert 'polyhead_replicas_lost_total{model="chat"} 1.0' in page
        await here.start("replica-2", settings)  # capacity is back
        here.list("replica-1", "replica-2")
        await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] == 2)
        again = [here.generate(range(3, 9), 5) for _ in range(8)]
        assert len({here.fleet._routed[stream].connection.name for stream in again}) == 2
        assert all(isinstance(ended(events), Done) for events in await asyncio.gather(*map(read_events, again)))
        assert here.fleet.tokens == 0

    run_scene(settings, act)


def test_a_replica_that_is_removed_finishes_its_requests_and_gets_no_more(settings: Settings) -> None:
    async def act(here: Scene) -> None:
        streams = [here.generate(range(3, 9 + number), 200) for number in range(4)]
        for stream in streams:
            await anext(stream)
        leaving = asyncio.create_task(here.replicas[0].close())
        await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] == 1)
        more = [here.generate(range(3, 9), 4) for _ in range(6)]
        assert {here.fleet._routed[stream].connection.name for stream in more} == {"replica-1"}
        for events in await asyncio.gather(*map(read_events, [*streams, *more])):
            assert isinstance(ended(events), Done)
        await leaving
        here.replicas.pop(0)
        assert "polyhead_replicas_lost_total{" not in await here.page()

    run_scene(settings, act)


def test_a_replica_is_removed_when_its_successor_is_ready(settings: Settings) -> None:
    async def act(here: Scene) -> None:
        leaving = asyncio.create_task(here.replicas[0].close())
        await here.until(lambda: next(iter(here.fleet.replicas)).will_leave)
        here.fleet.update_replicas("all", {})  # Ray lists it too, and no other one yet
        events = await read_events(here.generate(range(3, 9), 4))
        assert isinstance(ended(events), Done)
        assert not leaving.done()
        await here.start("successor", settings)
        here.list("successor")
        await asyncio.wait_for(leaving, 120)
        here.replicas.pop(0)
        stream = here.generate(range(3, 9), 4)
        assert here.fleet._routed[stream].connection.name == "successor"
        assert isinstance(ended(await read_events(stream)), Done)
        assert "polyhead_replicas_lost_total{" not in await here.page()
        await here.until(lambda: len([*here.fleet.replicas]) == 1)

    run_scene(settings, act, count=1)


def test_an_aborted_request_is_aborted_at_its_replica(settings: Settings) -> None:
    async def act(here: Scene) -> None:
        streams = [here.generate(range(3, 9), 240) for _ in range(3)]
        await anext(streams[0])
        for stream in streams:
            stream.close()
        [replica] = here.replicas
        await here.until(lambda: replica.queued_tokens == 0 and not replica.engine.has_open_streams(None))
        assert here.fleet.tokens == 0
        its = Page(replica.server.metrics.render("")[0].decode())
        assert 0 < its.total("tokens_total", model="chat", kind="computed") < 240, "of three times as many"

    run_scene(settings, act, count=1)


def test_a_slow_reader_pauses_only_its_own_answer(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go on until the replica is informed that the reader is behind; without drafts each step has one token."""
    monkeypatch.setattr("polyhead.service.engine.event_stream.MAX_UNREAD_EVENTS", 8)

    async def act(here: Scene) -> None:
        slow = here.generate(range(3, 9), 200)
        [visitor] = here.replicas[0]._connections
        await here.until(lambda: any(stream.is_paused for stream in visitor._streams.values()))
        assert isinstance(ended(await read_events(here.generate(range(3, 9), 200))), Done)
        assert slow.is_paused
        assert slow.is_open
        assert slow.tokens < 200
        assert isinstance(ended(await read_events(slow)), Done)
        assert slow.tokens == 200

    run_scene(settings.model_copy(update={"draft_tokens": 0}), act, count=1)


def test_frames_of_a_replica_are_sent_at_once(run_shared: Callable[[Act], None]) -> None:
    """Nagle's algorithm would delay a frame until the previous one is acknowledged."""

    async def act(here: Scene) -> None:
        [visitor] = here.replicas[0]._connections
        connection = visitor._writer.get_extra_info("socket")
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run_shared(act)


def test_a_rejection_by_a_replica_keeps_its_message(run_shared: Callable[[Act], None]) -> None:
    async def act(here: Scene) -> None:
        last = ended(await read_events(here.generate([3] * 5000, 4)))
        assert isinstance(last, Failed)
        assert last.error.status == 400

    run_shared(act)


def test_without_another_replica_lost_requests_fail(settings: Settings) -> None:
    async def act(here: Scene) -> None:
        stream = here.generate(range(3, 9), 5)
        await here.kill(here.replicas[0])
        last = ended(await read_events(stream))
        assert isinstance(last, Failed)
        assert last.error.code == "stopped"
        with pytest.raises(PolyheadError, match="no replica of chat"):
            here.fleet.submit(here.model, [stream.request])
        assert 'polyhead_model_ready{model="chat"} 0.0' in await here.page()

    run_scene(settings, act, count=1)


def test_a_request_that_cannot_be_sent_fails_alone(run_shared: Callable[[Act], None]) -> None:
    async def act(here: Scene) -> None:
        last = ended(await read_events(here.generate([1 << 70], 5)))
        assert isinstance(last, Failed)
        assert last.error.status == 400
        assert isinstance(ended(await read_events(here.generate(range(3, 9), 5))), Done)

    run_shared(act)


def test_models_cannot_be_changed_at_an_ingress(settings: Settings) -> None:
    fleet = assemble_ingress(settings, SECRET, lambda _: asyncio.sleep(0)).state.server.registry
    with pytest.raises(PolyheadError, match="deploying it again"):
        fleet.load("x", "y")
    assert {state.phase for state in fleet.states().values()} == {"waiting"}
    with pytest.raises(PolyheadError, match="no replica of chat takes requests yet"):
        fleet.resolve("chat", ["generate"])
    fleet.replicas.set_target(["chat"], 1, "no folder")
    with pytest.raises(PolyheadError, match="chat could not be loaded: no folder"):
        fleet.resolve("chat", ["generate"])
    fleet.replicas.set_target(["chat"], 1, "")
    assert fleet.states()["chat"].phase == "waiting"


def test_a_pool_keeps_the_most_recently_used_models(
    tiny_classifier: Path, tiny_embedder: Path, tiny_ranker: Path, tmp_path: Path
) -> None:
    folders = {"judge": tiny_classifier, "embed": tiny_embedder, "rank": tiny_ranker, "gone": tmp_path / "gone"}
    models = {name: str(path) for name, path in folders.items()}
    settings = Settings(models=models, pools={"small": list(models)}, pool_models=2, drain_seconds=1)

    async def act(here: Scene) -> None:
        pool = here.replicas[0].pool
        assert pool is not None
        assert pool.loaded_names == ("embed", "rank"), "each was loaded once, and the first was unloaded"
        half = asyncio.create_task(pool.load_model("judge"))
        await asyncio.sleep(0)
        assert (await pool.load_model("rank")).name == "rank", "a loaded model waited for one that was loading"
        assert not half.done()
        half.cancel()  # its client has disconnected, and the change goes on
        first = answered(await here.http.post("/models/judge/predict", json={"inputs": "A good film."}))
        assert first[0] == 200
        assert pool.loaded_names == ("rank", "judge")
        await here.until(lambda: next(iter(here.fleet.replicas)).loaded_names == pool.loaded_names)
        asked = [
            here.http.post("/models/judge/predict", json={"inputs": "A good film."}),
            here.http.post("/v1/embeddings", json={"model": "embed", "input": "A good film."}),
            here.http.post("/v1/rerank", json={"model": "rank", "query": "a", "documents": ["b"]}),
        ]
        answers = [answered(answer) for answer in await asyncio.gather(*asked)]
        assert [status for status, _ in answers] == [200] * 3
        assert answers[0] == first
        assert len(pool.loaded_names) == 2
        broken = await here.http.get("/readyz")
        assert broken.json()["models"]["gone"]["state"] == "broken"
        assert "no such folder" in broken.json()["models"]["gone"]["error"]

    run_scene(settings, act, count=1, those=("judge", "embed", "rank"))


def test_a_connection_survives_an_unknown_frame(run_shared: Callable[[Act], None]) -> None:
    async def act(here: Scene) -> None:
        [replica] = here.replicas
        for nonsense in (("hello", 1), ("dance",), 7):
            [visitor] = replica._connections
            visitor._writer.write(encode_frame(nonsense))
            await here.until(lambda before=visitor: before not in replica._connections)
            await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] == 1)
        assert isinstance(ended(await read_events(here.generate(range(3, 9), 4))), Done)

    run_shared(act)


def test_a_connection_survives_an_answer_to_a_cancelled_request(run_shared: Callable[[Act], None]) -> None:
    async def act(here: Scene) -> None:
        line = next(iter(here.fleet.replicas))
        asking = asyncio.create_task(line.call("watch", "chat"))
        await asyncio.sleep(0)
        asking.cancel()
        line._disconnect()
        await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] == 1)
        assert isinstance(ended(await read_events(here.generate(range(3, 9), 4))), Done)

    run_shared(act)


def test_an_idle_replica_that_is_lost_is_counted(settings: Settings) -> None:
    async def act(here: Scene) -> None:
        await here.kill(here.replicas[0])
        await here.until(lambda: not here.fleet.replicas.ready_counts()["chat"])
        assert 'polyhead_replicas_lost_total{model="chat"} 1.0' in await here.page()

    run_scene(settings, act, count=1)


def test_clients_without_the_secret_are_disconnected(
    run_shared: Callable[[Act], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def act(here: Scene) -> None:
        port = here.addresses["replica-0"][1]
        for words in (
            bytes(64),
            b"x" * 32 + compute_proof("another", "asks", bytes(32)),
            encode_frame(("ask", "chat", 0, ())),
        ):
            reader, writer = await asyncio.open_connection(HOST, port)
            nonce = await reader.readexactly(32)
            assert len(set(nonce)) > 1
            writer.write(words)
            writer.write_eof()
            assert await reader.read() == b"", "a client without the secret got an answer"
            writer.close()
        assert len(here.replicas[0]._connections) == 1

    run_shared(act)
    assert 1 <= caplog.text.count("a connection without the secret is closed") <= 3, "one line a second"


def test_every_page_of_a_replica_has_what_it_needs(
    run_shared: Callable[[Act], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def act(here: Scene) -> None:
        replica = here.replicas[0]
        server = replica._http_server
        paths = {route.path for route in routes(server.app)}
        assert {"/livez", "/readyz", "/metrics"} <= paths
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{replica._http_port}") as http:
            for path in (*paths, "/metrics/history", "/metrics/errors"):
                answer = await http.get(path)
                assert answer.status_code == (200 if path in paths else 404), path

    run_shared(act)
    assert "Traceback" not in caplog.text


def test_a_replicas_own_pages_check_the_host_and_the_key(settings: Settings, tmp_path: Path) -> None:
    digest = sha256(b"of a scraper").hexdigest()
    (tmp_path / "keys.yaml").write_text(f"scraper: {{hash: 'sha256:{digest}', scopes: [metrics]}}")
    given = {"keys_file": str(tmp_path / "keys.yaml"), "metrics_access": "key", "api_key": SecretStr("of a client")}
    replica = Replica(settings.model_copy(update={**given, "api_keys": {}}), "replica-0", SECRET)

    async def run() -> None:
        await replica.start(HOST)
        try:
            async with httpx.AsyncClient(base_url=f"http://{HOST}:{replica._http_port}") as http:
                asked = [
                    ("/readyz", {}, 200),
                    ("/readyz", {"Host": "rebound.example"}, 421),
                    ("/readyz", {"Origin": "http://page.example"}, 403),
                    ("/metrics", {}, 401),
                    ("/metrics", {"Authorization": "Bearer another"}, 401),
                    ("/metrics", {"Authorization": "Bearer of a scraper"}, 200),
                    ("/metrics", {"Authorization": "Bearer of a client"}, 200),
                    ("/v1/models", {"Authorization": "Bearer of a scraper"}, 403),
                ]
                for path, headers, status in asked:
                    answer = await http.get(path, headers=headers)
                    assert answer.status_code == status, (path, headers, answer.text)
                    assert status == 200 or answer.json()["error"]["message"]
        finally:
            await replica.close()

    asyncio.run(run())


class Packed:
    """Counts the tokens of the requests and the bytes of the frames that an ingress sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, here: Scene) -> None:
        self.frames, self.hashed = list[bytes](), list[int]()
        real = block_keys

        def counted(parent: bytes, tokens: Sequence[int], size: int) -> list[bytes]:
            self.hashed.append(len(tokens))
            return real(parent, tokens, size)

        monkeypatch.setattr("polyhead.service.fleet.fleet_engine.block_keys", counted)
        for connection in here.fleet.replicas:
            monkeypatch.setattr(connection, "send_frame", self.sender(connection.send_frame))

    def sender(self, send: Callable[[bytes], None]) -> Callable[[bytes], None]:
        def counted(frame: bytes) -> None:
            self.frames.append(frame)
            send(frame)

        return counted


ANSWERS = 64


def grouped(here: Scene, tokens: tuple[int, ...], group: str = "g", **named: Any) -> list[Generate]:
    """Requests as for one prompt and `n` answers."""
    [here.model] = [model for model in here.fleet.models() if model.name == "chat"]
    sampled = [Sampling(temperature=1.0, seed=number, bias=((5, 1.0),)) for number in range(ANSWERS)]
    return [
        Generate(f"{group}-{number}", tokens, 3, sampling=each, group=group, **named)
        for number, each in enumerate(sampled)
    ]


def test_the_prompt_of_a_group_is_hashed_and_sent_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are those of requests that are sent whole, one by one."""
    prompt = tuple(number % 200 + 3 for number in range(100))

    async def act(here: Scene) -> None:
        requests = grouped(here, prompt)
        alone = [
            await read_events(here.fleet.submit(here.model, [replace(request, group="")])[0]) for request in requests
        ]
        packed = Packed(monkeypatch, here)
        streams = here.fleet.submit(here.model, requests)
        connections = {here.fleet._routed[stream].connection.name for stream in streams}
        assert len(connections) == 1
        assert packed.hashed == [len(prompt)]
        [frame] = packed.frames
        assert frame.count(pack(prompt)) == 1
        assert len(frame) < ANSWERS * 40 + 1000
        together = [await read_events(stream) for stream in streams]
        tokens = [[event.id for event in events if isinstance(event, GeneratedToken)] for events in together]
        assert tokens == [[event.id for event in events if isinstance(event, GeneratedToken)] for events in alone]
        assert len({tuple(each) for each in tokens}) > 1, "each has its own seed"
        assert here.fleet.tokens == 0
        await here.until(lambda: not any(replica.queued_tokens for replica in here.replicas))

    run_scene(settings, act)


def test_options_of_a_call_are_sent_once(run_shared: Callable[[Act], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a grammar of 60 KB would be a gigabyte for 16,000 prompts, and the replica would count as lost."""
    count, received = 1000, list[Any]()
    monkeypatch.setattr(fleet_engine, "FRAME_TOKENS", fleet_engine.ROW_TOKENS * count // 2)
    guide = cast(Guide, GuideSpec(Grammar("regex", "c" * 10_000, "guided_regex"), None))
    sampling = Sampling(temperature=1.0, bias=tuple((token, 1.0) for token in range(100)))
    prompts = [(number % 200 + 3, number % 7 + 3) for number in range(count)]
    generates = [
        Generate(f"g-{number}", prompt, 3, sampling=replace(sampling, seed=number), guide=guide)
        for number, prompt in enumerate(prompts)
    ]
    encodes = [Encode(f"e-{number}", prompt, targets=tuple(range(1000))) for number, prompt in enumerate(prompts)]

    def reject(_: Model, requests: Sequence[Any]) -> None:
        received.extend(requests)
        raise BadRequest("not now")

    async def as_sent(_: Any, _model: Model, request: Any) -> Any:
        return request

    async def act(here: Scene) -> None:
        [here.model] = [model for model in here.fleet.models() if model.name == "chat"]
        monkeypatch.setattr(here.replicas[0].registry, "submit", reject)
        monkeypatch.setattr(replica_module.IngressConnection, "_with_guide", as_sent)
        packed = Packed(monkeypatch, here)
        for requests in (generates, encodes):
            for stream in here.fleet.submit(here.model, requests):
                assert isinstance(ended(await read_events(stream)), Failed)
        assert received == [*generates, *encodes]
        frames = b"".join(packed.frames)
        assert 1 < frames.count(b"c" * 10_000) < 4, "once in each half"
        assert len(frames) < 2 * count * 40 + 6 * 12_000
        monkeypatch.undo()

    run_shared(act)


def test_requests_of_a_group_that_differ_otherwise_are_sent_whole(run_shared: Callable[[Act], None]) -> None:
    async def act(here: Scene) -> None:
        first, *others = grouped(here, tuple(range(3, 40)))
        streams = here.fleet.submit(here.model, [replace(first, prompt_logprobs=1, logprobs=1), *others])
        answers = [await read_events(stream) for stream in streams]
        assert isinstance(answers[0][0], PromptScores)
        assert not any(isinstance(event, PromptScores) for events in answers[1:] for event in events)
        assert all(isinstance(ended(events), Done) for events in answers)

    run_shared(act)


def test_the_load_of_a_group_is_counted_as_before(run_shared: Callable[[Act], None]) -> None:
    """One prompt is computed, and of the other answers what is no full block."""

    async def act(here: Scene) -> None:
        prompt = tuple(range(103, 143))  # of no other test: none of it is in the cache
        [connection] = here.fleet.replicas
        requests = grouped(here, prompt)
        streams = here.fleet.submit(here.model, requests)
        rest = len(prompt) % connection.block_tokens
        uncached = [here.fleet._routed[stream].uncached_tokens for stream in streams]
        assert uncached == [len(prompt)] + [rest] * (ANSWERS - 1)
        for stream in streams:
            await read_events(stream)

    run_shared(act)


def test_a_group_of_a_lost_replica_is_sent_to_another_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(here: Scene) -> None:
        prompt = tuple(range(3, 43))
        requests = grouped(here, prompt)
        streams = here.fleet.submit(here.model, requests)
        lost = here.fleet._routed[streams[0]].connection.name
        packed = Packed(monkeypatch, here)
        await here.kill(here.replicas[int(lost[-1])])
        answers = [await read_events(stream) for stream in streams]
        assert all(isinstance(ended(events), Done) for events in answers)
        assert packed.hashed == []
        assert sum(frame.count(pack(prompt)) for frame in packed.frames) == 1

    run_scene(settings, act)


def test_a_group_that_cannot_be_sent_fails_and_the_others_do_not(run_shared: Callable[[Act], None]) -> None:
    async def act(here: Scene) -> None:
        wrong, right = grouped(here, (1 << 70,), "wrong"), grouped(here, (3, 4), "right")
        streams = here.fleet.submit(here.model, [*wrong, *right])
        answers = [ended(await read_events(stream)) for stream in streams]
        assert [type(each) for each in answers] == [Failed] * ANSWERS + [Done] * ANSWERS
        assert here.fleet.tokens == 0

    run_shared(act)


def test_a_model_is_decoded_once_on_a_thread_and_not_packed_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas of three models connect; each model is packed once by each of them."""
    decoded, packed = list[threading.Thread](), list[threading.Thread]()
    for owner, name, threads in (
        (replica_connection, "unpack_model", decoded),
        (replica_module, "pack_model", packed),
    ):
        real = getattr(owner, name)

        def noted(*given: Any, real: Any = real, threads: Any = threads) -> Any:
            threads.append(threading.current_thread())
            return real(*given)

        monkeypatch.setattr(owner, name, noted)

    async def act(here: Scene) -> None:
        for connection in here.fleet.replicas:
            connection._disconnect()
        await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] == 2)
        one, other = (connection.models["chat"] for connection in here.fleet.replicas)
        assert one is other
        assert one.created in {replica.models[0].created for replica in here.replicas}

    run_scene(settings, act)
    assert len(packed) == 2 * len(settings.models)
    assert threading.main_thread() not in {*decoded, *packed}
    assert len(decoded) == len(settings.models)  # not again when the replicas come back


def test_replicas_that_connect_together_share_one_decoding(
    run_shared: Callable[[Act], None], tiny_generator: Path
) -> None:
    async def act(here: Scene) -> None:
        [model] = [model for model in here.fleet.models() if model.name == "chat"]
        context, packed = ConnectionContext(SECRET, here.fleet), pack_model(replace(model, source="another"))
        found = await asyncio.gather(*(context.decode_model(*packed) for _ in range(5)))
        assert all(each is found[0] for each in found)
        assert context.decoding == {}
        bad = digest_bytes(b"\xc0"), b"\xc0", 0
        refused = await asyncio.gather(*(context.decode_model(*bad) for _ in range(3)), return_exceptions=True)
        assert [str(each) for each in refused] == ["the data of a model is none"] * 3
        assert context.decoding == {}

    run_shared(act)
