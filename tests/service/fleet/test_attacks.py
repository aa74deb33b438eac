"""A fleet's lines under attack: by strangers, by an ingress that lies and by a replica that lies.

Whoever does not know the secret gets no answer.  A line over which nonsense comes is closed and made again, and the
others go on.
"""

import asyncio
import math
import random
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from polyhead.service.fleet.messages import SMALL_FRAME_BYTES
from polyhead.service.fleet.replica_connection import FAULTLESS_S, MAX_FAULT_RETRY_S, ConnectionContext
from tests.service.fleet.test_fleet import GREEDY, HOST, SECRET, Scene, ended, heard, played
from tests.service.fleet.test_messages import read_frame

Talk = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def settings(tiny_generator: Path, tiny_classifier: Path) -> Settings:
    models = {"chat": str(tiny_generator), "judge": str(tiny_classifier)}
    return Settings(models=models, drain_seconds=5, cache_tokens=4096)


async def called(here: Scene, name: str = "replica-0") -> Talk:
    return await asyncio.open_connection(*here.addresses[name])


async def known(here: Scene) -> Talk:
    """A connection of one who knows the secret, after the replica's hello."""
    reader, writer = await called(here)
    nonce = await reader.readexactly(NONCE_BYTES)
    writer.write(bytes(NONCE_BYTES) + compute_proof(SECRET, "asks", nonce))
    assert await reader.readexactly(NONCE_BYTES) == compute_proof(SECRET, "answers", bytes(NONCE_BYTES))
    assert (await read_frame(reader))[0] == "hello"
    return reader, writer


async def silent(talk: Talk) -> None:
    """Nothing is said, and the connection is closed."""
    reader, writer = talk
    with suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


async def answers(here: Scene) -> None:
    assert isinstance(ended(await heard(here.generate(range(3, 9), 4))), Done)
    answer = await here.http.post("/models/judge/predict", json={"inputs": "A good film."})
    assert answer.status_code == 200


# Strangers


def test_a_recorded_handshake_is_of_no_use_again(settings: Settings) -> None:
    async def act(here: Scene) -> None:
        reader, writer = await called(here)
        nonce = await reader.readexactly(NONCE_BYTES)
        recorded = bytes(NONCE_BYTES) + compute_proof(SECRET, "asks", nonce) + encode_frame(("watch", 1, "chat"))
        writer.write(recorded)
        assert await reader.readexactly(NONCE_BYTES) == compute_proof(SECRET, "answers", bytes(NONCE_BYTES))
        writer.close()
        for _ in range(3):
            reader, writer = await called(here)
            assert await reader.readexactly(NONCE_BYTES) != nonce
            writer.write(recorded)
            await silent((reader, writer))
        await answers(here)

    played(settings, act, count=1)


def test_what_one_side_shows_is_of_no_use_to_the_other(settings: Settings) -> None:
    """A replica's own nonce and proofs, sent back to it, over the same connection and over another."""

    async def act(here: Scene) -> None:
        first, second = await called(here), await called(here)
        nonces = [await reader.readexactly(NONCE_BYTES) for reader, _ in (first, second)]
        first[1].write(nonces[0] + compute_proof(SECRET, "answers", nonces[0]))
        second[1].write(nonces[0] + nonces[1])
        await silent(first)
        await silent(second)
        await answers(here)

    played(settings, act, count=1)


@pytest.mark.parametrize("secret", ["", SECRET[:-1], SECRET + " ", SECRET.upper()])
def test_a_wrong_secret_gets_no_answer(settings: Settings, secret: str) -> None:
    async def act(here: Scene) -> None:
        reader, writer = await called(here)
        nonce = await reader.readexactly(NONCE_BYTES)
        writer.write(bytes(NONCE_BYTES) + compute_proof(secret, "asks", nonce) + encode_frame(("watch", 1, "chat")))
        await silent((reader, writer))
        assert len(here.replicas[0]._connections) == 1

    played(settings, act, count=1)


def test_a_handshake_that_is_cut_or_flipped_gets_no_answer(settings: Settings) -> None:
    """At every byte; a flipped bit of the stranger's own nonce alone is no fault."""

    async def act(here: Scene) -> None:
        async def attack(spoil: Callable[[bytes], bytes]) -> None:
            reader, writer = await called(here)
            nonce = await reader.readexactly(NONCE_BYTES)
            writer.write(spoil(bytes(NONCE_BYTES) + compute_proof(SECRET, "asks", nonce)))
            writer.write_eof()
            await silent((reader, writer))

        def flip(data: bytes, place: int) -> bytes:
            return data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]

        await asyncio.gather(*(attack(lambda whole, n=n: whole[:n]) for n in range(2 * NONCE_BYTES)))
        await asyncio.gather(*(attack(lambda whole, n=n: flip(whole, n)) for n in range(NONCE_BYTES, 2 * NONCE_BYTES)))
        await answers(here)
        assert len(here.replicas[0]._connections) == 1

    played(settings, act, count=1)


