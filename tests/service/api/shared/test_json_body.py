"""JSON that other parsers accept silently is rejected: too deep, an integer that is too large, a key twice, and text
that is not valid JSON."""

import asyncio
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from polyhead.service.api.access.app_state import REQUEST_THREADS, AppState
from polyhead.service.api.dialects.openai import chat_messages
from polyhead.service.api.dialects.responses import read as responses_read
from polyhead.service.api.shared import json_body as body
from polyhead.service.api.shared.json_body import count_members, parse_json
from polyhead.service.concurrency.thread_pool import ThreadPool, WorkInfo
from polyhead.service.core.errors import BadRequest
from polyhead.service.resources.request_memory import ALLOCATOR_BYTES, BYTES_PER_CONTAINER, Headroom
from tests.support.scripted import Connection, Registry, application, ask, echo, model, until
from tests.support.threads import no_new_threads


@pytest.fixture
def app(tiny_generator: Path) -> FastAPI:
    return application(Registry([model(tiny_generator, "talker", "generate")], echo))


def error_message(content: bytes) -> str:
    with pytest.raises(BadRequest) as caught:
        parse_json(content, "the body")
    return caught.value.message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"a": 1, "a": 1}', "an object has the key 'a' twice; every key stands once"),
        (b'{"a": 1, "\\u0061": 2}', "the key 'a' twice"),
        (b'[{"b": {"c": 1, "d": [], "c": 2}}]', "the key 'c' twice"),
        (b'{"": 1, "": 2}', "the key '' twice"),
        (b"[18446744073709551616]", "the integer 18446744073709551616... does not fit in 64 bits"),
        (b'{"seed": -9223372036854775809}', "the integer -9223372036854775809... does not fit in 64 bits"),
        (b"[" + b"9" * 300 + b"]", "the integer 99999999999999999999... does not fit in 64 bits"),
        (b"[" * 65 + b"]" * 65, "is nested deeper than 64 levels, at most so many are read"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "is nested deeper than 64 levels"),
        (b'[{"a":' * 33 + b"1" + b"}]" * 33, "is nested deeper than 64 levels"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[" * 1000 + b"]" * 1000, "is nested deeper"),
        (b"[NaN]", "is not valid JSON"),
        (b"[Infinity]", "is not valid JSON"),
        (b"-Infinity", "is not valid JSON"),
        (b"1e999", "is not valid JSON"),
        (b'["\\ud800"]', "is not valid JSON"),
        (b'["\\udc00\\ud800"]', "is not valid JSON"),
        (b'["\xff"]', "is not valid JSON"),
        (b'["\xed\xa0\x80"]', "is not valid JSON"),
        (b'["\xc0\xaf"]', "is not valid JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "is not valid JSON"),
        ("{}".encode("utf-16"), "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b" ", "is not valid JSON"),
        (b"{} {}", "is not valid JSON"),
        (b"{},", "is not valid JSON"),
        (b"[1,]", "is not valid JSON"),
        (b"[01]", "is not valid JSON"),
        (b"{'a': 1}", "is not valid JSON"),
        (b'["a\nb"]', "is not valid JSON"),
        (b'["a', "is not valid JSON"),
        (b"// no\n{}", "is not valid JSON"),
    ],
)
def test_invalid_json_is_rejected(content: bytes, expected: str) -> None:
    message = error_message(content)
    assert message.startswith("the body")
    assert expected in message


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 64 + b"]" * 64,
        b"[" + b"[]," * 1000 + b"[[]]]",
        b'{"a": {"a": {"a": "a: a, {\\"a\\": 1}"}}, "b": [{"a": 1}, {"a": 1}]}',
        b"[18446744073709551615, -9223372036854775808]",
        b"[0.1234567890123456789012345, 12345678901234567890.5, 1234567890123456789e3, 1e-30]",
        b'{"number": "123456789012345678901234567890", "text": "NaN"}',
        b'["\\ud83e\\udd8a", "\\u0000", "\xf0\x9f\xa6\x8a"]',
        b'"\\\\"',
        b"null",
    ],
)
def test_valid_json_is_read_unchanged(content: bytes) -> None:
    assert parse_json(content, "the body") == json.loads(content)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20])
