"""Connections of a fleet under attack: by clients without the secret, by an ingress and by a replica that send
invalid frames.

A client that does not know the secret gets no answer. A connection with invalid data is closed and opened again; the
others go on."""

import asyncio
import math
import random
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest

from polyhead.service.config.settings import Settings
from polyhead.service.core.model import Model
from polyhead.service.core.request import (
    Done,
    Encode,
    ExplainTextRequest,
    Failed,
    Generate,
    GeneratedToken,
    HeadOutput,
    Request,
    Sampling,
)
from polyhead.service.fleet import replica as replica_module
from polyhead.service.fleet import replica_connection
from polyhead.service.fleet import unauthenticated as strangers
from polyhead.service.fleet.frames import (
    CODEC_NUMBERS,
    CODECS,
    NONCE_BYTES,
    FrameError,
    RequestStarted,
    SimilarRequest,
    compute_proof,
    digest_bytes,
    encode_frame,
    pack,
    pack_model,
    unpack,
)
from polyhead.service.fleet.messages import MAX_TEXT, SMALL_FRAME_BYTES
from polyhead.service.fleet.replica_connection import (
    FAULTLESS_S,
    MAX_FAULT_RETRY_S,
    ConnectionContext,
    ReplicaConnection,
)
from tests.service.fleet.test_fleet import (
    GREEDY,
    HOST,
    SECRET,
    Act,
    Scene,
    ended,
    read_events,
    run_scene,
    shared_scene,
)
from tests.service.fleet.test_messages import read_frame

Talk = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def settings(tiny_generator: Path, tiny_classifier: Path) -> Settings:
    models = {"chat": str(tiny_generator), "judge": str(tiny_classifier)}
    return Settings(models=models, drain_seconds=5, cache_tokens=4096)


@pytest.fixture(scope="module")
def run_shared(settings: Settings) -> Iterator[Callable[[Act], None]]:
    with shared_scene(settings) as run:
        yield run


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingress connects again at once after an invalid frame."""
    monkeypatch.setattr(replica_connection, "MIN_FAULT_RETRY_S", 0.01)


async def connect_to(here: Scene, name: str = "replica-0") -> Talk:
    return await asyncio.open_connection(*here.addresses[name])


async def connect_with_secret(here: Scene) -> Talk:
    """A connection after the handshake and the replica's hello."""
    reader, writer = await connect_to(here)
    nonce = await reader.readexactly(NONCE_BYTES)
    writer.write(bytes(NONCE_BYTES) + compute_proof(SECRET, "asks", nonce))
    assert await reader.readexactly(NONCE_BYTES) == compute_proof(SECRET, "answers", bytes(NONCE_BYTES))
    assert (await read_frame(reader))[0] == "hello"
    return reader, writer


async def expect_no_answer(talk: Talk) -> None:
    """Nothing is sent, and the connection is closed."""
    reader, writer = talk
    with suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


async def answers(here: Scene) -> None:
    assert isinstance(ended(await read_events(here.generate(range(3, 9), 4))), Done)
    answer = await here.http.post("/models/judge/predict", json={"inputs": "A good film."})
    assert answer.status_code == 200


# Clients without the secret


def test_a_recorded_handshake_cannot_be_replayed(run_shared: Callable[[Act], None]) -> None:
    async def act(here: Scene) -> None:
        reader, writer = await connect_to(here)
        nonce = await reader.readexactly(NONCE_BYTES)
        recorded = bytes(NONCE_BYTES) + compute_proof(SECRET, "asks", nonce) + encode_frame(("watch", 1, "chat"))
        writer.write(recorded)
        assert await reader.readexactly(NONCE_BYTES) == compute_proof(SECRET, "answers", bytes(NONCE_BYTES))
        writer.close()
        for _ in range(3):
            reader, writer = await connect_to(here)
            assert await reader.readexactly(NONCE_BYTES) != nonce
            writer.write(recorded)
            await expect_no_answer((reader, writer))
        await answers(here)

    run_shared(act)


