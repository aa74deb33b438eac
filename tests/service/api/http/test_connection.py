"""Single connections with small applications: which connections wait, which are closed to make room, how answers are
framed."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from polyhead.service.api.http.body_limits import IncomingBodies
from polyhead.service.api.http.connection import Connection
from polyhead.service.api.http.connection_limits import ConnectionLimits
from polyhead.service.api.http.request_head import read_head
from polyhead.service.api.shared.openai_errors import write_openai_error
from tests.support.raw import answers, chunk, chunked, post
from tests.support.scripted import Registry, application, echo, model, until

App = Callable[..., Awaitable[None]]
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
STOPPING = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class Served:
    """An application behind our connections; `refused` has the statuses of requests that never reached it."""

    def __init__(self, app: Any, **limits: Any) -> None:
        self.refused: list[int] = []
        known = {"header_seconds": 30, "keep_alive_seconds": 30, "write_seconds": 30, "max_connections": 100} | limits
        self.edge = ConnectionLimits(
            write_error=write_openai_error, count_refused=self.refused.append, count_cut_off=int, **known
        )
        self.state, self.config = ServerState(), uvicorn.Config(app, lifespan="off", log_config=None)

    def connection(self) -> Connection:
        return Connection(self.config, self.state, {}, edge=self.edge)

    @asynccontextmanager
    async def listening(self) -> Any:
        server = await asyncio.get_running_loop().create_server(self.connection, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]
            for connection in list(self.state.connections):
                connection.transport.abort()  # type: ignore[union-attr]
            for task in self.state.tasks:
                task.cancel()
            await asyncio.gather(*self.state.tasks, return_exceptions=True)


async def answers_to(port: int, content: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(content)
    try:
        return await asyncio.wait_for(reader.read(), 120)
    finally:
        writer.close()


def run(app: Any, content: bytes, **limits: Any) -> bytes:
    async def one() -> bytes:
        async with Served(app, **limits).listening() as port:
            return await answers_to(port, content)

    return asyncio.run(one())


def replying(*parts: bytes, status: int = 200, length: bool = False, pause: float = 0) -> App:
    """An application that sends `parts`, with a pause before each."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"%d" % sum(map(len, parts)))] if length else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for part in parts:
            await asyncio.sleep(pause)
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})

    return app


# How answers are framed


def test_an_answer_of_unknown_length_comes_in_chunks() -> None:
    content = run(replying(b"one", b"", b"two"), STOPPING)
    assert b"transfer-encoding: chunked\r\n" in content
    assert content.endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")


def test_http_1_0_answers_end_with_the_connection() -> None:
    content = run(replying(b"one", b"two"), b"GET / HTTP/1.0\r\n\r\n")
    assert b"transfer-encoding" not in content
    assert b"connection: close\r\n" in content
    assert content.endswith(b"\r\n\r\nonetwo")


@pytest.mark.parametrize("length", [True, False])
def test_to_head_nothing_follows_the_header(length: bool) -> None:
    content = run(replying(b"one", length=length), STOPPING.replace(b"GET", b"HEAD"))
    assert (b"content-length: 3\r\n" if length else b"transfer-encoding: chunked\r\n") in content
    assert content.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("status", [204, 304])
def test_statuses_without_a_body_have_no_length(status: int) -> None:
    [answer] = answers(run(replying(status=status), STOPPING))
    assert answer.status == status
    assert "transfer-encoding" not in answer.headers


def test_an_answer_may_take_longer_than_the_request_timeouts() -> None:
    times = {"header_seconds": 0.05, "keep_alive_seconds": 0.05, "write_seconds": 0.05}
    assert run(replying(b"slow", b"ly", pause=0.2), GET, **times).endswith(b"4\r\nslow\r\n2\r\nly\r\n0\r\n\r\n")


def test_line_breaks_in_header_values_are_rejected() -> None:
    async def forging(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"a\r\nset-cookie: b")]})

    [answer] = answers(run(forging, GET))
    assert answer.status == 500
    assert "set-cookie" not in answer.headers


def test_a_failing_application_is_answered_with_500() -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError("a secret")

    [answer] = answers(run(failing, GET))
    assert answer.status == 500
    assert answer.message == "the server made a mistake; its log says more"