def test_the_scan_finds_errors_across_the_limits_of_its_parts(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(body, "SCAN_BYTES", size)
    assert "does not fit" in error_message(b'{"a\\\\":"\\"1","b":[1, 18446744073709551616]}')
    assert "the key 'a\"' twice" in error_message(b'{"a\\"": 1, "b": ":", "a\\"": 1}')
    assert parse_json(b'["1234567890", 1234567890, 1234567890, "123456789012345678901"]', "the body")[1] == 1234567890


def test_members_of_all_objects_are_counted() -> None:
    value: Any = {"a": {"b": 1, "c": [{"d": {}}, [{"e": 1}]]}}
    assert count_members(value, 100) == 5
    assert count_members(value, 1) == 1, "the count went on beyond the limit"


NODES = [
    (b'{"a":1,"b":[1,2,[3]],"c":{}}', 7),
    (b"[" + b"[]," * 9 + b"1]", 10),
    (b"{" + b",".join(b'"%d":1' % number for number in range(9)) + b"}", 10),
]


@pytest.mark.parametrize(("content", "nodes"), NODES)
def test_lists_objects_and_members_are_counted_before_they_are_made(
    content: bytes, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parser makes all of them in one call, during which no other thread runs."""
    monkeypatch.setattr(body, "MAX_NODES", nodes)
    assert parse_json(content, "the body") == json.loads(content)
    monkeypatch.setattr(body, "MAX_NODES", nodes - 1)
    monkeypatch.setattr(body.orjson, "loads", lambda _: pytest.fail("it is parsed"))
    expected = f"has {nodes} lists, objects and members of objects, more than {nodes - 1}, at most so many are read"
    assert error_message(content) == f"the body: {expected}"


def test_a_body_of_many_members_is_refused_unread_and_unclaimed(
    tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headroom = Headroom(ALLOCATOR_BYTES + (64 << 20))  # less than they would take
    members = b",".join(b'"%d":1' % number for number in range(body.MAX_NODES))
    app = application(Registry([model(tiny_generator, "talker", "generate")], echo), headroom)
    monkeypatch.setattr(body.orjson, "loads", lambda _: pytest.fail("it is parsed"))
    reply = asyncio.run(post(app, "/v1/responses", b"{%s}" % members))
    assert (reply.status_code, f"more than {body.MAX_NODES}" in reply.text) == (400, True), reply.text


def test_bodies_of_any_size_are_read_in_the_same_way(app: FastAPI) -> None:
    """The large ones on a thread."""
    padding = b'"x": "%s", ' % (b"y" * 2 * body.SCAN_BYTES)
    for content in (b'{%s"model": "talker", "prompt": []}', b'{%s"a": 1, "a": 2}', b'{%s"a": 99999999999999999999}'):
        small, large = ask(app, ("/v1/completions", content % b""), ("/v1/completions", content % padding))
        assert small.status_code == large.status_code == 400
        if b"model" not in content:
            assert small.json() == large.json()
        else:
            assert "x: is not a known field" in large.text


def test_bodies_of_one_key_that_are_complete_at_once_are_read_one_in_a_turn(app: FastAPI) -> None:
    """The work that follows is up to some milliseconds of the event loop, and thousands may be complete."""
    turns, turn = list[tuple[str, int]](), 0

    async def receive(owner: str) -> None:
        async def stream() -> AsyncIterator[bytes]:
            yield b"{}"

        request: Any = SimpleNamespace(
            stream=stream, app=app, state=SimpleNamespace(context=SimpleNamespace(owner=owner))
        )
        assert await body.receive_body_in_turn(request) == b"{}"
        turns.append((owner, turn))

    async def receive_all() -> None:
        nonlocal turn
        tasks = [asyncio.create_task(receive(owner)) for owner in ["many"] * 40 + ["one"] * 2]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            turn += 1

    asyncio.run(receive_all())
    assert max(Counter(turns).values()) == 1
    assert max(at for owner, at in turns if owner == "one") < 10 < max(at for _, at in turns)


def test_a_body_in_pieces_is_one_value() -> None:
    assert parse_json(bytearray(b'{"a": [1, 2]}'), "the body") == {"a": [1, 2]}


PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/predict",
    "/embed",
    "/rerank",
    "/generate",
    "/tokenize",
    "/models/talker",
    "/v2/models/talker/infer",
    "/v2/models/talker/generate",
)
HOSTILE = (
    b"[" * 65 + b"]" * 65,
    b'{"a":' * 65 + b"1" + b"}" * 65,
    b"[" * 100_000,
    b'{"model": 1, "model": 2}',
    b'{"n": 1' + b"0" * 5000 + b"}",
    b'{"n": NaN}',
    b'{"n": "\\ud800"}',
    b"\xff",
    b"",
)


@pytest.mark.parametrize("path", PATHS)
def test_every_dialect_rejects_it_in_its_own_error_format(tiny_generator: Path, path: str) -> None:
    app = application(Registry([model(tiny_generator, "talker", "generate")], echo))
    for answer in ask(app, *((path, content) for content in HOSTILE)):
        assert 400 <= answer.status_code < 500, answer.text
        assert "the body" in answer.text
        assert "error" in answer.json()


@pytest.mark.parametrize("length", ["9" * 5000, "0" * 5000 + "5", "-1", "1e1", "²"])
def test_the_length_of_the_json_before_binary_tensors_is_checked(tiny_generator: Path, length: str) -> None:
    app = application(Registry([model(tiny_generator, "talker", "generate")], echo))

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as client:
            headers = [(b"inference-header-content-length", length.encode("latin-1"))]
            return await client.post("/v2/models/talker/infer", content=b"{}", headers=headers)

    answer = asyncio.run(run())
    assert answer.status_code == 400
    assert "Inference-Header-Content-Length: must be at most the 2 bytes" in answer.text


@pytest.mark.parametrize("depth", [66, 900, 100_000])
def test_arguments_of_a_call_have_a_limit_of_depth(tiny_generator: Path, depth: int) -> None:
    """They are a string in the body; a model may have written the same key twice or a number of any length there."""
    app = application(Registry([model(tiny_generator, "talker", "generate", max_tokens=256)], echo))

    def body_of(arguments: str) -> dict[str, Any]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
        return {"model": "talker", "messages": [*said, {"role": "tool", "tool_call_id": "1", "content": "b"}]}

    deep, kept = ask(
        app,
        ("/v1/chat/completions", body_of('{"a":' * depth + "1" + "}" * depth)),
        ("/v1/chat/completions", body_of('{"a": 1, "a": ' + "1" * 30 + "}")),
    )
    assert deep.status_code == 400
    assert "messages[1].tool_calls[0].function.arguments: " in deep.json()["error"]["message"]
    assert kept.status_code == 200, kept.text


def test_many_keys_are_checked_in_linear_time(tiny_generator: Path) -> None:
    """Half a million keys, one of which is there twice, are checked in seconds, not minutes."""
    members = b",".join(b'"%d":0' % number for number in range(250_000))
    began = time.process_time()
    assert "the key '7' twice" in error_message(b'{%s,"7":1}' % members)
    assert time.process_time() - began < 10


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("each", [30_000, 70_000])
def test_arguments_of_all_calls_are_counted_before_they_are_read(
    tiny_generator: Path, path: str, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the body they are strings, so that the limit of values in a body does not count them."""
    app = application(Registry([model(tiny_generator, "talker", "generate", max_tokens=256)], echo))
    arguments = '{"a":[' + "[]," * each + "[]]}"
    if path == "/v1/responses":
        calls = [{"type": "function_call", "call_id": str(n), "name": "f", "arguments": arguments} for n in range(3)]
        body = {"model": "talker", "input": [{"role": "user", "content": "a"}, *calls]}
        field = r"input\[[12]\].arguments: "
    else:
        said = [{"id": str(n), "function": {"name": "f", "arguments": arguments}} for n in range(3)]
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": said}]
        body = {"model": "talker", "messages": messages}
        field = r"messages\[1\].tool_calls\[[01]\].function.arguments: "

    def refused(*_: Any) -> None:
        pytest.fail("they are read")

    for module in (chat_messages, responses_read):
        monkeypatch.setattr(module, "read_arguments", refused)
    (answer,) = ask(app, (path, body))
    assert answer.status_code == 400
    assert re.search(field + "has too many values, at most 65536 are read", answer.json()["error"]["message"])


@pytest.mark.parametrize(
    ("content", "runs"),
    [
        (b"[" + b"1," * body.INLINE_VALUES + b"1]", 1),
        (b"[" + b"1," * 100 + b"1]", 0),
        (b'"' + b"," * 10_000 + b'"', 0),
        (b'"' + b"a" * body.SCAN_BYTES + b'"', 2),
    ],
    ids=["many values", "few values", "commas of a text", "a long text"],
)
def test_a_body_is_counted_once_and_parsed_on_a_thread_if_it_is_long(
    app: FastAPI, content: bytes, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, counted, run, count = list[str](), list[bytes](), ThreadPool.run, body.count_json

    async def running(self: ThreadPool, function: Any, piece: WorkInfo) -> Any:
        used.append(piece.label)
        return await run(self, function, piece)

    def counting(text: bytes) -> body.JsonCounts:
        counted.append(bytes(text))
        return count(text)

    monkeypatch.setattr(ThreadPool, "run", running)
    monkeypatch.setattr(body, "count_json", counting)
    (answer,) = ask(app, ("/v1/completions", content))
    assert "the body: must be an object" in answer.text
    assert used == ["reading the body"] * runs
    assert counted == [content]


def test_large_bodies_of_one_key_do_not_delay_the_body_of_another(
    tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While all threads are busy, twenty bodies of one key wait, and then one of another key comes."""
    app = application(Registry([model(tiny_generator, "talker", "generate")], echo), api_keys="many=k1,one=k2")
    parsed, queued, free = list[bytes](), list[str](), threading.Event()
    loads, run_on_pool = body.orjson.loads, ThreadPool.run

    def parsing(text: bytes) -> Any:
        parsed.append(bytes(text[2:5]))
        free.wait()
        return loads(text)

    async def queueing(self: ThreadPool, function: Any, piece: WorkInfo) -> Any:
        queued.append(piece.label)  # in the queue before this task gives the event loop back
        return await run_on_pool(self, function, piece)

    monkeypatch.setattr(body, "orjson", SimpleNamespace(loads=parsing, JSONDecodeError=body.orjson.JSONDecodeError))
    monkeypatch.setattr(ThreadPool, "run", queueing)

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:

            def send(name: bytes, key: str) -> asyncio.Task[httpx.Response]:
                content = b'{"%s":[%s]}' % (name, b",".join([b"1"] * 2 * body.INLINE_VALUES))
                headers = {"Authorization": f"Bearer {key}"}
                return asyncio.create_task(client.post("/v1/completions", content=content, headers=headers))

            sent = [send(b"man", "k1") for _ in range(20)]
            await until(lambda: len(queued) == 20)
            sent.append(send(b"one", "k2"))
            await until(lambda: len(queued) == 21)
            free.set()
            await asyncio.gather(*sent)

    try:
        asyncio.run(run())
    finally:
        free.set()
    assert len(parsed) == 21
    assert parsed.index(b"one") <= 4, "the threads finish what they have begun; then it is the other key's turn"


SHAPES = {
    "objects in objects": b"[" + b",".join([b'{"a":' * 60 + b"1" + b"}" * 60] * 300) + b"]",
    "empty objects": b"[" + b",".join([b"{}"] * 9000) + b"]",
    "lists": b"[" + b",".join([b"[]", b"[1]"] * 9000) + b"]",
    "many keys": b"{" + b",".join(b'"%d":{"b%d":1.5}' % (number, number) for number in range(9000)) + b"}",
    "numbers": b"[" + b",".join(b"%d" % (10**9 + number) for number in range(9000)) + b"]",
    "texts": b"[" + b",".join(b'"%d"' % number for number in range(9000)) + b"]",
}


def measure_values(value: Any) -> int:
    """Bytes of a value and of all values in it."""
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        size += sum(sys.getsizeof(key) + measure_values(inner) for key, inner in value.items())
    return size + (sum(map(measure_values, value)) if isinstance(value, list) else 0)


def claimed_bytes(seen: body.JsonCounts) -> int:
    return seen.memory_of_values + BYTES_PER_CONTAINER * seen.containers


@pytest.mark.parametrize("shape", SHAPES)
def test_values_take_no_more_memory_than_is_claimed(shape: str) -> None:
    assert measure_values(parse_json(SHAPES[shape], "the body")) <= claimed_bytes(body.count_json(SHAPES[shape]))


LONG = 3 * body.SCAN_BYTES


@pytest.mark.parametrize(
    "text",
    [
        b"u" * LONG + "\U0001f600".encode(),
        "\U0001f600".encode() + b"u" * LONG,
        b"u" * LONG + rb"\uD83D\uDE00",
        b"u" * (body.SCAN_BYTES - len(b'{"user":"') - 2) + rb"\ud83d\ude00" + b"u" * LONG,  # cut by the end of a part
        rb"\u20ac" + b"u" * LONG,
        "\u20ac".encode() + b"u" * LONG + "\u00e4".encode() * LONG,
        "\u6f22".encode() * LONG,
        b"u" * LONG,
    ],
)
def test_characters_of_a_string_are_as_wide_as_the_widest(text: bytes) -> None:
    """The claim for the body has a byte for each byte of the texts in it.  A string does not widen its neighbours."""
    content = b'{"user":"%s","a":"%s"}' % (text, b"v" * LONG)
    value, seen = parse_json(content, "the body"), body.count_json(content)
    assert measure_values(value) <= len(content) + claimed_bytes(seen)
    assert seen.widened_bytes <= 3 * len(text)
    assert bool(seen.widened_bytes) == (sys.getsizeof(value["user"]) > 1.1 * len(text))


def test_memory_for_values_is_claimed_before_they_are_made(tiny_classifier: Path) -> None:
    """Annotations are kept as they are, without an effect, as long as their answer takes."""
    headroom = Headroom(ALLOCATOR_BYTES + (32 << 20))
    nested = b",".join([b'{"a":' * 60 + b"1" + b"}" * 60] * 2000)
    content = b'{"model":"judge","input":[{"role":"assistant","content":[{"annotations":[%s]}]}]}' % nested
    judge = Registry([model(tiny_classifier, "judge", "classify")], echo)
    for path in ("/v1/responses", "/v1/embeddings", "/models/judge", "/v2/models/judge/infer", "/tokenize"):
        reply = asyncio.run(post(application(judge, headroom), path, content))
        assert (reply.status_code, "what the body contains takes about" in reply.text) == (413, True), reply.text
    lines = b'{"model":"judge","questions":{"a":[%s]}}\n"state"' % nested
    reply = asyncio.run(post(application(judge, headroom), "/v1/systemone", lines, "application/x-ndjson"))
    assert (reply.status_code, "what the body contains takes about" in reply.text) == (413, True), reply.text


async def post(app: FastAPI, path: str, content: bytes, kind: str = "application/json") -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.post(path, content=content, headers={"content-type": kind})


@pytest.fixture
def busy_threads(app: FastAPI) -> Iterator[AppState]:
    """The server, all of whose threads for large bodies are held until the end of the test."""
    server: AppState = app.state.server
    held, free = threading.Semaphore(0), threading.Event()

    def hold() -> None:
        held.release()
        free.wait()

    async def take_all() -> None:
        for number in range(REQUEST_THREADS):
            server.request_threads.start(hold, WorkInfo("holding it", number))

    asyncio.run(take_all())
    for _ in range(REQUEST_THREADS):
        held.acquire()
    yield server
    free.set()


LARGE = b'{"model": "talker", "prompt": "%s"}' % (b"y" * 2 * body.SCAN_BYTES)


def test_a_large_body_whose_client_leaves_while_it_waits_holds_no_place(app: FastAPI, busy_threads: AppState) -> None:
    """It held one until its turn came."""

    async def leave() -> None:
        connection = Connection("/v1/completions", LARGE)
        serving = asyncio.create_task(connection.run(app))
        await until(lambda: bool(busy_threads.request_threads._waiting._owner_and_size))
        assert busy_threads.admission.in_flight == 1
        connection.drop()
        await asyncio.wait_for(serving, 120)
        assert busy_threads.admission.in_flight == 0
        assert not busy_threads.request_threads._waiting._owner_and_size

    asyncio.run(leave())


def test_a_large_body_that_waits_is_answered_at_its_deadline(app: FastAPI, busy_threads: AppState) -> None:
    async def ask_briefly() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            return await client.post("/v1/completions", content=LARGE, headers={"x-request-timeout": "0.05"})

    answer = asyncio.run(ask_briefly())
    assert answer.status_code == 504, answer.text
    assert busy_threads.admission.in_flight == 0


def test_a_large_body_is_refused_where_no_thread_can_be_started(app: FastAPI) -> None:
    """It was counted as work of a thread that is not there: such requests hung for ever, and held their places."""
    with no_new_threads():
        answers = ask(app, *[("/v1/completions", LARGE)] * 10)
    assert {answer.status_code for answer in answers} == {503}
    assert all("no thread can be started" in answer.text for answer in answers)
    server: AppState = app.state.server
    assert server.admission.in_flight == 0
    again, _ = ask(app, ("/v1/completions", LARGE.replace(b'"prompt"', b'"promt"')), ("/v1/completions", b"{}"))
    assert again.status_code == 400