def test_a_proof_of_one_side_is_not_accepted_from_the_other(run_shared: Callable[[Act], None]) -> None:
    """A replica's own nonce and proofs, sent back to it over the same and over another connection."""

    async def act(here: Scene) -> None:
        first, second = await connect_to(here), await connect_to(here)
        nonces = [await reader.readexactly(NONCE_BYTES) for reader, _ in (first, second)]
        first[1].write(nonces[0] + compute_proof(SECRET, "answers", nonces[0]))
        second[1].write(nonces[0] + nonces[1])
        await expect_no_answer(first)
        await expect_no_answer(second)
        await answers(here)

    run_shared(act)


@pytest.mark.parametrize("secret", ["", SECRET[:-1], SECRET + " ", SECRET.upper()])
def test_a_wrong_secret_gets_no_answer(run_shared: Callable[[Act], None], secret: str) -> None:
    async def act(here: Scene) -> None:
        reader, writer = await connect_to(here)
        nonce = await reader.readexactly(NONCE_BYTES)
        writer.write(bytes(NONCE_BYTES) + compute_proof(secret, "asks", nonce) + encode_frame(("watch", 1, "chat")))
        await expect_no_answer((reader, writer))
        assert len(here.replicas[0]._connections) == 1

    run_shared(act)


def test_a_truncated_or_changed_handshake_gets_no_answer(run_shared: Callable[[Act], None]) -> None:
    """At every byte; only a flipped bit of the client's own nonce is valid."""

    async def act(here: Scene) -> None:
        async def attack(spoil: Callable[[bytes], bytes]) -> None:
            reader, writer = await connect_to(here)
            nonce = await reader.readexactly(NONCE_BYTES)
            writer.write(spoil(bytes(NONCE_BYTES) + compute_proof(SECRET, "asks", nonce)))
            writer.write_eof()
            await expect_no_answer((reader, writer))

        def flip(data: bytes, place: int) -> bytes:
            return data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]

        await asyncio.gather(*(attack(lambda whole, n=n: whole[:n]) for n in range(2 * NONCE_BYTES)))
        await asyncio.gather(*(attack(lambda whole, n=n: flip(whole, n)) for n in range(NONCE_BYTES, 2 * NONCE_BYTES)))
        await answers(here)
        assert len(here.replicas[0]._connections) == 1

    run_shared(act)


def test_a_flood_of_half_open_connections_does_not_block_the_ingress(run_shared: Callable[[Act], None]) -> None:
    async def act(here: Scene) -> None:
        flood = [await connect_to(here) for _ in range(3 * strangers.MAX_UNAUTHENTICATED)]
        for _, writer in flood[::2]:
            writer.write(b"x" * NONCE_BYTES)  # half a handshake
        await here.until(lambda: len(here.replicas[0]._unauthenticated) == strangers.MAX_UNAUTHENTICATED)
        for line in here.fleet.replicas:  # and the ingress has to connect again
            line._disconnect()
        await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] == 1)
        await answers(here)
        assert len(here.replicas[0]._unauthenticated) <= strangers.MAX_UNAUTHENTICATED
        for _, writer in flood:
            writer.close()

    run_shared(act)


