"""Bodies that arrive slowly: they take no permit, their bytes are limited, and the slowest is aborted to make room."""

import asyncio
import json
import math
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from polyhead.service.api.access.admission import Admission, AdmissionLimits
from polyhead.service.api.access.app_state import AppState
from polyhead.service.api.access.middleware import PLANNED_HEAD_BYTES
from polyhead.service.api.http.body_limits import FULL_BODIES, PROGRESS_BYTES, IncomingBodies
from polyhead.service.api.http.request_cycle import CLAIMED_BYTES
from polyhead.service.core.errors import Overloaded, SlowBody
from polyhead.service.core.model import Model
from polyhead.service.resources.request_memory import BYTES_PER_BODY_BYTE, Headroom
from tests.support.processes import Process
from tests.support.raw import Said, answers, chunk, connected, heard, post, said
from tests.support.scripted import WAIT, Connection, FakeEngine, Registry, application, echo, model, until

GO_ON = json.dumps({"model": "chat", "prompt": [40, 41], "max_tokens": 1, "temperature": 0}).encode()
TALK = {"model": "talker", "prompt": "The fox"}
LIMIT = 1 << 16  # bytes of a body
PLENTY = 1 << 40


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Process]:
    process = Process(f"chat={folder}", "--cache-tokens", "4096", "--max-body-bytes", str(LIMIT), *flags)
    process.ready()
    try:
        yield process
    finally:
        if "leaving:" not in process.log:  # a second signal would not wait
            process.child.send_signal(signal.SIGTERM)
        assert process.child.wait(60) == 0, process.log


def port_of(server: Process) -> int:
    return int(server.url.rpartition(":")[2])


