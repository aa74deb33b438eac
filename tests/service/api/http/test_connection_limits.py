"""The cost of many connections: request starts in a turn of the event loop, unread answers, and memory for bodies."""

import asyncio
import contextlib
import errno
import logging
import socket
import struct
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from polyhead.service.api.access.app_state import AppState
from polyhead.service.api.http.body_limits import IncomingBodies
from polyhead.service.api.http.connection import BLOCKED_BYTES, READ_AHEAD, Connection
from polyhead.service.api.http.connection_limits import (
    MAX_START_BYTES,
    MAX_STARTS,
    READ_BYTES,
    SHORT_READ_BYTES,
    BufferedInput,
    StartQueue,
    UnsentAnswers,
)
from polyhead.service.api.http.request_cycle import CLAIMED_BYTES, WRITE_BYTES
from polyhead.service.concurrency import loop_errors
from polyhead.service.concurrency.loop_errors import LoopErrors
from polyhead.service.core.errors import UnreadableRequest
from polyhead.service.resources.request_memory import BYTES_PER_BODY_BYTE, Headroom
from polyhead.service.server.process import UNSENT_LOW_WATER, bind_socket
from tests.service.api.http.test_connection import GET, STOPPING, Served, answers_to, newest, replying, run
from tests.support.raw import answers
from tests.support.scripted import Connection as Asked
from tests.support.scripted import Registry, application, echo, model, until
from tests.support.steps import count_steps

LARGE = 8 << 20  # bytes of an answer, more than the kernel keeps


def connections(served: Served) -> list[Connection]:
    return [cast(Connection, one) for one in served.state.connections]


def blocked(served: Served, count: int) -> bool:
    """So many connections wait for their clients to read."""
    return sum(one.cycle is not None and not one.writable.is_set() for one in connections(served)) == count