def test_a_burst_leaves_no_more_connections_open_than_the_bound(
    run_shared: Callable[[Act], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All connect before a task of the first connection runs, so each has to be counted as closed at once."""
    monkeypatch.setattr(replica_module, "AUTHENTICATION_TIMEOUT_S", 600)
    count = 6 * strangers.MAX_UNAUTHENTICATED

    async def closed(connection: socket.socket) -> None:
        with suppress(ConnectionError):
            while await asyncio.get_running_loop().sock_recv(connection, NONCE_BYTES):
                pass

    async def act(here: Scene) -> None:
        with ExitStack() as connections:
            burst = [connections.enter_context(socket.socket()) for _ in range(count)]
            for connection in burst:
                connection.setblocking(False)
                with suppress(BlockingIOError):
                    connection.connect(here.addresses["replica-0"])
            ends = [asyncio.create_task(closed(connection)) for connection in burst]
            await here.until(lambda: sum(end.done() for end in ends) == count - strangers.MAX_UNAUTHENTICATED)
            assert len(here.replicas[0]._unauthenticated) == strangers.MAX_UNAUTHENTICATED
            await connect_with_secret(here)  # one more is aborted, and one with the secret is accepted
            await here.until(lambda: sum(end.done() for end in ends) == count - strangers.MAX_UNAUTHENTICATED + 1)
            for end in ends:
                end.cancel()
        await answers(here)

    run_shared(act)


def test_a_flood_writes_one_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([100.0, 100.0, 100.1, 100.9, 101.0, 101.5, 103.0])
    waiting = strangers.UnauthenticatedConnections(clock=lambda: next(times))
    for _ in range(6):
        waiting.log_refusal(FrameError("it does not know the secret"))
    said = [record.getMessage().partition("secret; ")[2] for record in caplog.records]
    assert said == ["", "2 more since the last line", "1 more since the last line"]


def test_a_slow_handshake_ends(run_shared: Callable[[Act], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "AUTHENTICATION_TIMEOUT_S", 0.2)

    async def act(here: Scene) -> None:
        reader, writer = await connect_to(here)
        await reader.readexactly(NONCE_BYTES)
        writer.write(b"x")
        await expect_no_answer((reader, writer))
        assert not here.replicas[0]._unauthenticated

    run_shared(act)


# An ingress that sends invalid frames

GENERATE = Generate("asked", (3, 4, 5), 4, sampling=GREEDY)
ENCODE = Encode("asked", (1, 5, 6, 2))
EXPLAIN = ExplainTextRequest("asked", (3, 4, 5), "occlusion", goals=(((2, 1),),))
OWN = ("x", None, None, None, None, None)  # of a similar Generate: its id
INVALID_FRAMES: list[Any] = [
    ("ask", "chat", 0, ((7, 3, None),)),
    ("ask", "chat", 0, ((7, 3, "text"),)),
    ("ask", "chat", 0, ((7, -1, GENERATE),)),
    ("ask", "chat", 0, ((7, 1 << 40, GENERATE),)),
    ("ask", "chat", -5, ((7, 3, GENERATE),)),
    ("ask", "chat", 0, ((7, 3, GENERATE), (7, 3, GENERATE))),
    ("ask", "chat", 0, 7),
    ("ask", ["chat"], 0, ()),
    ("drop", "7", False),
    ("drop", 7),
    ("hold", None),
    ("watch", "chat", 1),
    ("left", 1),
    ("said", ()),
    ("hello",),
    (),
    7,
    None,
    {"ask": 1},
    (["ask"], 1),
    ("ask", "chat", 0, (None,) * 1_000_000),
    ("ask", "chat", 0, ((7, 3, SimilarRequest(6, 1, OWN)),)),
    ("ask", "chat", 0, ((7, 3, SimilarRequest(7, 1, OWN)),)),
    ("ask", "chat", 0, ((7, 4, ENCODE), (8, 4, SimilarRequest(7, 1, OWN)))),
    ("ask", "chat", 0, ((7, 4, EXPLAIN), (8, 4, SimilarRequest(7, 1, OWN)))),
    ("ask", "chat", 0, ((7, 3, GENERATE), (8, 3, SimilarRequest(7, 1, OWN[:-1])))),
    ("ask", "chat", 0, ((7, 3, GENERATE), (8, 3, SimilarRequest(7, 1, ("x", (1.5,), *OWN[2:]))))),
    ("ask", "chat", 0, ((7, 3, (None,) * 1_000_000),)),
    ("drop", 7, "x" * SMALL_FRAME_BYTES),
]


@pytest.mark.parametrize("frame", INVALID_FRAMES, ids=lambda frame: str(frame)[:80])
def test_a_replica_closes_a_connection_with_invalid_frames(run_shared: Callable[[Act], None], frame: Any) -> None:
    async def act(here: Scene) -> None:
        reader, writer = await connect_with_secret(here)
        writer.write(encode_frame(frame))
        await until_closed(reader)
        await answers(here)
        assert here.replicas[0].queued_tokens == 0

    run_shared(act)


async def until_closed(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(20):
        try:
            while await reader.read(1 << 16):
                pass
        except ConnectionError:
            pass


WRONG: list[Request] = [
    replace(GENERATE, tokens=(1 << 40,)),
    replace(GENERATE, tokens=(-5,)),
    replace(GENERATE, tokens=()),
    replace(GENERATE, max_tokens=-1),
    replace(GENERATE, max_tokens=1 << 60),
    replace(GENERATE, source=(1, 2)),
    replace(GENERATE, logprobs=1 << 40),
    replace(GENERATE, prompt_logprobs=1 << 40),
    replace(GENERATE, stop_tokens=frozenset({-1, 1 << 40})),
    replace(GENERATE, sampling=Sampling(temperature=math.nan)),
    replace(GENERATE, sampling=Sampling(temperature=-1, top_k=-5, top_p=-1, min_p=7, seed=-1)),
    replace(GENERATE, sampling=Sampling(bias=((1 << 40, math.nan), (-7, 1.0)))),
    replace(GENERATE, sampling=Sampling(allowed=(-9, 1 << 40))),
    replace(GENERATE, sampling=Sampling(banned=((), (-1,), (1 << 40, 2)))),
    replace(GENERATE, sampling=Sampling(no_repeat_ngram_size=-3, min_tokens=1 << 40, repetition_penalty=0.0)),
]


WRONG += [
    replace(ENCODE, tokens=(1 << 40, -1)),
    replace(ENCODE, segments=(0, 1 << 40, -1, 0)),
    replace(ENCODE, segments=(0,)),
    replace(ENCODE, rows=(-1, 1 << 40)),
    replace(ENCODE, targets=(-1, 1 << 40), top_k=1 << 40),
    replace(ENCODE, form="words"),
    replace(ENCODE, dimensions=-(1 << 40), top_k=-1),
    replace(EXPLAIN, tokens=(1 << 40,)),
    replace(EXPLAIN, goals=(((1 << 40, -(1 << 40)),),)),
    replace(EXPLAIN, goals=()),
    replace(EXPLAIN, window=0, steps=0),
    replace(EXPLAIN, baseline=1 << 40),
    replace(EXPLAIN, method="integrated_gradients", steps=0, baseline=-9),
    replace(EXPLAIN, method="attention", layers=(1 << 40,), heads=(-9,)),
    replace(EXPLAIN, kept_rows=frozenset({-1, 1 << 40}), window=-1),
    replace(EXPLAIN, label_rows=(-1, 1 << 40), text_rows=(1 << 40,)),
]


@pytest.mark.parametrize("wrong", range(len(WRONG)))
def test_an_invalid_request_fails_alone(run_shared: Callable[[Act], None], wrong: int) -> None:
    """Every ticket gets its last event."""

    async def act(here: Scene) -> None:
        reader, writer = await connect_with_secret(here)
        request = WRONG[wrong]
        if isinstance(request, ExplainTextRequest):
            writer.write(encode_frame(("watch", 1, "chat")))
            while (await read_frame(reader))[0] != "watched":
                pass
        name = "judge" if isinstance(request, Encode) else "chat"
        writer.write(encode_frame(("ask", name, 0, ((7, request.prompt_tokens, request),))))
        async with asyncio.timeout(30):
            while True:
                way, *rest = await read_frame(reader)
                if way == "said" and any(isinstance(event, Done | Failed) for _, event in rest[0]):
                    break
        await answers(here)
        assert here.replicas[0].engine.alive
        assert not here.replicas[0].failure_reasons()
        await here.until(lambda: here.replicas[0].queued_tokens == 0)

    run_shared(act)


def recorded() -> list[bytes]:
    """Frames as an ingress sends them."""
    encode = Encode("asked", (1, 5, 6, 2))
    asked = [("ask", "chat", 8, ((7, 3, GENERATE),)), ("ask", "judge", 0, ((8, 4, encode),))]
    return [
        encode_frame(words) for words in (*asked, ("hold", 7), ("resume", 7), ("drop", 7, False), ("watch", 3, "chat"))
    ]


def corrupted(data: bytes, chance: random.Random) -> bytes:
    """Truncated, with flipped bits, duplicated, or with a wrong length."""
    match chance.randrange(5):
        case 0:
            return data[: chance.randrange(len(data))]
        case 1:
            place = chance.randrange(4, len(data))
            return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]
        case 2:
            return data + data[: chance.randrange(len(data))]
        case 3:
            return struct.pack(">I", chance.randrange(1 << 32)) + data[4:]
        case _:
            body = bytearray(data[4:])
            for _ in range(chance.randrange(1, 9)):
                body[chance.randrange(len(body))] = chance.randrange(256)
            return struct.pack(">I", len(body)) + bytes(body)


def test_corrupted_frames_do_not_stop_a_replica(run_shared: Callable[[Act], None]) -> None:
    async def act(here: Scene) -> None:
        chance, [replica] = random.Random(24), here.replicas
        for _ in range(200):
            reader, writer = await connect_with_secret(here)
            frames = recorded()
            chance.shuffle(frames)
            for data in frames[: chance.randrange(1, 4)]:
                writer.write(corrupted(data, chance) if chance.random() < 0.7 else data)
            writer.write_eof()
            await until_closed(reader)
            writer.close()
        await here.until(lambda: len(replica._connections) == 1 and not replica.queued_tokens)
        await here.until(lambda: not replica.engine._streams)
        assert replica.engine.alive
        assert not replica.failure_reasons()
        await answers(here)

    run_shared(act)


# A replica that sends invalid frames


class InvalidReplica:
    """Knows the secret, sends the hello of a real replica, and then the frames of `frames`."""

    def __init__(self, hello: tuple[Any, ...], frames: Iterable[Any], secret: str = SECRET) -> None:
        self.hello, self.frames_to_send, self.secret = hello, list(frames), secret
        self.connection_count, self.asked = 0, asyncio.Event()

    async def start(self) -> tuple[str, int]:
        self.server = await asyncio.start_server(self.handle_connection, HOST)
        return self.server.sockets[0].getsockname()[:2]  # type: ignore[no-any-return]

    async def handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection_count += 1
        try:
            ours = b"y" * NONCE_BYTES
            writer.write(ours)
            theirs, shown = await reader.readexactly(NONCE_BYTES), await reader.readexactly(NONCE_BYTES)
            assert shown == compute_proof(SECRET, "asks", ours)
            writer.write(compute_proof(self.secret, "answers", theirs))
            if self.hello:
                writer.write(encode_frame(self.hello))
            for frame in self.frames_to_send:
                if callable(frame):
                    frame = frame(await read_frame(reader))
                writer.write(frame if isinstance(frame, bytes) else encode_frame(frame))
            self.asked.set()
            while await reader.read(1 << 16):
                pass
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def run_with_invalid_replica(
    run: Callable[[Act], None],
    frames: Iterable[Any],
    act: Callable[[Scene, InvalidReplica], Awaitable[None]],
    **named: Any,
) -> None:
    """Run `act` with one valid replica, that of a scene, and one that sends invalid frames."""

    async def with_both(here: Scene) -> None:
        way, version, _, seen, *rest = await here.replicas[0].hello_message()
        hello = (way, version, "invalid", seen, *rest)
        invalid = InvalidReplica(named.get("changed", lambda words: words)(hello), frames, named.get("secret", SECRET))
        here.addresses["invalid"] = await invalid.start()
        here.list()
        try:
            await act(here, invalid)
        finally:
            here.list("replica-0")
            del here.addresses["invalid"]
            invalid.server.close()

    run(with_both)


def model_in(hello: tuple[Any, ...], **changes: Any) -> Model:
    """Its first model changed."""
    changed: Model = replace(unpack(hello[4][0][1]), **changes)
    return changed


def model_of(hello: tuple[Any, ...], **changes: Any) -> tuple[Any, ...]:
    """Its first model changed, under a hash that was not read before."""
    return (*hello[:4], (pack_model(model_in(hello, **changes)), *hello[4][1:]), *hello[5:])


def deep(levels: int) -> bytes:
    data = pack(1)
    for _ in range(levels):
        data = msgpack.packb(msgpack.ExtType(CODEC_NUMBERS[frozenset], msgpack.packb([0])[:1] + data))
    return struct.pack(">I", len(data)) + data


WRONG_VALUES: list[Any] = [
    ("load", -(1 << 60), (), None),
    ("load", "few", (), None),
    ("load", 1, 7, None),
    ("load", 1, (), 7),
    ("said", ((1, 2, 3),)),
    ("said", 7),
    ("said",),
    ("watched", 1, object),
    ("watched", "x", {}),
    ("leaving", 1),
    ("ask", "chat", 0, ()),
    ("hello",),
    ("dance",),
    7,
    b"\xff\xff\xff\xff",
    deep(500),
    ("said", (None,) * 1_000_000),
    ("said", ((1, None),) * 1_000_000),
    ("load", 1, ("x" * SMALL_FRAME_BYTES,), None),
    ("load", 1, ("x" * (MAX_TEXT + 1),), None),
    ("watched", 1, {"self": (1 << 40, 1)}),
    ("watched", 1, {"self": (-1, 1)}),
    ("watched", 1, {str(number): (1, 1) for number in range(5)}),
    ("hello", 3, "invalid", 1, ((),) * 1_000_000, {}, 1, 16),
]


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("frame", range(len(WRONG_VALUES)))
def test_a_connection_with_invalid_frames_is_opened_again_and_others_go_on(
    run_shared: Callable[[Act], None], frame: int
) -> None:
    words = WRONG_VALUES[frame]
    words = ("watched", 1, GeneratedToken(1)) if words == ("watched", 1, object) else words

    async def act(here: Scene, invalid: InvalidReplica) -> None:
        await here.until(lambda: invalid.connection_count > 1)
        invalid.frames_to_send.clear()
        await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] == 2)
        here.list("replica-0")
        await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] == 1)
        await answers(here)

    run_with_invalid_replica(run_shared, [words], act)


TOKEN = pack(GeneratedToken(1))


def test_the_pause_grows_with_each_invalid_frame_of_a_replica(
    run_shared: Callable[[Act], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_connection, "MIN_FAULT_RETRY_S", 3600.0)

    async def act(here: Scene, invalid: InvalidReplica) -> None:
        [connection] = [connection for connection in here.fleet.replicas if connection.name == "invalid"]
        await here.until(lambda: connection._fault_pause_s == MAX_FAULT_RETRY_S)
        await answers(here)
        assert invalid.connection_count == 1
        assert [connection._next_fault_pause() for _ in range(2)] == [MAX_FAULT_RETRY_S] * 2
        connection._opened_at -= FAULTLESS_S + 1  # as after a long time without a lie
        assert connection._next_fault_pause() == 3600.0

    run_with_invalid_replica(run_shared, [("dance",)], act)


CHANGED: dict[str, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {
    "name": lambda hello: (*hello[:2], "replica-0", *hello[3:]),
    "version": lambda hello: (hello[0], 99, *hello[2:]),
    "port": lambda hello: (*hello[:3], 1 << 20, *hello[4:]),
    "blocks": lambda hello: (*hello[:6], -1, *hello[7:]),
    "block size": lambda hello: (*hello[:7], -16),
    "mark": lambda hello: (
        *hello[:4],
        (("0" * 32, *pack_model(model_in(hello, vocab_size=1 << 40, width=-3))[1:]), *hello[4][1:]),
        *hello[5:],
    ),
    "type": lambda hello: (*hello[:4], ((digest_bytes(TOKEN), TOKEN, 0),), *hello[5:]),
    "field": lambda hello: model_of(hello, labels=7),
    "failure": lambda hello: (*hello[:5], {"chat": "x" * (MAX_TEXT + 1)}, *hello[6:]),
    "failed name": lambda hello: (*hello[:5], {"x" * (MAX_TEXT + 1): "it is broken"}, *hello[6:]),
    "long name": lambda hello: (*hello[:2], "x" * (MAX_TEXT + 1), *hello[3:]),
}


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("change", CHANGED)
def test_a_replica_with_an_invalid_hello_gets_no_requests(run_shared: Callable[[Act], None], change: str) -> None:
    async def act(here: Scene, invalid: InvalidReplica) -> None:
        await here.until(lambda: invalid.connection_count > 1)
        assert here.fleet.replicas.ready_counts()["chat"] == 1
        await answers(here)

    run_with_invalid_replica(run_shared, [], act, changed=CHANGED[change])


def test_failures_of_models_that_are_not_in_the_settings_are_ignored(run_shared: Callable[[Act], None]) -> None:
    failures = {"stranger": "it is broken", "judge": "x" * MAX_TEXT}

    async def act(here: Scene, invalid: InvalidReplica) -> None:
        [line] = [line for line in here.fleet.replicas if line.name == "invalid"]
        await here.until(lambda: line.broken)
        assert line.broken == {"judge": "x" * MAX_TEXT}
        assert "stranger" not in (await here.http.get("/readyz")).text

    run_with_invalid_replica(run_shared, [], act, changed=lambda hello: (*hello[:5], failures, *hello[6:]))


def test_a_replica_that_does_not_load_an_explainer_is_not_waited_for(
    run_shared: Callable[[Act], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one is asked, and explains the model from then on. Without another one the answer is 503."""
    asked = list[str]()
    real = ReplicaConnection.call

    async def call(connection: ReplicaConnection, message: str, *fields: Any) -> Any:
        asked.append(connection.name)
        with monkeypatch.context() as patch:
            if connection.name == "invalid":
                patch.setattr(replica_connection, "CALL_SECONDS", 0.0)
            return await real(connection, message, *fields)

    monkeypatch.setattr(ReplicaConnection, "call", call)
    body = {"model": "judge", "input": "A good film.", "method": "attention"}

    async def act(here: Scene, invalid: InvalidReplica) -> None:
        await here.until(lambda: here.fleet.replicas.ready_counts()["judge"] == 2)
        for _ in range(2):
            assert (await here.http.post("/v1/explain", json=body)).status_code == 200
        assert asked == ["invalid", "replica-0", "replica-0"]
        here.list("invalid")
        await here.until(lambda: here.fleet.replicas.ready_counts()["judge"] == 1)
        answer = await here.http.post("/v1/explain", json=body)
        assert answer.status_code == 503
        assert "replica invalid has not answered in 0 s; send it again" in answer.text
        assert not any(line._pending_calls for line in here.fleet.replicas)
        here.list("replica-0")
        await here.until(lambda: here.fleet.replicas.ready_counts()["judge"] == 1)

    run_with_invalid_replica(run_shared, [], act)


def test_models_that_are_not_in_the_settings_are_ignored(run_shared: Callable[[Act], None]) -> None:
    def renamed(hello: tuple[Any, ...]) -> tuple[Any, ...]:
        model = replace(unpack(hello[4][0][1]), name="stranger")
        return (*hello[:4], (*hello[4], pack_model(model)), *hello[5:])

    async def act(here: Scene, invalid: InvalidReplica) -> None:
        await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] == 2)
        assert "stranger" not in await here.page()

    run_with_invalid_replica(run_shared, [], act, changed=renamed)


