"""Requests that the server sends to itself: how those end that it does not want any more."""

import asyncio
import logging
from pathlib import Path

import pytest

from polyhead.service.api.access.app_state import AppState
from polyhead.service.api.access.own_calls import OwnCalls
from polyhead.service.config.keys import ANONYMOUS
from polyhead.service.core.model import Model
from tests.support.scripted import WAIT, Connection, Registry, application, ask, model, until

PATH, BODY = "/v1/completions", b'{"model": "talker", "prompt": "The fox"}'


@pytest.fixture(scope="module")
def generator(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate")


async def never(owner: str) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("is_submitted", [True, False])
def test_a_cancelled_line_is_aborted_and_no_error_of_the_server(
    generator: Model, is_submitted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in the log nor in what the error budget counts, whether the engine has it or not."""
    registry = Registry([generator], lambda *_: [WAIT])
    app = application(registry)
    server: AppState = app.state.server
    if not is_submitted:
        monkeypatch.setattr(server.turns, "take", never)

    async def cancel() -> None:
        call = asyncio.create_task(OwnCalls(app, server.keys, server.headroom)("", PATH, BODY))
        await until(lambda: bool(registry.sources) if is_submitted else server.admission.in_flight == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert server.admission.unfinished == 0

    with caplog.at_level(logging.INFO, "polyhead.http"):
        asyncio.run(cancel())
    [line] = [record for record in caplog.records if record.name == "polyhead.http"]
    assert (line.outcome, line.reason, line.status) == ("aborted", "client_gone", 499)  # type: ignore[attr-defined]
    assert not server.recent_errors.read(ANONYMOUS)
    [page] = ask(app, ("/metrics", None))
    assert 'code="stopped"' not in page.text
    assert 'status="503"' not in page.text
    assert 'outcome="rejected"' not in page.text
    if not is_submitted:
        assert 'polyhead_requests_total{model="",outcome="aborted",task=""} 1.0' in page.text


def test_a_request_of_a_client_that_is_cancelled_is_stopped(generator: Model, caplog: pytest.LogCaptureFixture) -> None:
    """As it is at the end of a drain."""
    registry = Registry([generator], lambda *_: [WAIT])
    app = application(registry)

    async def cancel() -> None:
        connection = Connection(PATH, BODY)
        serving = asyncio.create_task(connection.run(app))
        await until(lambda: bool(registry.sources))
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert connection.sent[0]["status"] == 503

    with caplog.at_level(logging.INFO, "polyhead.http"):
        asyncio.run(cancel())
    [line] = [record for record in caplog.records if record.name == "polyhead.http"]
    assert (line.outcome, line.reason) == ("failed", "stopped")  # type: ignore[attr-defined]
