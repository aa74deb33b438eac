"""The middleware and the application: request ids, keys, limits, error formats, the log."""

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import orjson
import pytest
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute

from polyhead.service.api.access.app_state import AppState
from polyhead.service.api.access.auth import find_access_rule, required_access
from polyhead.service.api.app import DIALECTS, find_dialect
from polyhead.service.core import logs
from polyhead.service.core.model import Model
from tests.support.scripted import Connection, Registry, application, echo, model, routes

GO_ON = {"model": "talker", "prompt": "The fox"}


@pytest.fixture(scope="module")
def generator(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate")


@pytest.fixture
def app(generator: Model) -> FastAPI:
    return application(Registry([generator], echo), max_requests=2, max_body_bytes=2000)


def server_of(app: FastAPI) -> AppState:
    return cast(AppState, app.state.server)


def call(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


# Ids


@pytest.mark.parametrize("path", ["/livez", "/nowhere", "/v1/models"])
def test_every_answer_has_an_id(app: FastAPI, path: str) -> None:
    first, second = (call(app, "GET", path).headers["x-request-id"] for _ in range(2))
    assert len(first) == 32
    assert first != second


@pytest.mark.parametrize(
    ("given", "kept"),
    [("trace-1.2_3", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("a\tb", False), ("", False)],
)
def test_ids_of_clients_are_kept_if_they_are_safe(app: FastAPI, given: str, kept: bool) -> None:
    answered = call(app, "GET", "/livez", headers={"X-Request-Id": given}).headers.get_list("x-request-id")
    assert len(answered) == 1
    assert (answered[0] == given) is kept


# Keys


def test_every_route_has_an_access_decision(app: FastAPI) -> None:
    paths = {route.path for route in routes(app)}
    assert {"/livez", "/metrics", "/v1/chat/completions", "/models/{name:path}/predict", "/docs"} <= paths
    for verb in ("GET", "POST"):
        assert not {path for path in paths if find_access_rule(path, verb) is None}


def test_all_routes_of_models_need_the_key(app: FastAPI) -> None:
    worked = {route.path for route in routes(app) if isinstance(route, APIRoute) and "POST" in route.methods}
    assert worked
    assert {required_access(path, "POST") for path in worked} == {"inference"}
    assert (
        required_access("/v1/models") == required_access("/v1/models", "HEAD") == required_access("/info") == "models"
    )
    assert (
        required_access("/v1/models", "POST")
        == required_access("/nowhere")
        == required_access("/metrics2")
        == "inference"
    )
    assert (
        required_access("/livez")
        == required_access("/docs/docs.js")
        == required_access("/")
        == required_access("/", "HEAD")
        == "public"
    )


@pytest.mark.parametrize("path", ["/v1/models", "/info", "/openapi.json", "/nowhere", "/livez/../v1/models"])
def test_without_the_key_nothing_is_answered(generator: Model, path: str) -> None:
    app = application(Registry([generator], echo), api_key="s3cret")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
        answer = call(app, "GET", path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "s3cret" not in answer.text
        assert "talker" not in answer.text
    assert call(app, "GET", path, headers={"Authorization": "bearer s3cret"}).status_code != 401


def test_the_root_describes_the_server_to_all_and_answers_with_the_key(generator: Model) -> None:
    app = application(Registry([generator], echo), api_key="s3cret")
    assert call(app, "GET", "/").status_code == 200
    assert call(app, "POST", "/", json={"inputs": "The fox"}).status_code == 401
    headers = {"Authorization": "Bearer s3cret"}
    answer = call(app, "POST", "/", json={"inputs": "The fox"}, headers=headers)
    assert answer.json() == [{"generated_text": "The fox"}]


def test_probes_and_metrics_need_no_key(generator: Model) -> None:
    app = application(Registry([generator], echo), api_key="s3cret")
    for path in ("/", "/livez", "/readyz", "/startupz", "/health", "/healthz", "/ping", "/metrics", "/docs"):
        assert call(app, "GET", path).status_code == 200, path


KEYS = {"api_key": "s3cret", "api_keys": "search=k1,mail=k2"}


@pytest.mark.parametrize(("key", "owner"), [("s3cret", "default"), ("k1", "search"), ("k2", "mail")])
def test_each_of_several_keys_is_accepted_and_identifies_its_owner(
    generator: Model, caplog: pytest.LogCaptureFixture, key: str, owner: str
) -> None:
    registry = Registry([generator], echo)
    app = application(registry, **KEYS)
    with caplog.at_level(logging.INFO, "polyhead.http"):
        assert call(app, "POST", "/v1/completions", json=GO_ON, headers={"Authorization": f"Bearer {key}"}).is_success
    assert registry.requests[0].terms.owner == owner
    [line] = [record for record in caplog.records if record.name == "polyhead.http"]
    assert f" ms for {owner} [" in line.getMessage()
    assert vars(line)["key"] == owner
    assert f"'{key}'" not in repr(vars(line))


def test_a_wrong_key_is_rejected_before_the_body_is_read(generator: Model) -> None:
    app = application(Registry([generator], echo), **KEYS)

    async def run() -> Connection:
        connection = Connection("/v1/completions", b"{")
        await connection.run(app)
        assert connection.incoming.qsize() == 1, "the body was read"
        return connection

    assert asyncio.run(run()).sent[0]["status"] == 401


def test_without_keys_requests_have_no_owner(generator: Model) -> None:
    registry = Registry([generator], echo)
    headers = {"Authorization": "Bearer whatever"}
    assert call(application(registry), "POST", "/v1/completions", json=GO_ON, headers=headers).is_success
    assert registry.requests[0].terms.owner == ""


# Bodies


def test_a_body_announced_too_large_is_not_read(app: FastAPI) -> None:
    async def run() -> Connection:
        connection = Connection("/v1/completions", b"x" * 2001)
        await connection.run(app)
        assert connection.incoming.qsize() == 1, "the body was read"
        return connection

    connection = asyncio.run(run())
    assert connection.sent[0]["status"] == 413
    assert "the body has 2001 bytes, at most 2000 are taken" in connection.body.decode()


def test_a_body_is_read_up_to_the_limit(app: FastAPI) -> None:
    given = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal given
        for _ in range(100):
            given += 1
            yield b"x" * 500

    answer = call(app, "POST", "/v1/completions", content=parts())
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert given < 10


def test_a_body_of_exactly_the_limit_is_read(app: FastAPI) -> None:
    content = orjson.dumps(GO_ON)
    assert call(app, "POST", "/v1/completions", content=content.ljust(2000)).status_code == 200


def test_a_body_that_does_not_arrive_frees_its_permit(generator: Model) -> None:
    app = application(Registry([generator], echo), body_seconds=0.01)

    async def run() -> Connection:
        connection = Connection("/v1/completions", b"")
        connection.incoming.get_nowait()
        await connection.run(app)
        return connection

    connection = asyncio.run(run())
    assert connection.sent[0]["status"] == 408
    assert "the body was not complete within 0.01 s" in connection.body.decode()
    assert server_of(app).admission.in_flight == 0


# Errors in the format of the dialect that owns the path


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nowhere", 404), ("GET", "/nowhere", 404), ("PUT", "/v1/completions", 405), ("POST", "/livez", 405)],
)
def test_openai_shape_is_the_fallback(app: FastAPI, method: str, path: str, status: int) -> None:
    answer = call(app, method, path)
    assert answer.status_code == status
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert f"{method} {path}" in answer.json()["error"]["message"]
    assert ("allow" in answer.headers) is (status == 405)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/completions", "OPTIONS, POST"),
        ("/livez", "GET, HEAD, OPTIONS"),
        ("/models/talker/predict", "OPTIONS, POST"),
    ],
)
def test_options_answers_with_the_methods_of_a_route(app: FastAPI, path: str, allowed: str) -> None:
    answer = call(app, "OPTIONS", path)
    assert (answer.status_code, answer.headers["allow"], answer.content) == (204, allowed, b"")
    assert not any(name.startswith("access-control-") for name in answer.headers)


def test_options_of_a_path_without_a_route_is_404(app: FastAPI) -> None:
    assert call(app, "OPTIONS", "/v1/nowhere").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status"), [("DELETE", "/models/talker/predict", 405), ("DELETE", "/predict", 405)]
)
def test_errors_have_the_format_of_the_dialect_of_the_path(app: FastAPI, method: str, path: str, status: int) -> None:
    answer = call(app, method, path)
    assert answer.status_code == status
    assert answer.json().keys() == {"error", "error_type"}