def event_frame(*events: Any) -> Callable[[Any], Any]:
    """The frame with an event of the first ticket that is requested."""

    def frame(asked: Any) -> Any:
        while asked[0] != "ask":
            return ("said", ())
        ticket = asked[3][0][0]
        return ("said", tuple((ticket, event) for event in events))

    return frame


EVENTS: list[tuple[Any, ...]] = [
    (RequestStarted(math.nan),),
    (RequestStarted(-1.0),),
    (GeneratedToken(-1),),
    (GeneratedToken(1 << 40),),
    (GeneratedToken(5, cached_tokens=-1),),
    tuple(GeneratedToken(5) for _ in range(5)),
    (HeadOutput([0.5]), Done("encoded", 3)),
    (Done("stop", -3),),
    (Done("stop", 3, -1),),
    (Done("stop", 1 << 62),),
    (Done("stop", 3, 1 << 62),),
    (Done("stop", 3, 0, 1 << 62),),
    (GeneratedToken(5, cached_tokens=1 << 62),),
    (7,),
    (GENERATE,),
]


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("events", range(len(EVENTS)))
def test_an_invalid_answer_fails_or_is_sent_to_another_replica(run_shared: Callable[[Act], None], events: int) -> None:
    async def act(here: Scene, invalid: InvalidReplica) -> None:
        await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] == 2)
        here.list("invalid")  # it gets all new requests; the other one gets those that are sent again
        [line] = [line for line in here.fleet.replicas if line.name == "invalid"]
        here.fleet.replicas.eligible_for = lambda model: [line]  # type: ignore[method-assign]
        stream = here.generate(range(3, 9), 4)
        last = ended(await asyncio.wait_for(read_events(stream), 20))
        assert isinstance(last, Failed)
        del here.fleet.replicas.eligible_for
        here.list("replica-0")
        await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] >= 1)
        await answers(here)
        assert here.fleet.tokens == 0

    run_with_invalid_replica(run_shared, [event_frame(*EVENTS[events])], act)


