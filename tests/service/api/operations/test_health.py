"""The answers of the probes and their reasons; the probes of a real server under load are at the end."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from fastapi import FastAPI

from polyhead.service.api.access.recent_errors import KEPT_ERRORS
from polyhead.service.core.model import LoadState, Model
from polyhead.service.metrics.history import INTERVAL_S
from tests.support.scripted import FakeEngine, Registry, application, ask, echo, model

WELL = LoadState("ready", 1.0)


@pytest.fixture(scope="module")
def generator(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate")


@pytest.fixture
def app(generator: Model) -> FastAPI:
    return application(Registry([generator], echo))


def states(app: FastAPI, named: Mapping[str, LoadState]) -> None:
    """Pretend that these are the models, all of them in the settings."""
    server = app.state.server
    cast(Any, server.registry).states = lambda: named
    known = server.settings.model_copy(update={"models": dict.fromkeys(named, "./tiny")})
    object.__setattr__(server, "settings", known)


def engine(app: FastAPI) -> FakeEngine:
    return cast(FakeEngine, app.state.server.engine)


def probe(app: FastAPI, path: str) -> tuple[int, list[str]]:
    [answer] = ask(app, (path, None))
    said = answer.json()
    assert said["ready" if path == "/readyz" else "live"] is (answer.status_code == 200)
    return answer.status_code, said["reasons"]


@pytest.mark.parametrize(
    ("models", "started", "ready", "reasons"),
    [
        ({"a": WELL, "b": WELL}, 200, 200, []),
        ({"a": LoadState("waiting")}, 503, 503, ["a is not loaded yet", "no model is ready"]),
        ({"a": WELL, "b": LoadState("loading", 0.5)}, 503, 503, ["b is not loaded yet"]),
        ({"a": WELL, "b": LoadState("broken", reason="no such file")}, 200, 503, ["b is broken: no such file"]),
        ({"b": LoadState("broken", reason="x")}, 200, 503, ["b is broken: x", "no model is ready"]),
        ({}, 200, 503, ["no model is ready"]),
    ],
)
def test_ready_if_all_models_are_loaded_and_work(
    app: FastAPI, models: Mapping[str, LoadState], started: int, ready: int, reasons: list[str]
) -> None:
    states(app, models)
    assert probe(app, "/livez") == (200, [])
    assert ask(app, ("/startupz", None))[0].status_code == started
    assert probe(app, "/readyz") == (ready, reasons)
    assert [answer.status_code for answer in ask(app, ("/health", None), ("/ping", None))] == [ready, ready]
    assert ask(app, ("/healthz", None))[0].status_code == ask(app, ("/livez", None))[0].status_code


def test_models_loaded_later_do_not_change_readiness(app: FastAPI) -> None:
    """An administrator who loads one more model sees its state there."""
    states(app, {"a": WELL})
    more = {"a": WELL, "b": LoadState("loading", 0.1), "c": LoadState("broken", reason="x")}
    cast(Any, app.state.server.registry).states = lambda: more
    engine(app).broken = ["c"]
    assert probe(app, "/readyz") == (200, [])


def test_ready_has_the_progress_of_each_model(app: FastAPI) -> None:
    named = {
        "a": LoadState("loading", 0.12345),
        "b": LoadState("broken", reason="x"),
        "c": WELL,
        "d": LoadState("waiting"),
        "e": LoadState("downloading", 0.5),
    }
    states(app, named)
    [answer] = ask(app, ("/readyz", None))
    assert answer.json() == {
        "ready": False,
        "draining": False,
        "reasons": ["a is not loaded yet", "b is broken: x", "d is not loaded yet", "e is not loaded yet"],
        "models": {
            "a": {"state": "loading", "progress": 0.123},
            "b": {"state": "broken", "error": "x"},
            "c": {"state": "ready"},
            "d": {"state": "waiting"},
            "e": {"state": "downloading", "progress": 0.5},
        },
    }


def test_a_dead_engine_is_not_alive(app: FastAPI) -> None:
    engine(app).alive = False
    assert probe(app, "/livez") == probe(app, "/readyz") == (503, ["the engine thread has ended"])


def test_a_model_that_fails_is_not_ready_but_no_reason_to_restart(app: FastAPI) -> None:
    engine(app).broken = ["talker"]
    assert probe(app, "/readyz") == (503, ["talker cannot compute any more"])
    assert probe(app, "/livez") == (200, [])


@pytest.mark.parametrize(
    ("seconds", "ready", "live"), [(8.0, 200, 200), (8.1, 503, 200), (60.0, 503, 200), (60.1, 503, 503)]
)
def test_without_progress_the_server_is_first_not_ready_and_then_not_alive(
    app: FastAPI, seconds: float, ready: int, live: int
) -> None:
    engine(app).seconds = seconds
    said = [f"no step has been finished for {seconds:.1f} s, and work waits"]
    assert probe(app, "/readyz") == (ready, said if ready == 503 else [])
    assert probe(app, "/livez") == (live, said if live == 503 else [])


# What the page shows of the last minutes


def test_recent_errors_have_no_text_and_are_bounded(app: FastAPI) -> None:
    secret = "a secret of a client"
    wrong = ("/v1/chat/completions", {"model": "talker", "messages": [{"role": "user", "content": secret}], "top_p": 7})
    unknown = (f"/models/{secret.replace(' ', '-')}", {"inputs": secret})
    [*_, answer] = ask(app, wrong, unknown, ("/metrics/errors", None))
    newest, oldest = answer.json()["errors"]
    assert (newest["status"], newest["model"]) == (404, "")
    assert (oldest["status"], oldest["route"], oldest["outcome"]) == (400, "/v1/chat/completions", "rejected")
    assert oldest["request_id"]
    assert "secret" not in answer.text
    [*_, answer] = ask(app, *[wrong] * (KEPT_ERRORS + 10), ("/metrics/errors", None))
    assert len(answer.json()["errors"]) == KEPT_ERRORS


def test_the_errors_need_a_key_where_the_server_has_keys_and_the_history_is_as_open_as_the_metrics() -> None:
    app = application(Registry([], echo), api_key="s3cret")
    assert [answer.status_code for answer in ask(app, ("/metrics/errors", None), ("/metrics/history", None))] == [
        401,
        200,
    ]


def test_the_history_has_a_sample_for_every_interval(app: FastAPI) -> None:
    for moment in (1.0, 6.0):
        app.state.history.record(moment)
    [answer] = ask(app, ("/metrics/history", None))
    found = answer.json()
    assert found["interval_seconds"] == INTERVAL_S
    assert len(found["samples"]) == 2
    assert found["samples"][1]["requests_running"] == 0.0