async def unread(port: int, content: bytes) -> socket.socket:
    """A client that sends a request and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, content)
    return client


# Requests in a turn of the loop


@pytest.mark.parametrize("pipelined", [1, 3])
def test_few_requests_begin_in_a_turn_of_the_loop(pipelined: int) -> None:
    """However many connections have a request ready; all of them are answered."""
    crowd, turn, begun = 6 * MAX_STARTS, 0, Counter[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun[turn] += 1
        await replying(b"here", length=True)(scope, receive, send)

    async def one() -> None:
        nonlocal turn
        served = Served(app, max_connections=2 * crowd)
        server = await asyncio.get_running_loop().create_server(served.connection, "127.0.0.1", 0, backlog=crowd)
        with ExitStack() as held:
            for _ in range(crowd):  # all are in the socket before the server runs
                client = held.enter_context(socket.create_connection(server.sockets[0].getsockname()))
                client.sendall(pipelined * GET)
            while begun.total() < pipelined * crowd:
                turn += 1
                await asyncio.sleep(0)
            await until(lambda: served.state.total_requests == pipelined * crowd)
            for connection in connections(served):
                connection.transport.abort()
        server.close()

    asyncio.run(asyncio.wait_for(one(), 120))
    assert max(begun.values()) <= 2 * MAX_STARTS, "two calls of the queue may be in one turn of the counter"


def test_a_request_that_fails_to_start_leaves_the_queue_to_the_others() -> None:
    started: list[str] = []

    class Waiting:
        def __init__(self, name: str) -> None:
            self.name = name

        def drop(self) -> None:
            """Does nothing."""

        def continue_reading(self) -> None:
            started.append(self.name)
            if self.name == "faulty":
                raise ZeroDivisionError

    async def run_queue() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        queue = StartQueue(2)
        clients = [Waiting(name) for name in ("first", "second", "faulty", "third", "fourth")]
        assert [queue.try_start(client) for client in clients] == [True, True, False, False, False]
        await until(lambda: "faulty" in started)
        for _ in range(3):  # turns of the loop
            await asyncio.sleep(0)

    asyncio.run(run_queue())
    assert started == ["faulty", "third", "fourth"]


@pytest.mark.parametrize(("size", "most"), [(READ_BYTES, 1), (MAX_START_BYTES // 4, 4), (100, MAX_STARTS)])
def test_the_longer_their_heads_the_fewer_requests_begin_in_a_turn(size: int, most: int) -> None:
    """All of them begin, in the order in which they came, and short ones do not keep a long one waiting."""
    begun, turn, count, queue = list[tuple[int, int]](), 0, 3 * MAX_STARTS, StartQueue(MAX_STARTS)

    class Waiting:
        def __init__(self, number: int) -> None:
            self.number = number

        def drop(self) -> None:
            """Does nothing."""

        def continue_reading(self) -> None:
            assert queue.try_start(self, size), "it is its turn"
            begun.append((turn, self.number))

    async def run_queue() -> None:
        nonlocal turn
        begun.extend((0, number) for number in range(count) if queue.try_start(Waiting(number), size))
        while len(begun) < count:
            turn += 1
            queue.try_start(Waiting(count), 1)  # a short one comes in every turn
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run_queue(), 120))
    assert [number for _, number in begun if number < count] == list(range(count))
    assert set(Counter(when for when, number in begun if number < count).values()) <= set(range(1, most + 1))


# Unread answers


def test_an_unread_answer_is_sent_in_pieces() -> None:
    """The application waits until the client has read the last piece."""
    done = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE)]})
        await send({"type": "http.response.body", "body": b"x" * LARGE})
        done.set()

    async def one() -> None:
        served = Served(app)
        async with served.listening() as port:
            client = await unread(port, STOPPING)
            await until(lambda: blocked(served, 1))
            [connection] = connections(served)
            assert 0 < connection.transport.get_write_buffer_size() <= 2 * WRITE_BYTES
            assert not done.is_set()
            got, loop = bytearray(), asyncio.get_running_loop()
            while part := await loop.sock_recv(client, 1 << 16):
                got += part
            client.close()
            assert got.endswith(b"\r\n\r\n" + b"x" * LARGE)
            await asyncio.wait_for(done.wait(), 120)

    asyncio.run(one())


def test_chunks_of_a_large_answer_are_whole() -> None:
    size = 2 * WRITE_BYTES + 1
    content = run(replying(b"x" * size, b"end"), STOPPING)
    assert content.endswith(b"\r\n\r\n%x\r\n" % size + b"x" * size + b"\r\n3\r\nend\r\n0\r\n\r\n")


async def send_ahead(client: socket.socket, connection: Connection) -> None:
    """Send until the server reads no more."""
    with contextlib.suppress(BlockingIOError):
        while True:
            client.send(b"y" * (1 << 16))
    await until(lambda: not connection.transport.is_reading())


WITH_A_BODY = GET[:-2] + b"Content-Length: 99999999\r\n\r\n"


@pytest.mark.parametrize("content", [GET, GET[:-2] + b"Content-Length: 3\r\n\r\nabc", WITH_A_BODY])
def test_what_comes_behind_an_answer_that_is_not_read_is_counted(content: bytes) -> None:
    """It is no more than a few KiB a connection, or a part of the body, until the client reads."""

    async def one() -> None:
        served = Served(replying(b"x" * LARGE, length=True))
        async with served.listening() as port:
            client = await unread(port, content)
            await until(lambda: blocked(served, 1))
            [connection] = connections(served)
            await send_ahead(client, connection)
            kept = len(connection.buffer) + len(connection.cycle.body)  # type: ignore[union-attr]
            assert served.edge.buffered_input.held_bytes == kept
            assert 0 < kept < (READ_AHEAD + READ_BYTES if content == WITH_A_BODY else 2 * SHORT_READ_BYTES)
            client.close()
            await until(lambda: not served.state.connections)
            assert served.edge.buffered_input.held_bytes == 0

    asyncio.run(one())


def test_a_body_that_came_before_its_answer_was_blocked_is_counted() -> None:
    ready = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await ready.wait()
        await replying(b"x" * LARGE, length=True)(scope, receive, send)

    async def one() -> None:
        served = Served(app)
        async with served.listening() as port:
            client = await unread(port, WITH_A_BODY)
            connection = await newest(served)
            await send_ahead(client, connection)
            assert served.edge.buffered_input.held_bytes == 0, "the application may still receive it"
            ready.set()
            await until(lambda: served.edge.buffered_input.held_bytes > READ_AHEAD)
            client.close()

    asyncio.run(one())


def blocked_by_name(served: Served) -> dict[Any, bool]:
    """Whether each connection waits for its client to read, by the client's address."""
    return {one.client: not one.writable.is_set() for one in connections(served)}