class DeafReplica(InvalidReplica):
    """Reads nothing after the handshake, and says that it is well."""

    async def handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection_count += 1
        try:
            ours = b"y" * NONCE_BYTES
            writer.write(ours)
            theirs, _ = await reader.readexactly(NONCE_BYTES), await reader.readexactly(NONCE_BYTES)
            cast(asyncio.ReadTransport, writer.transport).pause_reading()
            writer.write(compute_proof(SECRET, "answers", theirs) + encode_frame(self.hello))
            while not writer.is_closing():
                writer.write(encode_frame(("load", 0, (), None)))
                await asyncio.sleep(0.05)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.mark.usefixtures("short_pauses")
def test_a_replica_that_reads_nothing_is_lost(
    run_shared: Callable[[Act], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before what waits for it fills the memory of the ingress."""
    monkeypatch.setattr(replica_connection, "MAX_UNREAD_BYTES", 1 << 20)
    frame = bytes(1 << 18)

    async def act(here: Scene) -> None:
        way, version, _, seen, *rest = await here.replicas[0].hello_message()
        deaf = DeafReplica((way, version, "deaf", seen, *rest), ())
        here.addresses["deaf"] = await deaf.start()
        here.list()
        await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] == 2)
        [connection] = [each for each in here.fleet.replicas if each.name == "deaf"]
        assert connection._writer is not None
        transport, most = connection._writer.transport, 0
        for _ in range(200):  # more than the buffers of the system take
            connection.send_frame(frame)
            most = max(most, transport.get_write_buffer_size())
            await asyncio.sleep(0)
        assert transport.is_closing()
        assert most <= (1 << 20) + len(frame)
        await here.until(lambda: "it reads nothing" in caplog.text)
        await here.until(lambda: deaf.connection_count > 1)
        here.list("replica-0")
        del here.addresses["deaf"]
        await answers(here)
        deaf.server.close()

    run_shared(act)


def test_events_of_unknown_tickets_change_nothing(settings: Settings) -> None:
    """Of unknown tickets, of tickets of another connection, and after the end."""
    frames = [("said", tuple((ticket, GeneratedToken(5)) for ticket in (-1, 0, 1, 2, 3, 1 << 62)))] * 50

    async def act(here: Scene, invalid: InvalidReplica) -> None:
        expected = await read_events(here.generate(range(3, 9), 20))
        await asyncio.wait_for(invalid.asked.wait(), 20)
        here.list("replica-0")
        assert await read_events(here.generate(range(3, 9), 20)) == expected

    run_with_invalid_replica(partial(run_scene, settings, count=1), frames, act)


@pytest.mark.usefixtures("short_pauses")
def test_a_replica_without_the_secret_gets_no_frames(run_shared: Callable[[Act], None]) -> None:
    async def act(here: Scene, invalid: InvalidReplica) -> None:
        await here.until(lambda: invalid.connection_count > 1)
        assert here.fleet.replicas.ready_counts()["chat"] == 1
        await answers(here)

    run_with_invalid_replica(run_shared, [], act, secret="guessed")


def test_models_without_a_connection_are_forgotten(tiny_generator: Path, run_shared: Callable[[Act], None]) -> None:
    async def act(here: Scene) -> None:
        [model] = [model for model in here.fleet.models() if model.name == "chat"]
        circle = ConnectionContext(SECRET, here.fleet)
        for number in range(20):
            other: Model = replace(model, source=str(number))
            await circle.decode_model(*pack_model(other))
        assert len(circle.known_models) <= 1
        with pytest.raises(FrameError, match="does not match its digest"):
            await circle.decode_model("0" * 32, *pack_model(model)[1:])

    run_shared(act)


def test_every_frame_rejects_fields_of_other_types() -> None:
    chance = random.Random(1)
    values = [None, 7, -1.5, "x", b"x", (), ((1,),), {"a": 1}, True]
    for kind, number in CODEC_NUMBERS.items():
        for _ in range(50):
            row = tuple(chance.choice(values) for _ in range(chance.randrange(8)))
            try:
                decoded = unpack(msgpack.packb(msgpack.ExtType(number, pack(row))))
            except FrameError:
                continue
            assert isinstance(decoded, kind)
    assert len(CODECS) == len(CODEC_NUMBERS)
