"""HTTPS of the server itself, and clients behind proxies: real processes and real handshakes."""

import asyncio
import contextlib
import gc
import json
import signal
import socket
import ssl
import weakref
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from polyhead.service.api.http.connection import BLOCKED_BYTES, Connection
from polyhead.service.api.http.connection_limits import MAX_HANDSHAKES
from polyhead.service.api.http.request_cycle import WRITE_BYTES
from polyhead.service.api.http.tls import MAX_CONTROL_RECORDS, RECEIVE_BYTES, RecordCounter, TlsClient, read_certificate
from polyhead.service.config.settings import Settings, SettingsError
from polyhead.service.server.process import bind_socket, load_tls_context
from tests.service.api.http.test_connection import FaultyBodies, LostTransport, Served, replying
from tests.support.processes import PATIENCE, Process
from tests.support.scripted import until

TEXT = {"inputs": "a fox"}


class OpenTransport(LostTransport):
    """A transport that keeps what is written, and its protocol."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self._reads = b"", True
        self.protocol: Any = None

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True

    def is_reading(self) -> bool:
        return self._reads

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        """Does nothing."""


class ClosingTransport(OpenTransport):
    """The same, until it is aborted: then it tells its protocol, and forgets it."""

    def __init__(self, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self.protocol = protocol

    def abort(self) -> None:
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)
        self.protocol = None


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Paths of a certificate for localhost and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    for certificate in issued.cert_chain_pems:
        certificate.write_to_path(folder / "cert.pem", append=True)
    return str(folder / "cert.pem"), str(folder / "key.pem")


@pytest.fixture(scope="module")
def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture
def launch() -> Iterator[Callable[..., Process]]:
    launched: list[Process] = []

    def start(*arguments: str) -> Process:
        launched.append(Process(*arguments))
        return launched[-1]

    yield start
    for process in launched:
        process.child.kill()
        process.child.wait()


def client_of(server: Process, context: ssl.SSLContext) -> httpx.Client:
    with httpx.Client(base_url=server.url, verify=context, timeout=PATIENCE) as probe:
        server.until(lambda: probe.get("/readyz").status_code == 200)
    return httpx.Client(base_url=server.url, verify=context, timeout=PATIENCE)


def test_requests_and_streams_over_tls(
    launch: Callable[..., Process], files: tuple[str, str], trusting: ssl.SSLContext, tiny_generator: Path
) -> None:
    server = launch(f"chat={tiny_generator}", "--tls-cert", files[0], "--tls-key", files[1])
    assert server.url.startswith("https://127.0.0.1:")
    asked = {"model": "chat", "prompt": "The fox", "max_tokens": 40, "ignore_eos": True}
    with client_of(server, trusting) as client:
        whole = client.post("/v1/completions", json=asked | {"temperature": 0}).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=asked | {"temperature": 0, "stream": True}) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]", lines
        assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == whole
        large = client.post("/v1/completions", content=b"x" * (9 << 20))
        assert large.status_code in (400, 413)  # answered before the whole answer was read
        with httpx.Client(verify=True, timeout=PATIENCE) as stranger, pytest.raises(httpx.ConnectError):
            stranger.get(server.url)
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http"), timeout=PATIENCE)
    server.child.send_signal(signal.SIGTERM)
    assert server.child.wait(PATIENCE) == 0


def test_a_request_sent_with_the_end_of_the_handshake_is_answered(
    launch: Callable[..., Process], files: tuple[str, str], trusting: ssl.SSLContext, tiny_classifier: Path
) -> None:
    """The client's last handshake message and its first requests are in one segment."""
    server = launch(f"judge={tiny_classifier}", "--tls-cert", files[0], "--tls-key", files[1])
    client_of(server, trusting).close()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = trusting.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    request = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), PATIENCE) as raw:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                raw.sendall(outgoing.read())
                incoming.write(raw.recv(1 << 16))
        tls.write(request * 3)
        raw.sendall(outgoing.read())
        answer = b""
        while answer.count(b"HTTP/1.1 200 OK") < 3:
            incoming.write(raw.recv(1 << 16))
            try:
                while piece := tls.read(1 << 16):
                    answer += piece
            except ssl.SSLWantReadError:
                continue