def test_input_behind_answers_is_bounded_together() -> None:
    """The client that waits longest is disconnected; the others get all that they asked for."""

    second = STOPPING[:-2] + b"X: " + b"y" * SHORT_READ_BYTES + b"\r\n\r\n"

    async def one() -> tuple[bool, list[int]]:
        served = Served(replying(b"x" * LARGE, length=True), buffered_input=BufferedInput(2 * SHORT_READ_BYTES))
        async with served.listening() as port:
            clients = []
            for _ in range(3):
                clients.append(client := await unread(port, GET))
                name = client.getsockname()
                await until(lambda name=name: blocked_by_name(served).get(name, False))  # type: ignore[misc]
                client.send(second)
                connection = next(one for one in connections(served) if one.client == name)
                await until(lambda one=connection: not one.transport.is_reading())  # type: ignore[misc]
            is_there = clients[0].getsockname() in blocked_by_name(served)
            assert served.edge.buffered_input.held_bytes <= 2 * SHORT_READ_BYTES
            sizes, loop = [], asyncio.get_running_loop()
            for client in clients[1:]:
                size = 0
                while part := await loop.sock_recv(client, 1 << 16):
                    size += len(part)
                sizes.append(size)
            for client in clients:
                client.close()
            return is_there, sizes

    is_there, sizes = asyncio.run(one())
    assert not is_there
    assert min(sizes) > 2 * LARGE


def replying_claimed(claimed: int) -> Any:
    """An application with a large answer for which `claimed` bytes are claimed."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE)]})
        await send({"type": "http.response.body", "body": b"x" * LARGE, CLAIMED_BYTES: claimed})

    return app


async def unread_answer(served: Served, port: int, content: bytes = GET) -> socket.socket:
    """A client whose answer is not read, and counted."""
    client = await unread(port, content)
    name = client.getsockname()
    await until(lambda: blocked_by_name(served).get(name, False))
    await asyncio.sleep(0)  # a turn of the loop, in which it is counted
    return client


@pytest.mark.parametrize("claimed", [LARGE, LARGE // 2, 0])
def test_what_is_held_for_an_answer_that_is_not_read_is_counted(claimed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unsent bytes and the request; of the rest of the body only what the application has not claimed."""
    written, write = Counter[Connection](), Connection.write

    def counting_write(connection: Connection, data: bytes) -> None:
        written[connection] += 1
        write(connection, data)

    long_head = GET[:-2] + b"X: " + b"y" * (20 << 10) + b"\r\n\r\n"

    async def one() -> None:
        served = Served(replying_claimed(claimed))
        async with served.listening() as port:
            monkeypatch.setattr(Connection, "write", counting_write)
            for content in (GET, long_head, GET + b"z" * (20 << 10)):
                client = await unread_answer(served, port, content)
                name = client.getsockname()
                connection = next(one for one in connections(served) if one.client == name)
                if content.endswith(b"z"):
                    await until(lambda one=connection: not one.transport.is_reading())  # type: ignore[misc]
                    await asyncio.sleep(0)
                unwritten = LARGE - written[connection] * WRITE_BYTES
                held = BLOCKED_BYTES + connection.transport.get_write_buffer_size() + min(unwritten, LARGE - claimed)
                held += len(long_head if content is long_head else GET)
                if content.endswith(b"z"):  # the kernel receives while nothing is read
                    kernel = connection.transport.get_extra_info("socket")
                    held += kernel.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
                assert served.edge.unsent_answers.held_bytes == held
                client.close()
                await until(lambda: not served.state.connections)
                assert served.edge.unsent_answers.held_bytes == 0

    asyncio.run(one())


