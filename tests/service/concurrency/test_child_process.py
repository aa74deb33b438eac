"""Child processes that answer lines: a child that hangs, does not start or does not read blocks no caller for ever."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from polyhead.models.core.errors import CheckpointError, ModelError
from polyhead.service.cli import explain_command as explained
from polyhead.service.cli import local_server
from polyhead.service.concurrency import child_process as child
from polyhead.service.concurrency.child_process import (
    AnsweringChild,
    ChildEndedError,
    exchange_lines,
    kill_child,
    start_child,
)
from polyhead.service.core.errors import BadRequest, PolyheadError, Stopped, Unavailable
from polyhead.service.core.grammar import Grammar
from polyhead.service.fleet.replica_connection import ReplicaConnection
from polyhead.service.runtime.operation import ModelOperation
from polyhead.service.runtime.registry import ModelRegistry
from polyhead.service.runtime.tokenizer_check import TokenizerCheck
from polyhead.service.server import assembly as serve
from polyhead.service.structured import grammar_check as trial
from polyhead.service.structured import grammar_child
from polyhead.service.structured.grammar_check import GrammarCheck

pytestmark = pytest.mark.usefixtures("every_tokenizer_is_checked")

ECHO = "import sys\nprint(flush=True)\nfor line in sys.stdin: print(line, end='', flush=True)"
NEVER_READS = "import time\nprint(flush=True)\ntime.sleep(600)"
SILENT = "import time\ntime.sleep(600)"
GRAMMAR = Grammar("regex", "a+", "response_format")
OUTLINE: dict[str, Any] = {"size": 300, "ends": [0], "special": []}
SELECT_LIMIT = 1024  # FD_SETSIZE: `select` takes no descriptor from this number on


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


def test_a_child_that_closes_its_pipe_and_goes_on_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "END_TIMEOUT_S", 0.05)
    asked = AnsweringChild(python("import os, time\nprint(flush=True)\ninput()\nos.close(1)\ntime.sleep(600)"))
    with pytest.raises(ChildEndedError) as ended:
        asked.ask(b"x\n", 60.0)
    assert ended.value.code == -signal.SIGKILL


def test_a_child_that_never_starts_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "START_TIMEOUT_S", 0.05)
    with pytest.raises(TimeoutError):
        start_child(python(SILENT))
    monkeypatch.setattr(child, "START_TIMEOUT_S", 60.0)
    with pytest.raises(BrokenPipeError):
        start_child(python("raise SystemExit(3)"))


@contextmanager
def only_high_descriptors() -> Iterator[None]:
    """Every descriptor that is opened has a number that `select` does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * SELECT_LIMIT if hard == resource.RLIM_INFINITY else min(2 * SELECT_LIMIT, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    held = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while held[-1] < SELECT_LIMIT:
            held.append(os.dup(held[0]))
        yield
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_children_answer_where_a_thousand_descriptors_are_open(tiny_classifier: Path) -> None:
    """Idle connections have the low numbers: each grammar and each load failed, and left a process behind."""
    trials, checker = GrammarCheck(), TokenizerCheck()
    with only_high_descriptors():
        assert trials.compile(GRAMMAR, OUTLINE)
        assert checker.check_folder(tiny_classifier, {}) >= 0
    trials.close()
    checker.close()


class UnexpectedError(Exception):
    """An error that no caller handles."""


def fail_to_exchange(*_: Any) -> bytes:
    raise UnexpectedError


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list["subprocess.Popen[bytes]"]:
    """The processes that are started from now on."""
    found: list[subprocess.Popen[bytes]] = []
    real: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        found.append(real(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return found


def has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Whether a process was waited for, and its pipes are closed."""
    assert process.stdin is not None
    assert process.stdout is not None
    return process.returncode is not None and process.stdin.closed and process.stdout.closed


@pytest.mark.parametrize("is_ready", [False, True])
def test_no_child_is_left_behind_whatever_is_raised(
    monkeypatch: pytest.MonkeyPatch, started: list["subprocess.Popen[bytes]"], is_ready: bool
) -> None:
    """Neither by its start nor by a question, whose answer would be read as that of the next one."""
    echo = AnsweringChild(python(ECHO))
    if is_ready:
        assert echo.ask(b"first\n", 60.0) == b"first\n"
    with monkeypatch.context() as broken:
        broken.setattr(child, "exchange_lines", fail_to_exchange)
        with pytest.raises(UnexpectedError):
            echo.ask(b"lost\n", 60.0)
    assert [has_ended(each) for each in started] == [True]
    assert echo.ask(b"second\n", 60.0) == b"second\n"
    echo.kill()
    assert [has_ended(each) for each in started] == [True, True]


def test_a_child_for_which_there_is_no_room_is_refused_for_now(
    monkeypatch: pytest.MonkeyPatch, tiny_classifier: Path
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    trials, checker = GrammarCheck(), TokenizerCheck()
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", fail)
        with pytest.raises(Unavailable, match="cannot be started now: Resource temporarily unavailable"):
            trials.compile(GRAMMAR, OUTLINE)
        with pytest.raises(CheckpointError, match="cannot be started: Resource temporarily unavailable"):
            checker.check_folder(tiny_classifier, {})
    assert trials.compile(GRAMMAR, OUTLINE)
    trials.close()


def test_a_grammar_whose_child_is_killed_from_outside_is_not_called_too_complex(
    started: list["subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = child.exchange_lines

    def kill_first(process: "subprocess.Popen[bytes]", question: bytes, timeout_s: float) -> bytes:
        if question:
            process.send_signal(signal.SIGKILL)
            process.wait()
        return real(process, question, timeout_s)

    trials = GrammarCheck()
    with monkeypatch.context() as killing:
        killing.setattr(child, "exchange_lines", kill_first)
        with pytest.raises(Unavailable, match="was ended from outside"):
            trials.compile(GRAMMAR, OUTLINE)
    assert trials.compile(GRAMMAR, OUTLINE)
    trials.close()
    assert all(map(has_ended, started))


def test_children_keep_a_lower_limit_that_they_have() -> None:
    """A process may lower its hard limit, and not raise it: the children ended where they asked for more."""
    code = (
        "import resource, sys\n"
        "from polyhead.service.concurrency.child_limits import limit_memory\n"
        "limit_memory(1 << 31, 1 << 22)\n"
        "limit_memory(1 << 32, 1 << 23)\n"
        "print(resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(resource.RLIMIT_STACK))\n"
    )
    said = subprocess.run(python(code), capture_output=True, text=True, check=True).stdout
    assert said == f"{(1 << 31, 1 << 31)} {(1 << 22, 1 << 22)}\n"
    command = [sys.executable, "-P", grammar_child.__file__]
    below = (
        "import os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (900 << 20, 900 << 20))\n"
        f"os.execv({sys.executable!r}, {command!r})\n"
    )
    kill_child(start_child(python(below)))


@pytest.mark.parametrize(("code", "error"), [(SILENT, Unavailable), ("raise SystemExit(3)", PolyheadError)])
def test_a_compiler_that_does_not_start_is_returned_to_the_pool(
    monkeypatch: pytest.MonkeyPatch, code: str, error: type[PolyheadError]
) -> None:
    """There is one process; the next caller gets it."""
    monkeypatch.setattr(trial, "PROCESSES", 1)
    monkeypatch.setattr(child, "START_TIMEOUT_S", 0.05 if code == SILENT else 60.0)
    trials, real = GrammarCheck(), child.start_child
    with monkeypatch.context() as patched:
        patched.setattr(child, "start_child", lambda _: real(python(code)))
        for _ in range(2):
            with pytest.raises(error):
                trials.compile(GRAMMAR, OUTLINE)
    monkeypatch.setattr(child, "START_TIMEOUT_S", 60.0)
    assert trials.compile(GRAMMAR, OUTLINE)
    with pytest.raises(BadRequest):
        trials.compile(Grammar("regex", "(", "response_format"), OUTLINE)
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
