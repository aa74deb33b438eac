"""Requests of web pages: hosts, origins, content types, and CORS where it is allowed.  tests/browser uses a browser."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import orjson
import pytest
from fastapi import FastAPI
from starlette.datastructures import Headers

from polyhead.service.api.access.origins import ALLOWED_METHODS, FORM_TYPES, OriginPolicy
from polyhead.service.api.app import find_dialect
from polyhead.service.config.flags import parse_flags
from polyhead.service.config.settings import Settings, SettingsError, read_settings
from polyhead.service.core.errors import MisdirectedRequest
from polyhead.service.core.model import Model
from tests.service.api.test_app import call, routes, server_of
from tests.support.processes import Process
from tests.support.raw import Said, said
from tests.support.scripted import WAIT, Connection, Registry, application, echo, model, until
from tests.support.steps import count_steps

OURS, FOREIGN, FRIEND = "http://testserver", "https://evil.example", "https://app.example.com"
TALK = {"model": "talker", "messages": [{"role": "user", "content": "The fox"}]}
GO_ON = {"model": "talker", "prompt": "The fox"}
FILL = {"name": "talker", "alias": "a", "version": "1", "task": "text-generation"}
FILL |= {"file_id": "f", "batch_id": "b", "response_id": "r"}
ASK = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
REFUSED = (
    {"Origin": FOREIGN},
    {"Origin": "null"},
    {"Origin": "http://testserver:8001"},
    {"Origin": "http://testserver.evil.example"},
    {"Origin": "http://evil@testserver"},
    {"Origin": "ftp://testserver"},
    {"Origin": ""},
    {"Origin": FOREIGN, "Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
    {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
)


@pytest.fixture(scope="module")
def talker(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate")


@pytest.fixture
def app(talker: Model) -> FastAPI:
    return application(Registry([talker], echo))


def cors(talker: Model, origins: str = FRIEND, **settings: Any) -> FastAPI:
    return application(Registry([talker], echo), cors_origins=origins, **settings)


def every_route(app: FastAPI) -> Iterator[tuple[str, str]]:
    for route in routes(app):
        path = route.path.replace(":path", "").format(**FILL)
        yield from ((method, path) for method in sorted(route.methods or ()))


def message(path: str, answer: httpx.Response) -> str:
    """The error message in the format of the dialect that owns the path."""
    said = answer.json()
    match find_dialect(path).name:
        case "rerank":
            return str(said["message"])
        case "systemone" | "Anthropic":
            return str(said["error"]["message"])
        case name if name.startswith("OpenAI"):
            return str(said["error"]["message"])
        case _:
            return str(said["error"])


# Hosts, by a real server on a loopback address


@pytest.fixture(scope="module")
def local(tiny_classifier: Path) -> Iterator[Process]:
    yield from serving(f"judge={tiny_classifier}", "--api-key", "s3cret")


@pytest.fixture(scope="module")
def named(tiny_classifier: Path) -> Iterator[Process]:
    hosts = ("--allowed-hosts", "Models.Example.com, *.inner.example,10.0.0.5", "--cors-origins", "*")
    yield from serving(f"judge={tiny_classifier}", *hosts)


def serving(*flags: str) -> Iterator[Process]:
    process = Process(*flags)
    try:
        process.ready()
        yield process
    finally:
        process.child.kill()
        process.child.wait()


def asked(server: Process, *fields: str, first: str = "GET /livez HTTP/1.1", body: bytes = b"") -> Said:
    lines = [first, *fields, "Connection: close", f"Content-Length: {len(body)}", "", ""]
    [answer] = said(int(server.url.rpartition(":")[2]), "\r\n".join(lines).encode() + body)
    return answer


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:1",
        "localhost.",
        "app.localhost:8000",
        "127.0.0.1:8000",
        "127.9.9.9",
        "[::1]",
        "[::1]:80",
    ],
)
def test_a_server_of_this_machine_answers_to_its_names(local: Process, host: str) -> None:
    assert asked(local, f"Host: {host}").status == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "localhos", "*"),
        *("10.0.0.5", "0.0.0.0:80", "[2001:db8::1]:80"),
    ],
)
def test_a_server_of_this_machine_answers_to_no_other_name(local: Process, host: str) -> None:
    """On every route, before the key and the body are checked."""
    for first in ("GET /livez HTTP/1.1", "GET /docs HTTP/1.1", "GET /metrics HTTP/1.1", "GET /nowhere HTTP/1.1"):
        answer = asked(local, f"Host: {host}", first=first)
        assert answer.status == 421
        assert "allowed_hosts" in answer.message
        assert f"Host: '{host.partition(':')[0] if host[0] != '[' else '2001:db8::1'}'" in answer.message
    for origin in ((), (f"Origin: http://{host}",)):  # as a page does after its name was rebound
        answer = asked(local, f"Host: {host}", *origin, first="POST /predict HTTP/1.1", body=b"x")
        assert answer.status == 421
        assert answer.json.keys() == {"error", "error_type"}
        assert len(answer.headers["x-request-id"]) == 32


def test_the_host_of_the_target_is_the_one_that_counts(local: Process) -> None:
    port = local.url.rpartition(":")[2]
    ours, foreign = f"GET http://127.0.0.1:{port}/livez HTTP/1.1", "GET http://evil.example/livez HTTP/1.1"
    assert asked(local, "Host: evil.example", first=ours).status == 200
    assert asked(local, f"Host: 127.0.0.1:{port}", first=foreign).status == 421
    user = asked(local, "Host: localhost", first="GET http://localhost@evil.example/livez HTTP/1.1")
    assert user.status == 400
    assert "no user" in user.message
    assert asked(local, first="GET /livez HTTP/1.0").status == 200
    assert asked(local, first="GET http://evil.example/livez HTTP/1.0").status == 421


def test_names_that_are_allowed_are_answered_to(named: Process) -> None:
    for host in (
        "models.example.com",
        "MODELS.example.com:8000",
        "models.example.com.",
        "a.b.inner.example",
        "10.0.0.5",
    ):
        assert asked(named, f"Host: {host}").status == 200, host
    assert named.get("/livez").status_code == 200, "by the address of the connection"
    for host in ("example.com", "inner.example", "xinner.example", "a.models.example.com", "10.0.0.6"):
        assert asked(named, f"Host: {host}").status == 421, host


def test_a_server_without_origin_checks_logs_a_warning(named: Process) -> None:
    assert "cors_origins is *: any web page that a user opens may use the models" in named.log


def scope(address: str) -> dict[str, Any]:
    return {"type": "http", "server": (address, 8000)}


@pytest.mark.parametrize("host", ["", ".", ":80", ".:80", "[]"])
def test_an_empty_name_is_no_name_of_the_server(host: str) -> None:
    origins = OriginPolicy(Settings(allowed_hosts=("models.example.com",)))
    origins.check_host(Headers({}), scope("10.1.2.3"))  # HTTP/1.0
    with pytest.raises(MisdirectedRequest):
        origins.check_host(Headers({"host": host}), scope("10.1.2.3"))


def test_a_server_of_the_network_answers_to_any_name_unless_some_are_allowed() -> None:
    anywhere = OriginPolicy(Settings())
    anywhere.add_bound_address("0.0.0.0", "0.0.0.0")
    anywhere.check_host(Headers({"host": "whatever:1"}), scope("10.1.2.3"))
    anything = OriginPolicy(Settings(allowed_hosts=("*",)))
    anything.add_bound_address("127.0.0.1", "127.0.0.1")
    anything.check_host(Headers({"host": "whatever:1"}), scope("127.0.0.1"))
    bound = OriginPolicy(Settings())
    bound.add_bound_address("my-machine", "127.0.1.1")
    bound.check_host(Headers({"host": "My-Machine:8000"}), scope("127.0.1.1"))


@pytest.mark.parametrize("end", ["inner.example", "other.example"])
def test_the_cost_of_a_host_does_not_grow_with_its_dots(end: str) -> None:
    origins = OriginPolicy(Settings(allowed_hosts=("models.example.com", "*.inner.example")))

    def check(dots: int) -> None:
        with contextlib.suppress(MisdirectedRequest):
            origins.check_host(Headers({"host": f"x{'.' * dots}{end}"}), scope("10.1.2.3"))

    short, long = (count_steps(partial(check, dots)) for dots in (1, 100))
    assert long <= short + 20


@pytest.mark.parametrize(
    ("address", "host"),
    [("10.1.2.3", "10.1.2.3:8000"), ("::ffff:10.1.2.3", "10.1.2.3:8000"), ("fd00::3", "[fd00::3]:8000")],
)
def test_probes_that_ask_a_pod_by_its_address_are_answered(address: str, host: str) -> None:
    origins = OriginPolicy(Settings(allowed_hosts=("models.example.com",)))
    origins.add_bound_address("0.0.0.0", "0.0.0.0")
    origins.check_host(Headers({"host": host}), scope(address))
    with pytest.raises(MisdirectedRequest):
        origins.check_host(Headers({"host": host}), scope("10.9.9.9"))


# Origins


@pytest.mark.parametrize("headers", REFUSED, ids=lambda headers: "-".join(headers.values()))
def test_a_page_of_another_origin_may_use_no_route(app: FastAPI, headers: dict[str, str]) -> None:
    for method, path in every_route(app):
        answer = call(app, method, path, headers=headers)
        assert answer.status_code == 403, (method, path)
        assert "access-control-allow-origin" not in answer.headers
        if method != "HEAD":
            assert "cors_origins" in message(path, answer)
    registry = cast(Registry, server_of(app).registry)
    answer = call(app, "POST", "/v1/completions", json=GO_ON, headers=headers)
    assert answer.json()["error"]["code"] == "origin_not_allowed"
    assert next(iter(headers.values())) in answer.json()["error"]["message"]
    assert not registry.requests


def test_two_origin_headers_are_rejected(app: FastAPI) -> None:
    headers = [("Origin", OURS), ("Origin", FOREIGN)]
    assert call(app, "POST", "/v1/completions", json=GO_ON, headers=headers).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": OURS},
        {"Origin": "HTTP://TestServer"},
        {"Origin": "https://testserver"},  # a proxy speaks TLS
        {"Host": "testserver:8000", "Origin": "http://testserver:8000"},
        {"Host": "testserver:443", "Origin": "https://testserver"},
        {"Host": "[::1]:8000", "Origin": "http://[::1]:8000"},
        {"Host": "backend:8000", "Origin": "https://public.example", "Sec-Fetch-Site": "same-origin"},  # a proxy, too
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Mode": "cors"},  # Node's fetch
    ],
    ids=str,
)
def test_own_pages_and_programs_are_allowed(app: FastAPI, headers: dict[str, str]) -> None:
    assert call(app, "POST", "/v1/completions", json=GO_ON, headers=headers).status_code == 200
    assert call(app, "GET", "/readyz", headers=headers).status_code == 200


def test_a_link_on_another_page_may_be_followed(app: FastAPI) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    for path in ("/", "/docs", "/v1/models"):
        assert call(app, "GET", path, headers=headers).status_code == 200
    assert call(app, "POST", "/v1/completions", json=GO_ON, headers=headers).status_code == 403


def test_a_refusal_comes_before_the_key_and_the_body(talker: Model) -> None:
    app = application(Registry([talker], echo), api_key="s3cret")

    async def run() -> Connection:
        connection = Connection("/v1/completions", b"{")
        connection.scope["headers"] += [(b"origin", FOREIGN.encode())]  # type: ignore[operator]
        await connection.run(app)
        assert connection.incoming.qsize() == 1, "the body was read"
        return connection

    assert asyncio.run(run()).sent[0]["status"] == 403


# CORS


def preflight(app: FastAPI, origin: str, path: str = "/v1/chat/completions", **more: str) -> httpx.Response:
    return call(app, "OPTIONS", path, headers={"Origin": origin, **ASK, **more})


def shared(answer: httpx.Response, origin: str = FRIEND) -> bool:
    """Whether a page of `origin` may read the answer and the headers that clients use."""
    exposed = {name.strip().lower() for name in answer.headers.get("access-control-expose-headers", "").split(",")}
    assert answer.headers.get_list("access-control-allow-origin") in ([origin], [])
    assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= exposed or not exposed - {""}
    assert "access-control-allow-credentials" not in answer.headers
    return "access-control-allow-origin" in answer.headers and "x-request-id" in exposed


def test_a_preflight_is_answered_without_key_place_or_route(talker: Model) -> None:
    app = cors(talker, f"{FRIEND},http://127.0.0.1:3000", api_key="s3cret", max_requests=1)
    for path, _ in {path: method for method, path in every_route(app)}.items():
        answer = preflight(app, FRIEND, path)
        assert (answer.status_code, answer.content) == (204, b"")
        assert shared(answer)
        assert answer.headers["access-control-allow-methods"] == ALLOWED_METHODS
        assert answer.headers["access-control-allow-headers"] == ASK["Access-Control-Request-Headers"]
        assert answer.headers["access-control-max-age"] == "7200"
        assert answer.headers["vary"] == "Origin"
        assert "access-control-allow-private-network" not in answer.headers
    wanted = {"Access-Control-Request-Headers": "x-api-key, anthropic-version, x-request-id, x-stainless-lang"}
    answer = preflight(app, "http://127.0.0.1:3000", **wanted, **{"Access-Control-Request-Private-Network": "true"})
    assert answer.headers["access-control-allow-origin"] == "http://127.0.0.1:3000"
    assert answer.headers["access-control-allow-headers"] == wanted["Access-Control-Request-Headers"]
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert call(app, "GET", "/metrics").text.count('polyhead_rejections_total{code="overloaded"}') == 0


def test_a_preflight_of_another_origin_is_refused(app: FastAPI, talker: Model) -> None:
    for served in (app, cors(talker)):
        for origin in (FOREIGN, "null", f"{FRIEND}.evil.example", f"{FRIEND}:8443", FRIEND.replace("https", "http")):
            answer = preflight(served, origin)
            assert answer.status_code == 403
            assert not [name for name in answer.headers if name.startswith("access-control")]


def test_other_options_requests_are_not_preflights(talker: Model) -> None:
    app = cors(talker)
    for headers in ({"Origin": FRIEND}, ASK, {"Origin": OURS, **ASK}):
        answer = call(app, "OPTIONS", "/v1/models", headers=headers)
        assert (answer.status_code, answer.headers["allow"]) == (204, "GET, OPTIONS")
        assert "access-control-allow-methods" not in answer.headers
    forged = preflight(app, FRIEND, **{"Access-Control-Request-Headers": "a b: (c)"})
    assert "access-control-allow-headers" not in forged.headers


def test_an_allowed_page_reads_every_answer(talker: Model) -> None:
    """Answers, streams, and errors of every stage."""
    app = cors(talker, api_key="s3cret", max_body_bytes=2000)

    @app.get("/v1/fault")
    async def fault() -> None:
        raise ZeroDivisionError

    def tried(method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"Origin": FRIEND, "Authorization": "Bearer s3cret", **options.pop("headers", {})}
        answer = call(app, method, path, headers=headers, **options)
        assert shared(answer), (path, answer.headers)
        assert "origin" in answer.headers["vary"].lower().split(", ")
        return answer

    assert tried("POST", "/v1/chat/completions", json=TALK).status_code == 200
    stream = tried("POST", "/v1/chat/completions", json=TALK | {"stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.text.endswith("data: [DONE]\n\n")
    assert tried("GET", "/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert tried("GET", "/v1/nowhere").status_code == 404
    assert tried("PUT", "/v1/models").status_code == 405
    assert tried("POST", "/v1/completions", content=b"x" * 2001).status_code == 413
    assert tried("POST", "/v1/completions", content=b"x", headers={"Content-Type": "text/plain"}).status_code == 415
    assert tried("POST", "/v1/completions", json={}).status_code == 400
    assert tried("GET", "/v1/fault").status_code == 500
    assert tried("GET", "/").headers["vary"] == "Accept, Origin"


def test_an_allowed_page_can_read_a_429(talker: Model) -> None:
    registry = Registry([talker], lambda *_: [WAIT])
    app = application(registry, cors_origins=FRIEND, max_requests=1)

    async def run() -> httpx.Response:
        first = Connection("/v1/completions", orjson.dumps(GO_ON))
        running = asyncio.create_task(first.run(app))
        await until(lambda: bool(registry.sources))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=OURS, headers={"Origin": FRIEND}) as client:
            answer = await client.post("/v1/completions", json=GO_ON)
        first.drop()
        await running
        return answer

    answer = asyncio.run(run())
    assert answer.status_code == 429
    assert "retry-after" in answer.headers
    assert shared(answer)


def test_allowed_origins_do_not_allow_others(talker: Model) -> None:
    app = cors(talker)
    answer = call(app, "POST", "/v1/completions", json=GO_ON, headers={"Origin": FOREIGN})
    assert answer.status_code == 403
    assert not shared(answer)
    for headers in ({}, {"Origin": OURS}):
        answer = call(app, "POST", "/v1/completions", json=GO_ON, headers=headers)
        assert answer.status_code == 200
        assert not shared(answer)
        assert answer.headers["vary"] == "Origin", "a cache must not give this to others"


@pytest.mark.parametrize("origin", [FOREIGN, "null", "vscode-webview://abc"])
def test_any_origin_is_an_explicit_choice(talker: Model, origin: str) -> None:
    app = cors(talker, "*")
    assert preflight(app, origin).headers["access-control-allow-origin"] == "*"
    answer = call(app, "POST", "/v1/completions", json=GO_ON, headers={"Origin": origin})
    assert answer.status_code == 200
    assert shared(answer, "*")
    for headers in REFUSED:
        assert call(app, "GET", "/readyz", headers=headers).status_code == 200


# Types of bodies


@pytest.mark.parametrize("kind", sorted(FORM_TYPES))
def test_content_types_of_simple_requests_are_rejected(app: FastAPI, kind: str) -> None:
    boss = application(cast(Registry, server_of(app).registry), admin_key="b0ss")
    for method, path in every_route(boss):
        if method in ("GET", "HEAD"):
            continue
        headers = {"Authorization": "Bearer b0ss"}
        for spelled in (kind, f"{kind.upper()} ; charset=utf-8", f"{kind};x=application/json"):
            answer = call(boss, method, path, content=b"{}", headers=headers | {"Content-Type": spelled})
            if (path, kind) == ("/v1/files", "multipart/form-data"):  # a form with a file
                assert answer.status_code == 404, "this server keeps no files"
                continue
            assert answer.status_code == 415, (method, path, answer.text)
            said = message(path, answer)
            assert said.startswith(f"Content-Type: {spelled!r}")
            assert "-H 'Content-Type: application/json'" in said
    twice = [("Content-Type", "application/json"), ("Content-Type", kind)]
    assert call(app, "POST", "/v1/completions", content=b"{}", headers=twice).status_code == 415
    answer = call(app, "POST", "/v1/completions", content=b"{}", headers={"Content-Type": kind})
    assert answer.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "kind",
    ["application/json", "application/json; charset=utf-8", "application/vnd.api+json", "application/octet-stream", ""],
)
def test_other_types_are_read_as_before(app: FastAPI, kind: str) -> None:
    headers = {"Content-Type": kind} if kind else {}
    assert call(app, "POST", "/v1/completions", content=orjson.dumps(GO_ON), headers=headers).status_code == 200


# Settings and the description


def settings(*flags: str) -> Mapping[str, Any]:
    return read_settings(parse_flags(flags)).model_dump()


def test_lists_are_read_from_a_flag_and_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = settings("--allowed-hosts", "A.example, [::1],*.b.example.", "--cors-origins", "https://A.example:443,*")
    assert known["allowed_hosts"] == ("a.example", "::1", "*.b.example")
    assert known["cors_origins"] == ("https://a.example", "*")
    file = tmp_path / "polyhead.yaml"
    file.write_text("allowed_hosts: [a.example, b.example]\ncors_origins: http://localhost:3000\n")
    known = settings("--config", str(file))
    assert known["allowed_hosts"] == ("a.example", "b.example")
    assert known["cors_origins"] == ("http://localhost:3000",)
    monkeypatch.setenv("POLYHEAD_CORS_ORIGINS", "app://x,chrome-extension://abcdef")
    assert settings()["cors_origins"] == ("app://x", "chrome-extension://abcdef")


@pytest.mark.parametrize("given", ["http://a.example", "a.example:8000", "a/b", "a..b", "*.*.b", "a b", "-*"])
def test_an_invalid_host_setting_is_rejected_by_name(given: str) -> None:
    with pytest.raises(SettingsError, match=r"allowed_hosts: .* must be a name or an address without scheme and port"):
        settings("--allowed-hosts", f"fine.example,{given}")


@pytest.mark.parametrize(
    "given", ["a.example", "http://a.example/", "null", "https://*.a.example", "http://u@a", "http://"]
)
def test_an_invalid_origin_setting_is_rejected_by_name(given: str) -> None:
    with pytest.raises(SettingsError, match=r"cors_origins: .* must be an origin, scheme://host"):
        settings("--cors-origins", f"https://fine.example,{given}")


def test_the_description_has_the_statuses(app: FastAPI) -> None:
    for path, operations in call(app, "GET", "/openapi.json").json()["paths"].items():
        for method, operation in operations.items():
            expected = {"403", "421"} | ({"415"} if method != "get" else set())
            assert expected <= operation["responses"].keys(), (method, path)