def begun(port: int, length: int, sent: bytes) -> socket.socket:
    """A connection on which the server waits for a body of so many bytes, of which it has received `sent`."""
    client = connected(port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
    head += b"Content-Length: %d\r\n\r\n" % length
    client.sendall(head)
    assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.sendall(sent)
    return client


def closed(client: socket.socket) -> Said:
    """What is answered before the server closes the connection."""
    [answer] = answers(heard(client))
    assert answer.headers["connection"] == "close"
    return answer


# Permits


def test_incomplete_bodies_take_no_permit(tiny_generator: Path) -> None:
    """More incomplete bodies than permits, with one byte of a hundred each: a complete request is answered."""
    with serving(tiny_generator) as server, ExitStack() as held:
        for _ in range(300):
            held.enter_context(begun(port_of(server), 100, b"{"))
        assert [one.status for one in said(port_of(server), post(GO_ON))] == [200]
        assert server.page.total("http_requests_in_flight") == 300, "they are accepted, and not answered yet"


def test_a_permit_is_taken_when_the_body_is_complete(tiny_generator: Path) -> None:
    app = application(Registry([model(tiny_generator, "talker", "generate")], lambda *_: [WAIT]), max_requests=1)
    admission = cast(AppState, app.state.server).admission
    body = orjson.dumps(TALK)

    async def run() -> list[Connection]:
        slow, quick, refused = (Connection("/v1/completions", part) for part in (body[:-1], body, body))
        last = {"type": "http.request", "body": body[-1:], "more_body": False}
        slow.incoming.get_nowait()
        slow.incoming.put_nowait({"type": "http.request", "body": body[:-1], "more_body": True})
        tasks = [asyncio.create_task(slow.run(app))]
        await until(lambda: admission.unfinished == 1 and slow.incoming.empty())
        assert admission.in_flight == 0
        tasks.append(asyncio.create_task(quick.run(app)))
        await until(lambda: admission.in_flight == 1)
        await refused.run(app)
        slow.incoming.put_nowait(last)  # whole now, and there is no permit
        await tasks[0]
        quick.drop()
        await tasks[1]
        return [refused, slow]

    refused, slow = asyncio.run(run())
    assert refused.incoming.qsize() == 1, "its body was read"
    for one in (refused, slow):
        assert one.sent[0]["status"] == 429
        assert int(dict(one.sent[0]["headers"])[b"retry-after"]) >= 1
        assert orjson.loads(one.body)["error"]["code"] == "overloaded"
    assert admission.in_flight == admission.unfinished == 0


def test_a_route_without_a_body_takes_no_permit(tiny_generator: Path) -> None:
    app = application(Registry([model(tiny_generator, "talker", "generate")], echo), max_requests=1)
    asked = Connection("/nowhere/at/all", b"{}")
    asked.incoming.get_nowait()
    asyncio.run(asyncio.wait_for(asked.run(app), 10))
    assert asked.sent[0]["status"] == 404


def test_shares_of_keys_count_whole_bodies() -> None:
    admission = Admission(AdmissionLimits(8, PLENTY, share=0.5), FakeEngine(), {"a", "b"})
    with ExitStack() as held:
        places = [held.enter_context(admission.open_permit("a")) for _ in range(20)]
        for place in places[:4]:
            place.acquire()
        with pytest.raises(Overloaded, match="4 requests for this key are in flight"):
            places[4].acquire()
        with pytest.raises(Overloaded, match="4 requests for this key are in flight"):
            held.enter_context(admission.open_permit("a"))
        for _ in range(4):
            held.enter_context(admission.admit("b"))
        assert (admission.in_flight, admission.unfinished) == (8, 24)
    assert (admission.in_flight, admission.unfinished) == (0, 0)


# Which body is aborted to make room


def test_the_slowest_is_the_one_without_progress_for_longest() -> None:
    receiving = IncomingBodies(10 * PROGRESS_BYTES)
    with ExitStack() as held:
        stalled, steady, slow_body = bodies = [held.enter_context(receiving.open_body()) for _ in range(3)]
        receiving.add_bytes(stalled, 4 * PROGRESS_BYTES)
        for body in (slow_body, steady):
            receiving.add_bytes(body, PROGRESS_BYTES)
        for _ in range(100):
            receiving.add_bytes(slow_body, 1)
        receiving.add_bytes(steady, PROGRESS_BYTES)
        for expected in (stalled, slow_body, steady):
            assert not expected.is_aborted
            receiving.abort_slowest()
            assert expected.is_aborted
        assert (receiving.held_bytes, len(receiving), receiving.aborted_count) == (0, 0, 3)
        for body in bodies:
            with pytest.raises(SlowBody):
                receiving.add_bytes(body, 1)
        assert receiving.held_bytes == 0
    assert receiving.aborted_count == 0


def test_a_body_whose_time_has_just_run_out_can_be_aborted() -> None:
    """Its timeout has expired, and the task that waits for it has not resumed yet."""
    receiving, errors = IncomingBodies(), list[Any]()

    async def wait_for_body() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        with receiving.open_body() as body:
            try:
                async with asyncio.timeout(None) as timeout:
                    with body.watch_timeout(timeout):
                        timeout.reschedule(0)  # it expires in the next turn of the loop, just before the abort
                        loop.call_soon(receiving.abort_slowest)
                        await asyncio.Event().wait()
            except TimeoutError:
                body.check_aborted()

    with pytest.raises(SlowBody):
        asyncio.run(wait_for_body())
    assert not errors
    assert (receiving.held_bytes, len(receiving), receiving.aborted_count) == (0, 0, 0)


def test_bytes_of_all_bodies_are_bounded() -> None:
    receiving = IncomingBodies(10 * PROGRESS_BYTES)
    with ExitStack() as held:
        bodies = []
        for _ in range(20):
            bodies.append(held.enter_context(receiving.open_body()))
            receiving.add_bytes(bodies[-1], PROGRESS_BYTES)
            assert receiving.held_bytes <= 10 * PROGRESS_BYTES
        assert [body.is_aborted for body in bodies] == [True] * 10 + [False] * 10
        receiving.remove(bodies[10])
        receiving.add_bytes(bodies[11], PROGRESS_BYTES)
        assert not bodies[11].is_aborted
    assert (receiving.held_bytes, len(receiving)) == (0, 0)


def test_bodies_of_a_key_with_many_do_not_abort_those_of_another() -> None:
    """Quick bodies of one key take all the room, or all connections, and a slow one of another key stays."""
    receiving = IncomingBodies(10 * PROGRESS_BYTES)
    with ExitStack() as held:
        slow = held.enter_context(receiving.open_body("b"))
        receiving.add_bytes(slow, 2 * PROGRESS_BYTES)
        many = []
        for _ in range(20):
            many.append(held.enter_context(receiving.open_body("a")))
            receiving.add_bytes(many[-1], PROGRESS_BYTES)
        assert [body.is_aborted for body in many] == [True] * 12 + [False] * 8
        assert receiving.slowest_since == many[12].progress_time
        receiving.abort_slowest()
        assert (many[12].is_aborted, slow.is_aborted) == (True, False)
        for _ in range(6):
            receiving.abort_slowest()
        assert [body.is_aborted for body in (many[18], many[19], slow)] == [True, False, False]
        for _ in range(2):
            receiving.abort_slowest()
        assert (slow.is_aborted, len(receiving), receiving.held_bytes) == (True, 0, 0)
        assert receiving.slowest_since == math.inf


def test_room_for_a_body_is_made_of_the_keys_with_more_bytes() -> None:
    receiving = IncomingBodies(PLENTY)
    with ExitStack() as held:
        sizes = (("b", 100), ("a", 300), ("a", 300), ("b", 200), ("a", 1), ("a", 300))
        bodies = [held.enter_context(receiving.open_body(owner)) for owner, _ in sizes]
        for body, (_, size) in zip(bodies, sizes, strict=True):
            receiving.add_bytes(body, size)
        slow, first, second, steady, quick, last = bodies
        assert not receiving.make_room(quick, 901), "what is slower has fewer bytes"
        assert not receiving.make_room(steady, 701), "and so have the bodies before it"
        assert not receiving.make_room(steady, 101, own_only=True)
        assert not any(body.is_aborted for body in bodies)
        assert receiving.make_room(steady, 400)
        assert [body for body in bodies if body.is_aborted] == [first, second]
        assert receiving.make_room(steady, 100, own_only=True)
        assert [body.is_aborted for body in (slow, steady, quick, last)] == [True, False, False, False]
        later = held.enter_context(receiving.open_body("a"))
        receiving.add_bytes(later, 1000)
        assert not receiving.make_room(later, 302), "a key with less keeps its own"


def test_a_server_limits_the_bytes_of_bodies(tiny_generator: Path) -> None:
    """Eight bodies of the largest size; the ninth aborts the first, and a complete one is answered meanwhile."""
    with serving(tiny_generator) as server, ExitStack() as held:
        port = port_of(server)
        bodies = [held.enter_context(begun(port, LIMIT, b" " * (LIMIT - 1))) for _ in range(FULL_BODIES + 2)]
        for body in bodies[:2]:
            answer = closed(body)
            assert (answer.status, answer.json["error"]["code"]) == (408, "request_timeout")
            assert "more slowly than all others" in answer.message
        assert [one.status for one in said(port, post(GO_ON))] == [200]
        chunks = held.enter_context(connected(port))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunks.sendall(head + chunk(b" " * (LIMIT // 2)) + b"5\r\n")
        assert closed(bodies[2]).status == 408
        for body in bodies[3:]:
            body.sendall(b"}")
            assert body.recv(1000).startswith(b"HTTP/1.1 400 ")  # whole, and not JSON
        page = server.page
        assert page.total("http_requests_total", status="408") == 3
        assert page.total("rejections_total", code="request_timeout") == 3


def test_without_free_connections_the_slowest_body_is_aborted(tiny_generator: Path) -> None:
    most = 20
    with serving(tiny_generator, "--max-connections", str(most)) as server, ExitStack() as held:
        port = port_of(server)
        bodies = [held.enter_context(begun(port, LIMIT, b"{")) for _ in range(2 * most)]
        for body in bodies[: most // 2]:
            assert closed(body).status == 408
        assert [one.status for one in said(port, post(GO_ON))] == [200]
        bodies[-1].sendall(b"x" * (LIMIT - 1))
        assert bodies[-1].recv(1000).startswith(b"HTTP/1.1 400 ")


# A server that stops


def test_a_body_that_was_begun_before_the_signal_is_answered(tiny_generator: Path) -> None:
    with serving(tiny_generator) as server, begun(port_of(server), len(GO_ON), GO_ON[:-1]) as client:
        server.child.send_signal(signal.SIGTERM)
        server.until(lambda: "leaving: 1 requests in flight" in server.log)
        client.sendall(GO_ON[-1:])
        assert [one.status for one in answers(heard(client))] == [200]


def test_an_incomplete_body_at_the_end_of_the_drain_gets_an_error(tiny_generator: Path) -> None:
    with (
        serving(tiny_generator, "--drain-seconds", "0") as server,
        begun(port_of(server), len(GO_ON), GO_ON[:-1]) as client,
    ):
        server.child.send_signal(signal.SIGTERM)
        server.until(lambda: "leaving: 1 requests in flight" in server.log)
        answer = closed(client)
        assert (answer.status, answer.message) == (503, "the server is shutting down")


@pytest.fixture
def talker(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate")


def with_long_head(body: bytes, *, more: bool) -> Connection:
    """A request with 20,000 bytes in its head, beyond its path and the fields of every request."""
    asked = Connection("/v1/completions", b"")
    asked.scope["query_string"] = b"q" * 8000
    cast(Any, asked.scope["headers"]).append((b"x-long", b"y" * 12_000))
    asked.incoming.get_nowait()
    asked.incoming.put_nowait({"type": "http.request", "body": body, "more_body": more})
    return asked


def test_a_long_head_is_counted_with_its_body(talker: Model) -> None:
    """Its memory is claimed, and released at the end; the slowest body makes room for it.  It is no part of the body
    that has a largest size.
    """
    headroom = Headroom(PLENTY)
    app = application(Registry([talker], echo), headroom, max_body_bytes=1024)
    receiving = cast(AppState, app.state.server).incoming_bodies
    counted = 20_000 - PLANNED_HEAD_BYTES  # and a few fields of every request

    async def run() -> list[Connection]:
        asked = [with_long_head(b"{", more=True)]
        tasks = [asyncio.create_task(asked[0].run(app))]
        await until(lambda: receiving.held_bytes > 0)
        await until(lambda: asked[0].incoming.empty())
        await asyncio.sleep(0)
        assert 0 <= receiving.held_bytes - counted < 200
        assert headroom._reserved == BYTES_PER_BODY_BYTE * receiving.held_bytes
        receiving.max_bytes = receiving.held_bytes + 1000
        asked.append(with_long_head(orjson.dumps(TALK), more=False))
        tasks.append(asyncio.create_task(asked[1].run(app)))
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        return asked

    slow, whole = asyncio.run(run())
    assert (slow.sent[0]["status"], whole.sent[0]["status"]) == (408, 200)
    assert (receiving.held_bytes, headroom._reserved) == (0, 0)


def test_an_answer_states_what_is_claimed_for_it(talker: Model) -> None:
    """So that the connection counts only what no claim does, while it is not read."""
    headroom = Headroom(PLENTY)
    app = application(Registry([talker], echo), headroom)
    asked = with_long_head(orjson.dumps(TALK), more=False)
    reserved = list[int]()

    async def note() -> None:
        reserved.append(headroom._reserved)

    asked.sending = note
    asyncio.run(asked.run(app))
    stated = [message[CLAIMED_BYTES] for message in asked.sent if message.get("body")]
    assert stated
    assert set(stated) <= set(reserved)
    assert min(stated) > 0


@pytest.mark.parametrize(
    ("path", "asked"), [("/v1/completions", TALK), ("/v1/messages", TALK), ("/v2/models/talker/infer", {"inputs": []})]
)
def test_every_dialect_has_its_error_format(talker: Model, path: str, asked: Any) -> None:
    app = application(Registry([talker], echo))
    receiving = cast(AppState, app.state.server).incoming_bodies

    async def run() -> Connection:
        slow = Connection(path, b"")
        slow.incoming.get_nowait()
        slow.incoming.put_nowait({"type": "http.request", "body": orjson.dumps(asked)[:-1], "more_body": True})
        task = asyncio.create_task(slow.run(app))
        await until(lambda: receiving.held_bytes > 0)
        receiving.abort_slowest()
        await asyncio.wait_for(task, 10)
        return slow

    slow = asyncio.run(run())
    assert slow.sent[0]["status"] == 408
    assert b"more slowly than all others" in slow.body
    assert (receiving.held_bytes, receiving.aborted_count) == (0, 0)