def test_incomplete_handshakes_are_closed(
    launch: Callable[..., Process], files: tuple[str, str], trusting: ssl.SSLContext, tiny_classifier: Path
) -> None:
    limits = ("--max-connections", "8", "--header-seconds", "1")
    server = launch(f"judge={tiny_classifier}", "--tls-cert", files[0], "--tls-key", files[1], *limits)
    client_of(server, trusting).close()
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    silent = [socket.create_connection(address, PATIENCE) for _ in range(20)]
    with httpx.Client(base_url=server.url, verify=trusting, timeout=PATIENCE) as client:
        assert client.post("/predict", json=TEXT).status_code == 200
        for one in silent:
            one.settimeout(PATIENCE)
            try:
                while one.recv(1 << 12):
                    pass
            except ConnectionResetError:
                pass  # it made room
            one.close()
        assert client.post("/predict", json=TEXT).status_code == 200


def test_a_new_handshake_is_counted_and_has_its_timer_whatever_fails(files: tuple[str, str]) -> None:
    async def connect() -> None:
        served = Served(replying(), max_connections=1, incoming_bodies=FaultyBodies())
        first, second = (
            TlsClient(read_certificate(*files), served.connection, served.state, served.edge) for _ in range(2)
        )
        first.connection_made(LostTransport())
        with pytest.raises(ZeroDivisionError):
            second.connection_made(LostTransport())
        assert served.state.connections == {first, second}
        for client in (first, second):
            assert client.timer.when() > 0

    asyncio.run(connect())


@pytest.fixture(scope="module")
def hello() -> bytes:
    """What a client sends first."""
    content = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), content, server_hostname="localhost").do_handshake()
    return content.read()


def greet(client: TlsClient, content: bytes, transport: OpenTransport | None = None) -> None:
    """The client has connected, and sent `content`."""
    client.connection_made(transport or OpenTransport())
    client.get_buffer(-1)[: len(content)] = content
    client.buffer_updated(len(content))