def test_an_answer_that_fails_in_the_middle_is_not_terminated() -> None:
    async def breaking(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await asyncio.sleep(0.05)
        raise ZeroDivisionError

    async def one() -> bytes:
        async with Served(breaking).listening() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET)
            return await asyncio.wait_for(reader.read(), 120)

    assert asyncio.run(one()).endswith(b"3\r\none\r\n")


@pytest.mark.parametrize("malformed", [b"ZZ\r\n", b"2\r\nabc\r\n", b"0\r\nX\r\n\r\n"])
def test_what_follows_a_malformed_chunk_is_no_request(malformed: bytes) -> None:
    """Also where the application reads no body, and answers after the client has sent the rest."""
    ready, paths = asyncio.Event(), list[str]()

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        await ready.wait()
        await replying(b"here", length=True)(scope, receive, send)

    async def one() -> bytes:
        served = Served(waiting)
        async with served.listening() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET[:-2] + b"Transfer-Encoding: chunked\r\n\r\n" + malformed)
            connection = await newest(served)
            await until(lambda: connection.is_discarding)
            left = connection.discard_left
            rest = b"0\r\n\r\n" + GET.replace(b"/ ", b"/smuggled ")
            writer.write(rest)
            await until(lambda: connection.discard_left == left - len(rest))
            ready.set()
            return await asyncio.wait_for(reader.read(), 120)

    [answer] = answers(asyncio.run(one()))
    assert (answer.status, answer.headers["connection"], paths) == (200, "close", ["/"])


# Waiting


