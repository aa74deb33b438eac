"""Child processes that answer lines: a child that hangs, does not start or does not read blocks no caller for ever."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from polyhead.models.core.errors import ModelError
from polyhead.service.cli import explain_command as explained
from polyhead.service.cli import local_server
from polyhead.service.concurrency import child_process as child
from polyhead.service.concurrency.child_process import exchange_lines, kill_child, start_child
from polyhead.service.core.errors import BadRequest, PolyheadError, Stopped, Unavailable
from polyhead.service.core.grammar import Grammar
from polyhead.service.fleet.replica_connection import ReplicaConnection
from polyhead.service.runtime.operation import ModelOperation
from polyhead.service.runtime.registry import ModelRegistry
from polyhead.service.server import assembly as serve
from polyhead.service.structured import grammar_check as trial
from polyhead.service.structured.grammar_check import GrammarCheck

ECHO = "import sys\nprint(flush=True)\nfor line in sys.stdin: print(line, end='', flush=True)"
NEVER_READS = "import time\nprint(flush=True)\ntime.sleep(600)"
SILENT = "import time\ntime.sleep(600)"
GRAMMAR = Grammar("regex", "a+", "response_format")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_long_lines_are_sent_and_received() -> None:
    process = start_child(python(ECHO))
    line = b"x" * (1 << 20) + b"\n"
    for _ in range(3):
        assert exchange_lines(process, line, 60.0) == line
    kill_child(process)


def test_a_child_that_does_not_read_times_out() -> None:
    process = start_child(python(NEVER_READS))
    with pytest.raises(TimeoutError):
        exchange_lines(process, b"x" * (1 << 20) + b"\n", 0.05)
    kill_child(process)


def test_a_child_that_never_starts_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "START_TIMEOUT_S", 0.05)
    with pytest.raises(TimeoutError):
        start_child(python(SILENT))
    monkeypatch.setattr(child, "START_TIMEOUT_S", 60.0)
    with pytest.raises(BrokenPipeError):
        start_child(python("raise SystemExit(3)"))


@pytest.mark.parametrize(("code", "error"), [(SILENT, Unavailable), ("raise SystemExit(3)", PolyheadError)])
def test_a_compiler_that_does_not_start_is_returned_to_the_pool(
    monkeypatch: pytest.MonkeyPatch, code: str, error: type[PolyheadError]
) -> None:
    """There is one process; the next caller gets it."""
    monkeypatch.setattr(trial, "PROCESSES", 1)
    monkeypatch.setattr(child, "START_TIMEOUT_S", 0.05 if code == SILENT else 60.0)
    trials, real = GrammarCheck(), trial.start_child
    outline: dict[str, Any] = {"size": 300, "ends": [0], "special": []}
    with monkeypatch.context() as patched:
        patched.setattr(trial, "start_child", lambda _: real(python(code)))
        for _ in range(2):
            with pytest.raises(error):
                trials.compile(GRAMMAR, outline)
    monkeypatch.setattr(child, "START_TIMEOUT_S", 60.0)
    assert trials.compile(GRAMMAR, outline)
    with pytest.raises(BadRequest):
        trials.compile(Grammar("regex", "(", "response_format"), outline)
    trials.close()


def test_a_cancelled_change_is_not_a_success() -> None:
    """As when the event loop ends: its waiters are cancelled."""

    async def run() -> None:
        change, begun = ModelOperation("a", "loading a"), asyncio.Event()

        async def work() -> None:
            begun.set()
            await asyncio.Event().wait()

        change.start(work())
        await begun.wait()
        assert change._task is not None
        change._task.cancel()
        with pytest.raises(Stopped, match="loading a was interrupted"):
            await change.wait_and_raise()

    asyncio.run(run())


def test_a_replica_that_is_not_connected_is_not_waited_for() -> None:
    async def run() -> None:
        line = ReplicaConnection.__new__(ReplicaConnection)
        line.name, line._writer = "a", None
        with pytest.raises(ConnectionError, match="replica a is not connected"):
            await line.call("watch", "judge")

    asyncio.run(run())


def test_polyhead_explain_fails_when_the_engine_has_ended(
    tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load(registry: ModelRegistry, *_: Any) -> None:
        registry._engine.fail_permanently("it is gone")
        await asyncio.Event().wait()

    asked = explained.ExplainArguments(str(tiny_classifier), ("a text",), {}, plot=None, as_json=True, url="", key="")

    async def run() -> None:
        async with asyncio.timeout(60):
            with pytest.raises(ModelError, match="the engine's thread has ended while the model was loaded"):
                await explained.post_explain(asked)

    monkeypatch.setattr(local_server, "POLL_S", 0.01)
    monkeypatch.setattr(serve, "load_models", load)
    asyncio.run(run())