def test_a_flood_of_half_open_connections_keeps_nobody_out(settings: Settings) -> None:
    async def act(here: Scene) -> None:
        flood = [await called(here) for _ in range(3 * strangers.MAX_UNAUTHENTICATED)]
        for _, writer in flood[::2]:
            writer.write(b"x" * NONCE_BYTES)  # half a handshake
        await here.until(lambda: len(here.replicas[0]._unauthenticated) == strangers.MAX_UNAUTHENTICATED)
        for line in here.fleet.replicas:  # and the ingress has to come again
            line._disconnect()
        await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] == 1)
        await answers(here)
        assert len(here.replicas[0]._unauthenticated) <= strangers.MAX_UNAUTHENTICATED
        for _, writer in flood:
            writer.close()

    played(settings, act, count=1)


def test_a_burst_leaves_no_more_connections_open_than_the_bound(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All come before a task of the first one runs, so each has to be counted as closed at once."""
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
            await known(here)  # one more is aborted, and one with the secret is let in
            await here.until(lambda: sum(end.done() for end in ends) == count - strangers.MAX_UNAUTHENTICATED + 1)
            for end in ends:
                end.cancel()
        await answers(here)

    played(settings, act, count=1)


def test_a_flood_writes_one_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([100.0, 100.0, 100.1, 100.9, 101.0, 101.5, 103.0])
    waiting = strangers.UnauthenticatedConnections(clock=lambda: next(times))
    for _ in range(6):
        waiting.log_refusal(FrameError("it does not know the secret"))
    said = [record.getMessage().partition("secret; ")[2] for record in caplog.records]
    assert said == ["", "2 more since the last line", "1 more since the last line"]


def test_a_slow_handshake_ends(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "AUTHENTICATION_TIMEOUT_S", 0.2)

    async def act(here: Scene) -> None:
        reader, writer = await called(here)
        await reader.readexactly(NONCE_BYTES)
        writer.write(b"x")
        await silent((reader, writer))
        assert not here.replicas[0]._unauthenticated

    played(settings, act, count=1)


# An ingress that lies

GENERATE = Generate("asked", (3, 4, 5), 4, sampling=GREEDY)
ENCODE = Encode("asked", (1, 5, 6, 2))
LIES: list[Any] = [
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
    ("ask", "chat", 0, ((7, 3, SimilarRequest(6, "x", 1)),)),
    ("ask", "chat", 0, ((7, 3, SimilarRequest(7, "x", 1)),)),
    ("ask", "chat", 0, ((7, 4, ENCODE), (8, 4, SimilarRequest(7, "x", 1)))),
    ("ask", "chat", 0, ((7, 3, (None,) * 1_000_000),)),
    ("drop", 7, "x" * SMALL_FRAME_BYTES),
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: str(lie)[:80])
def test_a_replica_hangs_up_on_an_ingress_that_lies(settings: Settings, lie: Any) -> None:
    async def act(here: Scene) -> None:
        reader, writer = await known(here)
        writer.write(encode_frame(lie))
        await until_closed(reader)
        await answers(here)
        assert here.replicas[0].queued_tokens == 0

    played(settings, act, count=1)


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


EXPLAIN = ExplainTextRequest("asked", (3, 4, 5), "occlusion", goals=(((2, 1),),))
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
]


@pytest.mark.parametrize("wrong", range(len(WRONG)))
def test_a_request_that_lies_ends_and_takes_no_other_along(settings: Settings, wrong: int) -> None:
    """Every ticket gets its last event."""

    async def act(here: Scene) -> None:
        reader, writer = await known(here)
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

    played(settings, act, count=1)


def recorded() -> list[bytes]:
    """Frames as an ingress sends them."""
    encode = Encode("asked", (1, 5, 6, 2))
    asked = [("ask", "chat", 8, ((7, 3, GENERATE),)), ("ask", "judge", 0, ((8, 4, encode),))]
    return [
        encode_frame(words) for words in (*asked, ("hold", 7), ("resume", 7), ("drop", 7, False), ("watch", 3, "chat"))
    ]


def spoiled(data: bytes, chance: random.Random) -> bytes:
    """Cut, flipped, doubled, or with a length that lies."""
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


def test_spoiled_frames_do_a_replica_no_harm(settings: Settings) -> None:
    async def act(here: Scene) -> None:
        chance, [replica] = random.Random(24), here.replicas
        for _ in range(200):
            reader, writer = await known(here)
            frames = recorded()
            chance.shuffle(frames)
            for data in frames[: chance.randrange(1, 4)]:
                writer.write(spoiled(data, chance) if chance.random() < 0.7 else data)
            writer.write_eof()
            await until_closed(reader)
            writer.close()
        await here.until(lambda: len(replica._connections) == 1 and not replica.queued_tokens)
        await here.until(lambda: not replica.engine._streams)
        assert replica.engine.alive
        assert not replica.failure_reasons()
        await answers(here)

    played(settings, act, count=1)


# A replica that lies


class Liar:
    """Knows the secret, says the hello of a real replica, and then what `lies` has."""

    def __init__(self, hello: tuple[Any, ...], lies: Iterable[Any], secret: str = SECRET) -> None:
        self.hello, self.lies, self.secret = hello, list(lies), secret
        self.visits, self.asked = 0, asyncio.Event()

    async def start(self) -> tuple[str, int]:
        self.server = await asyncio.start_server(self.visited, HOST)
        return self.server.sockets[0].getsockname()[:2]  # type: ignore[no-any-return]

    async def visited(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.visits += 1
        try:
            ours = b"y" * NONCE_BYTES
            writer.write(ours)
            theirs, shown = await reader.readexactly(NONCE_BYTES), await reader.readexactly(NONCE_BYTES)
            assert shown == compute_proof(SECRET, "asks", ours)
            writer.write(compute_proof(self.secret, "answers", theirs))
            if self.hello:
                writer.write(encode_frame(self.hello))
            for lie in self.lies:
                if callable(lie):
                    lie = lie(await read_frame(reader))
                writer.write(lie if isinstance(lie, bytes) else encode_frame(lie))
            self.asked.set()
            while await reader.read(1 << 16):
                pass
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def lied(settings: Settings, lies: Iterable[Any], act: Callable[[Scene, Liar], Awaitable[None]], **named: Any) -> None:
    """`act` beside one honest replica and one that lies."""

    async def run(here: Scene) -> None:
        way, version, _, seen, *rest = await here.replicas[0].hello_message()
        hello = (way, version, "liar", seen, *rest)
        liar = Liar(named.get("changed", lambda words: words)(hello), lies, named.get("secret", SECRET))
        here.addresses["liar"] = await liar.start()
        here.list()
        try:
            await act(here, liar)
        finally:
            here.list("replica-0")
            liar.server.close()

    played(settings, run, count=1)


def model_in(hello: tuple[Any, ...], **changes: Any) -> Model:
    """Its first model changed."""
    changed: Model = replace(unpack(hello[4][0][1]), **changes)
    return changed


def model_of(hello: tuple[Any, ...], **changes: Any) -> tuple[Any, ...]:
    """Its first model changed, under a mark that nobody has read yet."""
    return (*hello[:4], (pack_model(model_in(hello, **changes)), *hello[4][1:]), *hello[5:])


def deep(levels: int) -> bytes:
    data = pack(1)
    for _ in range(levels):
        data = msgpack.packb(msgpack.ExtType(CODEC_NUMBERS[frozenset], msgpack.packb([0])[:1] + data))
    return struct.pack(">I", len(data)) + data


SAID_WRONG: list[Any] = [
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
    ("hello", 3, "liar", 1, ((),) * 1_000_000, {}, 1, 16),
]


@pytest.mark.parametrize("lie", range(len(SAID_WRONG)))
def test_a_line_over_which_a_replica_lies_is_made_again_and_the_others_go_on(settings: Settings, lie: int) -> None:
    words = SAID_WRONG[lie]
    words = ("watched", 1, GeneratedToken(1)) if words == ("watched", 1, object) else words

    async def act(here: Scene, liar: Liar) -> None:
        await here.until(lambda: liar.visits > 1)
        liar.lies.clear()
        await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] == 2)
        here.list("replica-0")
        await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] == 1)
        await answers(here)

    lied(settings, [words], act)


TOKEN = pack(GeneratedToken(1))


def test_after_each_lie_of_a_replica_the_pause_is_longer(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_connection, "MIN_FAULT_RETRY_S", 3600.0)

    async def act(here: Scene, liar: Liar) -> None:
        [connection] = [connection for connection in here.fleet.replicas if connection.name == "liar"]
        await here.until(lambda: connection._fault_pause_s == MAX_FAULT_RETRY_S)
        await answers(here)
        assert liar.visits == 1
        assert [connection._next_fault_pause() for _ in range(2)] == [MAX_FAULT_RETRY_S] * 2
        connection._opened_at -= FAULTLESS_S + 1  # as after a long time without a lie
        assert connection._next_fault_pause() == 3600.0

    lied(settings, [("dance",)], act)


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
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_replica_that_lies_of_itself_is_not_asked(settings: Settings, change: str) -> None:
    async def act(here: Scene, liar: Liar) -> None:
        await here.until(lambda: liar.visits > 1)
        assert here.fleet.replicas.ready_counts()["chat"] == 1
        await answers(here)

    lied(settings, [], act, changed=CHANGED[change])


def test_models_that_nobody_is_to_serve_are_not_counted(settings: Settings) -> None:
    def renamed(hello: tuple[Any, ...]) -> tuple[Any, ...]:
        model = replace(unpack(hello[4][0][1]), name="stranger")
        return (*hello[:4], (*hello[4], pack_model(model)), *hello[5:])

    async def act(here: Scene, liar: Liar) -> None:
        await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] == 2)
        assert "stranger" not in await here.page()

    lied(settings, [], act, changed=renamed)


def said(*events: Any) -> Callable[[Any], Any]:
    """To be said of the first ticket that is asked about."""

    def lie(asked: Any) -> Any:
        while asked[0] != "ask":
            return ("said", ())
        ticket = asked[3][0][0]
        return ("said", tuple((ticket, event) for event in events))

    return lie


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
    (7,),
    (GENERATE,),
]


@pytest.mark.parametrize("events", range(len(EVENTS)))
def test_an_answer_that_lies_ends_with_an_error_or_is_asked_elsewhere(settings: Settings, events: int) -> None:
    async def act(here: Scene, liar: Liar) -> None:
        await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] == 2)
        here.list("liar")  # it alone takes new requests; the other stays for what is sent again
        [line] = [line for line in here.fleet.replicas if line.name == "liar"]
        here.fleet.replicas.eligible_for = lambda model: [line]  # type: ignore[method-assign]
        stream = here.generate(range(3, 9), 4)
        last = ended(await asyncio.wait_for(heard(stream), 20))
        assert isinstance(last, Failed)
        del here.fleet.replicas.eligible_for
        here.list("replica-0")
        await here.until(lambda: here.fleet.replicas.ready_counts()["chat"] >= 1)
        await answers(here)
        assert here.fleet.tokens == 0

    lied(settings, [said(*EVENTS[events])], act)


def test_tokens_that_nobody_asked_for_change_nothing(settings: Settings) -> None:
    """Of tickets that there are not, of those of another line, and after the end."""
    lies = [("said", tuple((ticket, GeneratedToken(5)) for ticket in (-1, 0, 1, 2, 3, 1 << 62)))] * 50

    async def act(here: Scene, liar: Liar) -> None:
        expected = await heard(here.generate(range(3, 9), 20))
        await asyncio.wait_for(liar.asked.wait(), 20)
        here.list("replica-0")
        assert await heard(here.generate(range(3, 9), 20)) == expected

    lied(settings, lies, act)


def test_one_that_does_not_know_the_secret_is_told_nothing(settings: Settings) -> None:
    async def act(here: Scene, liar: Liar) -> None:
        await here.until(lambda: liar.visits > 1)
        assert here.fleet.replicas.ready_counts()["chat"] == 1
        await answers(here)

    lied(settings, [], act, secret="guessed")


def test_models_that_no_line_has_are_forgotten(tiny_generator: Path, settings: Settings) -> None:
    async def act(here: Scene) -> None:
        [model] = [model for model in here.fleet.models() if model.name == "chat"]
        circle = ConnectionContext(SECRET, here.fleet)
        for number in range(20):
            other: Model = replace(model, source=str(number))
            await circle.decode_model(*pack_model(other))
        assert len(circle.known_models) <= 1
        with pytest.raises(FrameError, match="does not match its digest"):
            await circle.decode_model("0" * 32, *pack_model(model)[1:])

    played(settings, act, count=1)


def test_every_form_refuses_fields_of_other_types() -> None:
    chance = random.Random(1)
    values = [None, 7, -1.5, "x", b"x", (), ((1,),), {"a": 1}, True]
    for kind, number in CODEC_NUMBERS.items():
        for _ in range(50):
            row = tuple(chance.choice(values) for _ in range(chance.randrange(8)))
            try:
                told = unpack(msgpack.packb(msgpack.ExtType(number, pack(row))))
            except FrameError:
                continue
            assert isinstance(told, kind)
    assert len(CODECS) == len(CODEC_NUMBERS)