def test_unread_input_is_not_received() -> None:
    """Input that the application has not read stays with the client: of a body, and of pipelined requests."""

    async def sleeping(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(3600)

    async def kept_of(served: Served, port: int, begin: bytes) -> int:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begin)
        connection, sent = await newest(served), 0
        try:
            async with asyncio.timeout(0.5):
                while sent < 64 << 20:
                    writer.write(b"GET / HTTP/1.1\r\n" * 4096)
                    await writer.drain()
                    sent += 1 << 16
        except TimeoutError:
            pass
        kept = len(connection.buffer) + len(connection.cycle.body)  # type: ignore[union-attr]
        writer.transport.abort()
        return kept

    async def both() -> list[int]:
        served = Served(sleeping)
        async with served.listening() as port:
            begins = (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n", GET)
            return [await kept_of(served, port, begin) for begin in begins]

    assert max(asyncio.run(both())) <= 1 << 17


class LostTransport(asyncio.Transport):
    """A transport that has addresses until its socket is lost, as one of TLS."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._extra.get(name, default)  # type: ignore[attr-defined]

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


def test_a_request_has_its_addresses_after_its_socket_is_lost() -> None:
    async def one() -> dict[str, Any]:
        transport = LostTransport({"peername": ("10.0.0.7", 5), "sockname": ("10.0.0.1", 443), "sslcontext": True})
        connection = Served(echo).connection()
        connection.connection_made(transport)
        transport._extra.clear()  # type: ignore[attr-defined]
        assert connection.address == "10.0.0.7:5"
        connection.stop_read_timer()
        return connection.build_scope(read_head(GET))

    scope = asyncio.run(one())
    assert (scope["client"], scope["server"], scope["scheme"]) == (("10.0.0.7", 5), ("10.0.0.1", 443), "https")


async def newest(served: Served) -> Connection:
    async with asyncio.timeout(120):
        while not any(one.cycle for one in served.state.connections):  # type: ignore[union-attr]
            await asyncio.sleep(0.001)
    return next(one for one in served.state.connections if one.cycle)  # type: ignore[union-attr, return-value]


# Making room


def test_the_connection_that_is_idle_longest_is_closed() -> None:
    async def one() -> tuple[list[bytes], bytes, int]:
        served = Served(replying(b"here", length=True), max_connections=3)
        async with served.listening() as port:
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            idle[1][1].write(b"GET / HT")
            idle[0][1].write(GET)  # it is no longer the one that is idle longest
            await idle[0][0].readuntil(b"here")
            answer = await answers_to(port, GET[:-2] + b"Connection: close\r\n\r\n")
            gone = await asyncio.wait_for(idle[1][0].read(), 120)
            idle[2][1].write(STOPPING)
            left = await idle[2][0].read()
            return [gone, left], answer, len(served.refused)

    (gone, left), answer, refused = asyncio.run(one())
    assert gone == b""
    assert left.endswith(b"here")
    assert answer.endswith(b"here")
    assert not refused


def test_without_idle_connections_no_more_are_accepted() -> None:
    ready = asyncio.Event()

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        await ready.wait()
        await replying(b"here", length=True)(scope, receive, send)

    async def one() -> tuple[bytes, bytes]:
        served = Served(waiting, max_connections=1)
        async with served.listening() as port:
            first = asyncio.create_task(answers_to(port, STOPPING))
            await newest(served)
            second = await answers_to(port, STOPPING)
            ready.set()
            return await first, second

    first, second = asyncio.run(one())
    assert first.endswith(b"here")
    [answer] = answers(second)
    assert (answer.status, answer.json["error"]["code"]) == (503, "too_many_connections")


class FaultyBodies(IncomingBodies):
    """Incomplete bodies that cannot be compared with other connections."""

    def __len__(self) -> int:
        raise ZeroDivisionError


def test_a_new_connection_is_counted_and_has_its_timer_whatever_fails() -> None:
    """Otherwise it would stay open for ever, outside of the limit on connections."""

    async def connect() -> None:
        served = Served(echo, max_connections=1, incoming_bodies=FaultyBodies())
        first, second = served.connection(), served.connection()
        first.connection_made(LostTransport())
        with pytest.raises(ZeroDivisionError):
            second.connection_made(LostTransport())
        assert served.state.connections == {first, second}
        assert None not in (first.read_timer, second.read_timer)

    asyncio.run(connect())


def test_a_connection_ends_though_its_error_cannot_be_written() -> None:
    """Its head is not complete in time, and the error for that fails."""

    def fail(status: int) -> None:
        raise ZeroDivisionError

    async def connect() -> bytes:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        served = Served(echo, header_seconds=0.01)
        served.edge = dataclasses.replace(served.edge, count_refused=fail)
        async with served.listening() as port:
            return await answers_to(port, b"GET / HTTP/1.1\r\n")

    assert asyncio.run(connect()) == b""


# The server stops


def test_a_stopping_server_closes_idle_connections_and_announces_it_in_answers() -> None:
    async def one() -> tuple[bytes, bytes]:
        served = Served(replying(b"here", length=True, pause=0.1))
        async with served.listening() as port:
            idle, _ = await asyncio.open_connection("127.0.0.1", port)
            busy = asyncio.create_task(answers_to(port, GET))
            await newest(served)
            for connection in list(served.state.connections):
                connection.shutdown()
            return await asyncio.wait_for(idle.read(), 120), await busy

    idle, busy = asyncio.run(one())
    assert idle == b""
    assert b"here" in busy


def test_a_server_about_to_stop_closes_idle_connections() -> None:
    async def one() -> tuple[bytes, bytes]:
        served = Served(replying(b"here", length=True))
        async with served.listening() as port:
            idle, half, new = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            for reader, writer in (idle, half):
                writer.write(GET)
                assert (await reader.readuntil(b"here")).startswith(b"HTTP/1.1 200")
            half[1].write(GET[:5])
            await asyncio.sleep(0.05)
            for connection in list(served.state.connections):
                connection.stop_keep_alive()  # type: ignore[union-attr]
            assert await asyncio.wait_for(idle[0].read(), 120) == b""
            half[1].write(GET[5:])
            new[1].write(GET)
            return await asyncio.wait_for(half[0].read(), 120), await asyncio.wait_for(new[0].read(), 120)

    for last in asyncio.run(one()):
        assert b"connection: close\r\n" in last
        assert last.endswith(b"here")


# In our application


def test_an_invalid_body_gets_the_error_format_of_the_dialect(tiny_generator: Path) -> None:
    app = application(Registry([model(tiny_generator, "talker", "generate")], echo))
    parts = chunked(chunk(b"{"), b"nonsense\r\n", path=b"/predict")
    [answer] = answers(run(app, parts))
    assert answer.status in (400, 413, 422)
    assert answer.json.keys() == {"error", "error_type"}
    [answer] = answers(run(app, post(b'{"model":"talker","prompt":"The fox"}')))
    assert answer.status == 200