def test_every_dialect_owns_its_routes() -> None:
    for dialect in DIALECTS:
        assert {find_dialect(cast(APIRoute, route).path).name for route in dialect.router.routes} == {dialect.name}


def test_rejections_do_not_contain_paths_of_the_server(app: FastAPI) -> None:
    assert str(Path.cwd()) not in call(app, "GET", "/nowhere").text


def test_an_internal_error_is_500_with_an_id_and_without_a_traceback(
    app: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    @app.get("/v1/fault")
    async def fault(request: Request) -> None:
        raise ZeroDivisionError("secret detail")

    with caplog.at_level(logging.INFO):
        answer = call(app, "GET", "/v1/fault", headers={"X-Request-Id": "mine"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-request-id"] == "mine"
    assert "secret" not in answer.text
    assert "GET /v1/fault 500" in caplog.text
    assert "[mine]: failed, internal_error" in caplog.text


# The root path


def test_the_root_lists_further_paths(app: FastAPI) -> None:
    assert call(app, "GET", "/").json()["docs"] == "/docs"
    assert call(app, "HEAD", "/").status_code == 200
    paths = call(app, "GET", "/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/predict", "/readyz"} <= paths.keys()


# The log and the counts


def test_the_log_has_a_line_a_request_without_prompt_and_key(
    generator: Model, caplog: pytest.LogCaptureFixture
) -> None:
    app = application(Registry([generator], echo), api_key="s3cret")
    with caplog.at_level(logging.INFO, "polyhead.http"):
        headers = {"Authorization": "Bearer s3cret", "X-Request-Id": "mine"}
        call(app, "POST", "/v1/completions?token=s3cret", json=GO_ON, headers=headers)
        call(app, "GET", "/v1/models%0Aforged line", headers=headers)
        call(app, "GET", "/livez")
    lines = [record.getMessage() for record in caplog.records if record.name == "polyhead.http"]
    assert len(lines) == 2
    assert lines[0].startswith("POST /v1/completions 200 in ")
    assert " ms for default [mine]: done, talker, " in lines[0]
    assert lines[1].startswith("GET /v1/models%0Aforged%20line 400")
    assert "s3cret" not in caplog.text
    assert "fox" not in caplog.text


def test_requests_are_counted_by_route_not_by_path(app: FastAPI) -> None:
    call(app, "POST", "/models/talker/predict", json={"inputs": "x"})
    call(app, "GET", "/made/up")
    call(app, "BREW", "/livez")
    page = call(app, "GET", "/metrics").text
    assert 'route="/models/{name:path}/predict",status="424"' in page
    assert 'method="GET",route="",status="404"' in page
    assert 'method="other"' in page
    assert "BREW" not in page
    assert "made" not in page


def test_json_logs_have_one_object_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    try:
        logs.configure_logging("json", "info")
        logging.getLogger("polyhead.test").info("one\n%s", "two", extra={"status": 200})
        logging.getLogger("uvicorn.error").info("not ours")
    finally:
        sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
        logging.basicConfig(handlers=before, level=level, force=True)
    [line] = capsys.readouterr().err.splitlines()
    written = orjson.loads(line)
    assert (written["level"], written["message"], written["status"]) == ("info", "one\ntwo", 200)