def test_answers_that_are_not_read_are_bounded_together() -> None:
    """The client that waits longest is disconnected, and reset, so that the kernel frees what it has for it; the
    others get all that they asked for.
    """
    bound = 3 * (BLOCKED_BYTES + 2 * WRITE_BYTES)

    async def one() -> tuple[list[bool], list[int]]:
        served = Served(replying_claimed(LARGE), unsent_answers=UnsentAnswers(bound))
        async with served.listening() as port:
            clients = []
            for _ in range(12):
                clients.append(await unread_answer(served, port, STOPPING))
                await asyncio.sleep(0)
                assert served.edge.unsent_answers.held_bytes <= bound
            there = [one.getsockname() in blocked_by_name(served) for one in clients]
            sizes, loop = [], asyncio.get_running_loop()
            for client in clients:
                size = 0
                with contextlib.suppress(ConnectionResetError):
                    while part := await loop.sock_recv(client, 1 << 16):
                        size += len(part)
                    sizes.append(size)
                client.close()
            return there, sizes

    there, sizes = asyncio.run(one())
    kept = there.count(True)
    assert there == [False] * (12 - kept) + [True] * kept
    assert kept >= 3
    assert len(sizes) == kept, "all others were reset"
    assert min(sizes) > LARGE


def test_one_large_answer_may_exceed_the_bound() -> None:
    async def one() -> int:
        served, size = Served(replying_claimed(0), unsent_answers=UnsentAnswers(1)), 0
        async with served.listening() as port:
            client = await unread_answer(served, port, STOPPING)
            assert served.edge.unsent_answers.held_bytes > 1
            while part := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
                size += len(part)
            client.close()
        return size

    assert asyncio.run(one()) > LARGE


def test_clients_that_read_slowly_are_not_dropped_for_those_that_do_not_read() -> None:
    class Client:
        reads = is_dropped = False

        def drop(self) -> None:
            self.is_dropped = True

        def continue_reading(self) -> None:
            """Does nothing."""

        def has_read(self) -> bool:
            self.reads, found = False, self.reads
            return found

    answers, reader = UnsentAnswers(30), Client()
    answers.set_size(reader, 10)
    silent = [Client() for _ in range(9)]
    for each in silent:
        reader.reads = True
        answers.set_size(each, 10)
        assert answers.held_bytes <= 30
    assert not reader.is_dropped
    assert [each.is_dropped for each in silent] == [True] * 7 + [False] * 2
    reader.reads = False
    answers.set_size(last := Client(), 30)
    assert (reader.is_dropped, last.is_dropped) == (True, False)


def test_a_client_that_has_read_a_piece_counts_as_new() -> None:
    async def one() -> list[Any]:
        served = Served(replying_claimed(LARGE))
        async with served.listening() as port:
            reader, silent = [await unread_answer(served, port) for _ in range(2)]
            first, _ = order = cast(list[Connection], list(served.edge.unsent_answers._sizes))
            first.resume_writing()
            first.pause_writing()  # by the next piece, in the same turn of the loop
            await asyncio.sleep(0)  # a turn in which it is counted
            found = [order.index(cast(Connection, each)) for each in served.edge.unsent_answers._sizes]
            for client in (reader, silent):
                client.close()
            return found

    assert asyncio.run(one()) == [1, 0]


