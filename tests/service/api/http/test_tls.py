"""HTTPS of the server itself, and clients behind proxies: real processes and real handshakes."""

import json
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from polyhead.service.config.settings import Settings, SettingsError
from polyhead.service.server.process import certificate_of
from tests.support.processes import PATIENCE, Process

TEXT = {"inputs": "a fox"}


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
        assert large.status_code in (400, 413)  # answered before all of it was read
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


def test_handshakes_that_do_not_go_on_make_room_and_end(
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


def test_files_that_make_no_certificate_are_named(files: tuple[str, str], tmp_path: Path) -> None:
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
            certificate_of(Settings(**settings))
    assert certificate_of(Settings(tls_cert=files[0], tls_key=files[1])) is not None


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