def test_few_handshakes_go_on_in_a_turn_of_the_loop(
    files: tuple[str, str], hello: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many clients say hello at once. Those that leave while they wait are forgotten."""
    steps, turn, number = list[int](), 0, 5 * MAX_HANDSHAKES
    real = SSLProtocol.buffer_updated

    def step(protocol: Any, count: int) -> None:
        steps.append(turn)
        real(protocol, count)

    monkeypatch.setattr(SSLProtocol, "buffer_updated", step)

    async def run() -> None:
        nonlocal turn
        served, context = Served(replying()), read_certificate(*files)
        clients = [TlsClient(context, served.connection, served.state, served.edge) for _ in range(number)]
        for client in clients:
            greet(client, hello)
        assert not any(cast(OpenTransport, each.transport).is_reading() for each in clients[MAX_HANDSHAKES:])
        for client in clients[-2:]:
            client.connection_lost(None)
        while len(steps) < number - 2:
            turn += 1
            await asyncio.sleep(0)
        assert all(cast(OpenTransport, each.transport).is_reading() for each in clients[:-2])
        assert all(cast(OpenTransport, each.transport).written for each in clients[:-2])
        for client in clients:
            client.connection_lost(None)

    asyncio.run(run())
    assert max(Counter(steps).values()) == MAX_HANDSHAKES
    assert len(steps) == number - 2


def test_few_handshakes_are_begun_and_not_complete(files: tuple[str, str], hello: bytes) -> None:
    """A fourth of the connections: the one that was begun first makes room. Before its first bytes a client has none,
    and what an ended one had is freed at once, not by a garbage collection.
    """
    made = list[weakref.ref[Any]]()

    class CountingContext(ssl.SSLContext):
        def wrap_bio(self, *args: Any, **named: Any) -> ssl.SSLObject:
            made.append(weakref.ref(found := super().wrap_bio(*args, **named)))
            return found

    async def run() -> None:
        served = Served(replying(), max_connections=80)
        context = CountingContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*files)
        clients = [TlsClient(context, served.connection, served.state, served.edge) for _ in range(60)]
        for client in clients[:10]:
            client.connection_made(ClosingTransport(client))
        assert not made
        for client in clients[10:]:
            greet(client, hello, ClosingTransport(client))
        while len(made) < 50:
            await asyncio.sleep(0)
        assert served.edge.max_handshakes == 20
        assert list(served.edge.handshakes) == clients[-20:]
        await asyncio.sleep(0)
        assert sum(each() is not None for each in made) == 20
        assert served.state.connections == {*clients[:10], *clients[-20:]}
        assert not any(client.timer.cancelled() for client in clients[-20:])
        for client in (*clients[:10], *clients[-20:]):
            client.drop()
        assert not served.state.connections
        assert not served.edge.handshakes
        assert not served.edge.silent_since

    asyncio.run(run())


def test_an_encrypted_answer_that_is_not_read_is_counted(files: tuple[str, str], trusting: ssl.SSLContext) -> None:
    """Also where it fits into one write: it waits in the transport below the TLS layer then."""
    body = b"x" * WRITE_BYTES

    async def run() -> int:
        served = Served(replying(body, length=True))
        context, loop = read_certificate(*files), asyncio.get_running_loop()
        with bind_socket("127.0.0.1", 0) as listener:
            server = await loop.create_server(
                lambda: TlsClient(context, served.connection, served.state, served.edge), sock=listener
            )
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await loop.sock_connect(client, listener.getsockname())
                reader, writer = await asyncio.open_connection(
                    sock=client, ssl=trusting, server_hostname="localhost", limit=1024
                )
                below = cast(Any, writer.transport)._ssl_protocol._transport  # the TLS layer would read 256 KiB ahead
                below.pause_reading()
                writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await until(lambda: served.edge.unsent_answers.held_bytes > 0)
                held = served.edge.unsent_answers.held_bytes
                below.resume_reading()
                await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(len(body)) == body
                await until(lambda: served.edge.unsent_answers.held_bytes == 0)
                writer.close()
            await until(lambda: not served.state.connections)
            server.close()
        return held

    assert asyncio.run(asyncio.wait_for(run(), PATIENCE)) > BLOCKED_BYTES + WRITE_BYTES // 4


def test_a_port_for_probes_stays_plain(
    launch: Callable[..., Process], files: tuple[str, str], tiny_classifier: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = launch(
        f"judge={tiny_classifier}", "--tls-cert", files[0], "--tls-key", files[1], "--probe-port", str(port)
    )
    assert server.url
    assert httpx.get(f"http://127.0.0.1:{port}/livez", timeout=PATIENCE).status_code == 200


def test_invalid_certificate_files_are_named(files: tuple[str, str], tmp_path: Path) -> None:
    text, other = tmp_path / "text.pem", tmp_path / "other.pem"
    text.write_text("no certificate")
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(other)
    for settings, message in (
        ({"tls_cert": str(tmp_path / "none.pem")}, "tls_cert: there is no file"),
        ({"tls_cert": files[0], "tls_key": str(tmp_path / "none.pem")}, "tls_key: there is no file"),
        ({"tls_cert": str(text)}, "tls_cert: is no PEM certificate that fits the private key"),
        ({"tls_cert": files[0], "tls_key": str(other)}, "tls_cert: is no PEM certificate that fits the private key"),
    ):
        with pytest.raises(SettingsError, match=message):
            load_tls_context(Settings(**settings))
    assert load_tls_context(Settings(tls_cert=files[0], tls_key=files[1])) is not None


@pytest.mark.parametrize(("trusted", "client"), [("127.0.0.0/8", "203.0.113.7"), ("10.0.0.0/8", "127.0.0.1")])
def test_only_trusted_proxies_name_a_client(
    launch: Callable[..., Process], tiny_classifier: Path, trusted: str, client: str
) -> None:
    server = launch(f"judge={tiny_classifier}", "--proxy-headers", trusted, "--log-format", "json")
    server.ready()
    headers = {"X-Forwarded-For": "198.51.100.1, 203.0.113.7", "X-Forwarded-Proto": "https"}
    httpx.post(f"{server.url}/predict", json=TEXT, headers=headers, timeout=PATIENCE).raise_for_status()
    line = server.until(lambda: next((line for line in server.lines if line.get("path") == "/predict"), None))
    assert line["client"] == client


@pytest.mark.parametrize("value", ["10.0.0.1/8", "proxy.example.com", "10.0.0.0/40"])
def test_what_is_no_address_of_a_proxy_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="must be an IP address or a network"):
        Settings(proxy_headers=value)


# Limits of TLS connections


class KeyUpdates:
    """Encrypts TLS 1.3 records of a client whose first traffic secret is in `key_log` (RFC 8446, sections 4.6.3, 7)."""

    def __init__(self, key_log: Path) -> None:
        fields = (line.split() for line in key_log.read_text().splitlines())
        self.secret = next(bytes.fromhex(line[2]) for line in fields if line[0] == "CLIENT_TRAFFIC_SECRET_0")
        self.hash = {32: hashes.SHA256(), 48: hashes.SHA384()}[len(self.secret)]
        self.sent = 0  # records under the current secret

    def derive(self, label: bytes, length: int) -> bytes:
        name = b"tls13 " + label
        info = length.to_bytes(2, "big") + bytes([len(name)]) + name + b"\0"
        return HKDFExpand(self.hash, length, info).derive(self.secret)

    def encrypt(self, content: bytes, kind: int) -> bytes:
        nonce = (int.from_bytes(self.derive(b"iv", 12), "big") ^ self.sent).to_bytes(12, "big")
        header = b"\x17\x03\x03" + (len(content) + 17).to_bytes(2, "big")
        self.sent += 1
        key = AESGCM(self.derive(b"key", 16 if len(self.secret) == 32 else 32))
        return header + key.encrypt(nonce, content + bytes([kind]), header)

    def update_key(self) -> bytes:
        record = self.encrypt(b"\x18\0\0\1\0", 22)
        self.secret, self.sent = self.derive(b"traffic upd", len(self.secret)), 0
        return record


class RawClient:
    """A TLS client that sends the records itself."""

    def __init__(self, server: Process, context: ssl.SSLContext) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname="127.0.0.1")
        self.raw = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), PATIENCE)
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self.raw.sendall(self.outgoing.read())
                self.incoming.write(self.raw.recv(1 << 16))
        self.raw.sendall(self.outgoing.read())

    def read(self) -> bytes:
        """The next data; empty at the end of the connection."""
        while True:
            try:
                return self.tls.read(1 << 16)
            except ssl.SSLWantReadError:
                try:
                    received = self.raw.recv(1 << 16)
                except ConnectionError:
                    return b""
                if not received:
                    return b""
                self.incoming.write(received)
            except ssl.SSLZeroReturnError:
                return b""


@pytest.fixture
def logging_keys(authority: trustme.CA, tmp_path: Path) -> ssl.SSLContext:
    """A client's context for TLS 1.3 with AES that writes its secrets to `keys.txt`."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.keylog_filename = str(tmp_path / "keys.txt")
    return context


REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("with_data", [False, True])
def test_a_client_that_only_updates_its_keys_is_disconnected(
    launch: Callable[..., Process],
    files: tuple[str, str],
    trusting: ssl.SSLContext,
    logging_keys: ssl.SSLContext,
    tiny_classifier: Path,
    tmp_path: Path,
    with_data: bool,
) -> None:
    server = launch(f"judge={tiny_classifier}", "--tls-cert", files[0], "--tls-key", files[1])
    client_of(server, trusting).close()
    client = RawClient(server, logging_keys)
    records = KeyUpdates(tmp_path / "keys.txt")
    for _ in range(2):  # few are allowed
        client.raw.sendall(b"".join(records.update_key() for _ in range(20)) + records.encrypt(REQUEST, 23))
        assert client.read().startswith(b"HTTP/1.1 200")
    data = records.encrypt(REQUEST[:1], 23) if with_data else b""
    client.raw.sendall(data + b"".join(records.update_key() for _ in range(64)))
    assert client.read() == b""
    server.until(lambda: any("too many TLS records without data: 127.0.0.1:" in str(line) for line in server.lines))


def test_many_small_records_of_a_request_are_answered(
    launch: Callable[..., Process],
    files: tuple[str, str],
    trusting: ssl.SSLContext,
    tiny_classifier: Path,
) -> None:
    server = launch(f"judge={tiny_classifier}", "--tls-cert", files[0], "--tls-key", files[1])
    client_of(server, trusting).close()
    client = RawClient(server, trusting)
    body = b'{"inputs": "a fox' + b" " * 5000 + b'"}'
    content = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    content += b"Content-Length: %d\r\n\r\n" % len(body) + body + REQUEST * 200
    for byte in content:
        client.tls.write(bytes([byte]))
    client.raw.sendall(client.outgoing.read())
    answer = b""
    while answer.count(b"HTTP/1.1 200 OK") < 201:
        piece = client.read()
        assert piece, answer[-500:]
        answer += piece


def test_a_client_that_does_not_answer_the_closing_message_makes_room(
    launch: Callable[..., Process], files: tuple[str, str], trusting: ssl.SSLContext, tiny_classifier: Path
) -> None:
    limits = ("--max-connections", "8", "--write-seconds", "600")
    server = launch(f"judge={tiny_classifier}", "--tls-cert", files[0], "--tls-key", files[1], *limits)
    client_of(server, trusting).close()
    clients = [RawClient(server, trusting) for _ in range(8)]
    for client in clients:
        client.tls.write(REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        client.raw.sendall(client.outgoing.read())
    for client in clients:
        assert client.read().startswith(b"HTTP/1.1 200")
    with httpx.Client(base_url=server.url, verify=trusting, timeout=PATIENCE) as another:
        assert another.get("/livez").status_code == 200
    for client in clients:  # without need for room, too, they are closed
        client.raw.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionError):
            while client.raw.recv(1 << 12):
                pass


def test_buffers_of_a_tls_connection_are_small(files: tuple[str, str], trusting: ssl.SSLContext) -> None:
    async def one() -> None:
        served = Served(replying(b"one", length=True))
        clients: list[TlsClient] = []

        def accept() -> TlsClient:
            clients.append(TlsClient(read_certificate(*files), served.connection, served.state, served.edge))
            return clients[-1]

        server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
            writer.write(REQUEST)
            assert await reader.readuntil(b"one")
            [connection] = served.state.connections
            assert isinstance(connection, Connection)
            handshake = cast(Any, clients[0].handshake)
            assert len(handshake.get_buffer(1 << 20)) == RECEIVE_BYTES
            assert not handshake._ssl_buffer  # of its own
            assert cast(Any, connection.transport).get_read_buffer_limits()[1] == RECEIVE_BYTES
            held = weakref.ref(handshake)
            del handshake, connection
            clients.clear()
            gc.disable()
            try:
                writer.close()
                await until(lambda: held() is None)  # freed at once, not by a garbage collection
            finally:
                gc.enable()
            assert not served.state.connections

    asyncio.run(one())


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_records_are_counted_however_they_are_cut(step: int) -> None:
    stream = b"".join(b"\x17\x03\x03" + size.to_bytes(2, "big") + bytes(size) for size in [0, 1, 300, 5, 0] * 60)
    records, pieces = RecordCounter(), list[bytes]()
    for first in range(0, len(stream), step):
        before = records.count
        for piece in records.split(stream[first : first + step]):
            pieces.append(piece)
            assert records.count - before <= MAX_CONTROL_RECORDS
            before = records.count
    assert records.count == 300
    assert b"".join(pieces) == stream