def test_a_connection_has_read_when_its_unsent_bytes_become_fewer() -> None:
    async def one() -> list[bool]:
        served = Served(replying_claimed(LARGE))
        async with served.listening() as port:
            client = await unread_answer(served, port)
            [connection] = connections(served)
            found = [connection.has_read()]
            waiting = connection.transport.get_write_buffer_size()
            while connection.transport.get_write_buffer_size() == waiting:
                with contextlib.suppress(BlockingIOError):
                    client.recv(1024)
                await asyncio.sleep(0)
            connection.unread_bytes = waiting  # also where a new piece has been written meanwhile
            connection.transport.get_write_buffer_size = lambda: waiting - 1  # type: ignore[method-assign]
            found += [connection.has_read(), connection.has_read()]
            client.close()
            return found

    assert asyncio.run(one()) == [False, True, False]


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="the kernel has no such limit")
def test_the_kernel_buffers_little_for_a_client_that_does_not_read() -> None:
    """The limit of the listener holds for each connection, which takes less than a half of its send buffer."""
    with bind_socket("127.0.0.1", 0) as listener, socket.socket() as client:
        listener.listen()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == UNSENT_LOW_WATER
            accepted.setblocking(False)
            taken = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    taken += accepted.send(b"x" * WRITE_BYTES)
            assert taken < accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2


def test_requests_that_wait_to_start_keep_little_of_what_follows() -> None:
    async def one() -> None:
        served = Served(replying(b"here", length=True), start_queue=StartQueue(0))
        async with served.listening() as port:
            client = await unread(port, GET)
            await until(lambda: len(connections(served)) == 1 and connections(served)[0] in served.edge.start_queue)
            [connection] = connections(served)
            await send_ahead(client, connection)
            assert len(connection.buffer) < 2 * SHORT_READ_BYTES
            client.close()

    asyncio.run(one())


def test_the_client_that_has_not_read_for_longest_is_disconnected() -> None:
    """More clients than connections send two requests each and read nothing; another one is answered, and only the
    first is disconnected.
    """

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b"here" if scope["path"] == "/small" else b"x" * LARGE
        await replying(body, length=True)(scope, receive, send)

    async def one() -> tuple[bytes, bool, int]:
        served = Served(app, max_connections=3)
        async with served.listening() as port:
            clients = []
            for count in range(1, 4):
                clients.append(await unread(port, GET + GET))
                await until(lambda count=count: blocked(served, count))  # type: ignore[misc]
            first = clients[0].getsockname()
            answer = await answers_to(port, STOPPING.replace(b"/ ", b"/small "))
            left = [one.transport.get_extra_info("peername") for one in connections(served)]
            for client in clients:
                client.close()
            return answer, first in left, len(left)

    answer, there, left = asyncio.run(one())
    assert answer.endswith(b"here")
    assert not there
    assert left >= 2


# Clients that disconnect, and a server that stops


def test_a_reset_connection_is_not_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """Its answer is sent while the rest of its body is still to come, and the connection cannot be shut down."""
    ready = asyncio.Event()
    ended: list[BaseException | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await ready.wait()
        try:
            await replying(b"no", length=True)(scope, receive, send)
        except BaseException as error:
            ended.append(error)
            raise
        ended.append(None)

    async def one() -> None:
        served = Served(app)
        async with served.listening() as port:
            client = await unread(port, b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nab")
            connection = await newest(served)
            connection.transport.pause_reading()  # so that only a write can detect that the client has disconnected
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            connection.write = lambda data: None  # type: ignore[assignment, method-assign]
            ready.set()
            await until(lambda: bool(ended) and not served.state.connections)

    asyncio.run(one())
    assert ended == [None]
    assert "mistake" not in caplog.text


def test_an_aborted_request_is_informed_that_the_server_stops(caplog: pytest.LogCaptureFixture) -> None:
    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def one() -> bytes:
        served = Served(waiting)
        async with served.listening() as port:
            asked = asyncio.create_task(answers_to(port, GET))
            await newest(served)
            for task in served.state.tasks:
                task.cancel()
            return await asked

    [answer] = answers(asyncio.run(one()))
    assert (answer.status, answer.message) == (503, "the server is shutting down")


def test_an_aborted_request_is_counted_as_stopped(tiny_generator: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = application(Registry([model(tiny_generator, "talker", "generate")], echo))
    receiving = cast(AppState, app.state.server).incoming_bodies

    async def one() -> Asked:
        asked = Asked("/v1/completions", b"")
        asked.incoming.get_nowait()
        asked.incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        task = asyncio.create_task(asked.run(app))
        await until(lambda: receiving.held_bytes > 0)
        task.cancel()
        await asyncio.wait([task])
        return asked

    with caplog.at_level(logging.INFO, "polyhead.http"):
        asked = asyncio.run(one())
    assert asked.sent[0]["status"] == 503
    assert orjson.loads(asked.body)["error"]["code"] == "stopped"
    [record] = [each for each in caplog.records if getattr(each, "status", 0)]
    assert "stopped" in record.getMessage()
    assert "internal_error" not in record.getMessage()


# Input in parts


def test_an_empty_line_may_come_in_two_segments() -> None:
    async def one() -> bytes:
        served = Served(replying(b"here", length=True))
        async with served.listening() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET)
            await reader.readuntil(b"here")
            writer.write(b"\r")
            [connection] = connections(served)
            await until(lambda: connection.buffer == b"\r" or connection.lingering)
            writer.write(b"\n" + STOPPING)
            return await asyncio.wait_for(reader.read(), 120)

    assert [answer.status for answer in answers(asyncio.run(one()))] == [200]


def test_empty_lines_before_a_request_are_few_however_they_are_cut() -> None:
    """Two of them come before each request; the third before one request is refused."""

    async def one() -> bytes:
        served = Served(replying(b"here", length=True))
        async with served.listening() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(b"\r\n\r\n" + GET)
                await reader.readuntil(b"here")
            [connection] = connections(served)
            for count in (1, 2):
                writer.write(b"\r\n")
                await until(lambda count=count: connection.empty_lines == count)  # type: ignore[misc]
            writer.write(b"\r\n" + GET)
            return await asyncio.wait_for(reader.read(), 120)

    assert [answer.status for answer in answers(asyncio.run(one()))] == [400]


def test_the_cost_of_empty_lines_does_not_grow_with_their_number() -> None:
    async def count(lines: int) -> int:
        connection = Served(replying()).connection()
        connection.buffer += b"\r\n" * lines

        def begin() -> None:
            with pytest.raises(UnreadableRequest):
                connection.begin_request()

        return count_steps(begin)

    assert asyncio.run(count(30_000)) < asyncio.run(count(3)) + 1000, "a step or more for each line"


def test_a_complete_body_is_not_requested_with_100_continue() -> None:
    """Its application waits for the client to disconnect after it has read the body."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        leaving = asyncio.create_task(receive())
        await asyncio.sleep(0)
        await replying(b"here", length=True)(scope, receive, send)
        await leaving

    asking = (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    )
    assert [answer.status for answer in answers(run(app, asking + b"{}"))] == [200]


# Memory for bodies


def test_slower_bodies_make_room_where_memory_is_short(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow bodies hold nearly all memory for requests.  Another one is answered, and the slowest is aborted."""
    app = application(Registry([model(tiny_generator, "talker", "generate")], echo))
    headroom = cast(AppState, app.state.server).headroom
    monkeypatch.setattr(headroom, "_free_bytes", 0)  # so that there is the least
    monkeypatch.setattr(headroom, "_reserved", 0)  # guides of other tests may be kept in caches
    small = orjson.dumps({"model": "talker", "prompt": "The fox"})
    size = (int(headroom.total) // BYTES_PER_BODY_BYTE - len(small) // 2) // 8

    async def one() -> tuple[list[Asked], Asked]:
        slow = [Asked("/v1/completions", b"") for _ in range(8)]
        for each in slow:
            each.incoming.get_nowait()
            each.incoming.put_nowait({"type": "http.request", "body": b" " * size, "more_body": True})
        tasks = [asyncio.create_task(each.run(app)) for each in slow]
        await until(lambda: headroom._reserved >= 8 * size * BYTES_PER_BODY_BYTE)
        quick = Asked("/v1/completions", small)
        await quick.run(app)
        for each in slow:
            each.drop()
        await asyncio.wait(tasks)
        return slow, quick

    slow, quick = asyncio.run(one())
    assert quick.sent[0]["status"] == 200
    assert [each.sent[0]["status"] for each in slow].count(408) == 1
    assert headroom._reserved == 0


def test_whole_requests_do_not_make_room_for_bodies() -> None:
    receiving, released = IncomingBodies(1 << 20), []
    with ExitStack() as held:
        slow, quick = (held.enter_context(receiving.open_body()) for _ in range(2))
        slow.release = lambda: released.append("slow")
        receiving.add_bytes(slow, 100)
        receiving.add_bytes(quick, 1000)
        assert not receiving.make_room(quick, 101)
        assert not slow.is_aborted
        assert receiving.make_room(quick, 100)
        assert (slow.is_aborted, quick.is_aborted, released) == (True, False, ["slow"])


def test_bodies_are_bounded_by_memory_too() -> None:
    """One body of the largest size is always accepted."""
    receiving = IncomingBodies(8000, lambda: 0)
    with ExitStack() as held:
        first, second = (held.enter_context(receiving.open_body()) for _ in range(2))
        receiving.add_bytes(first, 1000)
        assert not first.is_aborted
        receiving.add_bytes(second, 1)
        assert (first.is_aborted, second.is_aborted) == (True, False)


def test_incomplete_heads_are_bounded_together() -> None:
    """If there are too many bytes, the oldest incomplete head is dropped; the others go on."""
    begun = GET[:-2] + b"x: " + b"y" * 2000

    async def act() -> None:
        served = Served(replying(b"ok", length=True), buffered_input=BufferedInput(most=3 * len(begun) - 1))
        async with served.listening() as port:
            clients = []
            for kept in (1, 2, 2):
                clients.append(await asyncio.open_connection("127.0.0.1", port))
                clients[-1][1].write(begun)
                expected = kept * len(begun)
                await until(lambda expected=expected: served.edge.buffered_input.held_bytes == expected)  # type: ignore[misc]
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(clients[0][0].read(), 120) == b""
            for reader, writer in clients[1:]:
                writer.write(b"\r\nConnection: close\r\n\r\n")
                assert (await asyncio.wait_for(reader.read(), 120)).endswith(b"ok")
            assert served.edge.buffered_input.held_bytes == 0
            for _, writer in clients:
                writer.close()

    asyncio.run(act())


def test_the_error_of_headroom_has_the_missing_bytes() -> None:
    headroom = Headroom(0)
    headroom.reserve(int(headroom.total) - 10, "it")
    assert headroom.shortfall(10) == 0
    assert headroom.shortfall(15) == 5


# Connections without file descriptors


def test_connections_that_cannot_be_accepted_are_one_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    handler, loop = LoopErrors(lambda: now), asyncio.new_event_loop()
    context = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(errno.EMFILE, "Too many open files"),
    }
    for _ in range(100):
        handler(loop, context)
    assert caplog.text.count("Too many open files") == 1
    assert "Traceback" not in caplog.text
    now = loop_errors.LOG_INTERVAL_S
    handler(loop, context)
    assert caplog.text.count("Too many open files") == 2
    handler(loop, {"message": "another", "exception": OSError(errno.EMFILE, "Too many open files")})
    assert "another" in caplog.text
    loop.close()
