"""The log: the contents of a line for a request, what it never contains, and that no client can begin a line."""

import json
import logging
import re
import socket
import subprocess
import sys
import threading
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import huggingface_hub
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhead.service.core import line_queue, logs
from tests.support.faults import Fault
from tests.support.processes import PATIENCE, FaultServer

COMMAND = """
import logging, sys, threading
from polyhead.service.cli import main as cli
hostile = {hostile!r}

@cli.app.command()
def fail(kind: str) -> None:
    try:
        raise ValueError(hostile)
    except ValueError:
        logging.getLogger("polyhead.models").warning("%s: it is warned", hostile, exc_info=True)
    thread = threading.Thread(target=lambda: int(hostile))
    thread.start()
    thread.join()
    raise RuntimeError(hostile)

sys.argv[1:] = ["fail", "x"]
sys.stderr.isatty = lambda: True
cli.main()
"""
KEY, ADMIN = "a-key-that-nobody-may-see", "another-such-key"
SECRET = "zebra umbrella"
FORGED = "2026-01-01 INFO forged"
HOSTILE = f"x\r\n{FORGED}\n{FORGED}\x1b[31m\x9b2J\x85{FORGED}\u2028{FORGED}\u2029{FORGED}\x00\x7f\u202egnirts"
CONSOLE = re.compile(r"\d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR|CRITICAL) +\S|  \| ")
FIRST_STEPS = re.compile(r"  (page|models|request|terminal) ")
CLIENT = httpx.Client(timeout=PATIENCE, verify=False)
COMPLETIONS = "/v1/completions"
Served = tuple[FaultServer, str]


@pytest.fixture(scope="module", params=["json", "console"])
def served(
    request: pytest.FixtureRequest, start_fault_server: Callable[..., FaultServer], tiny_generator: Path
) -> Iterator[Served]:
    keys = "--api-keys", f"search={KEY}", "--admin-key", ADMIN
    process = start_fault_server(f"chat={tiny_generator}", *keys, "--log-format", request.param)
    yield process, request.param
    process.child.kill()
    process.child.wait()


def authorization(key: str = KEY, **others: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **others}


def asked(**others: Any) -> dict[str, Any]:
    return {"model": "chat", "prompt": SECRET, "max_tokens": 6, "temperature": 0, "ignore_eos": True} | others


def post(served: Served, path: str, body: Any, **headers: str) -> httpx.Response:
    return CLIENT.post(served[0].url + path, json=body, headers=authorization(**headers))


def line_of(served: Served, id: str) -> dict[str, Any]:
    """The line of the request with that id; of a text line its message."""
    process, shape = served

    def found() -> dict[str, Any] | None:
        lines = list(process.lines)
        if shape == "json":
            return next((line for line in lines if line.get("request_id") == id), None)
        return next((line for line in lines if f"[{id}]" in line["message"]), None)

    line = process.until(found)
    assert isinstance(line, dict)
    return line


def raw(served: Served, sent: bytes) -> bytes:
    """The answer to these bytes on a connection of their own."""
    address = urlsplit(served[0].url)
    with socket.create_connection((address.hostname, address.port), PATIENCE) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


# Contents of a line


def test_a_request_has_one_line_with_its_outcome(served: Served) -> None:
    answer = post(served, COMPLETIONS, asked(), **{"X-Request-Id": "how-1"})
    line = line_of(served, "how-1")
    usage = answer.json()["usage"]
    if served[1] == "console":
        tokens = f"{usage['prompt_tokens']} \\+ 6 tokens"
        rest = r", queued \d+\.\d ms, first token after \d+\.\d ms\n"
        line_form = (
            rf"[\d:]+ INFO    POST {COMPLETIONS} 200 in \d+\.\d ms for search \[how-1\]: done, chat, {tokens}{rest}"
        )
        assert re.fullmatch(line_form, line["message"])
        return
    known = ("method", "route", "path", "status", "model", "task", "key", "outcome", "requests")
    assert [line[name] for name in known] == (
        ["POST", COMPLETIONS, COMPLETIONS, 200, "chat", "generate", "search", "done", 1]
    )
    assert (line["prompt_tokens"], line["generated_tokens"]) == (usage["prompt_tokens"], 6)
    assert 0 <= line["queue_seconds"] < line["first_token_seconds"] < line["seconds"]
    assert "trace_id" not in line
    assert "reason" not in line


def test_a_rejected_request_has_a_reason(served: Served) -> None:
    CLIENT.post(served[0].url + COMPLETIONS, json=asked(), headers={"X-Request-Id": "why-1"})
    post(served, COMPLETIONS, asked(model="nobody"), **{"X-Request-Id": "why-2"})
    late = post(served, COMPLETIONS, asked(), **{"X-Request-Id": "why-3", "X-Request-Timeout": "0.001"})
    assert late.status_code == 504
    lines = [line_of(served, id) for id in ("why-1", "why-2", "why-3")]
    if served[1] == "console":
        ends = [line["message"].partition("]: ")[2].split(", ") for line in lines]
        assert [end[0].strip() for end in ends] == ["rejected", "rejected", "expired"]
        return
    assert [line["outcome"] for line in lines] == ["rejected", "rejected", "expired"]
    assert [line["reason"] for line in lines] == ["invalid_api_key", "not_found", "expired"]


def test_a_disconnected_request_has_the_outcome_aborted(served: Served) -> None:
    address = urlsplit(served[0].url)
    content = json.dumps(asked()).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: left\r\nContent-Length: {len(content)}\r\n"
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(f"{head}Authorization: Bearer {KEY}\r\n\r\n".encode() + content[:10])
    line = line_of(served, "left")
    assert "aborted" in (line["message"] if served[1] == "console" else line["outcome"])


# What a line never contains


def test_ids_are_returned_and_an_internal_error_has_no_contents_of_the_request(served: Served) -> None:
    process, _ = served
    streamed = post(served, COMPLETIONS, asked(stream=True), **{"X-Request-Id": "id-stream"})
    assert streamed.text.rstrip().endswith("[DONE]")
    missing = CLIENT.get(
        f"{process.url}/nowhere?key={KEY}&q={SECRET}", headers=authorization(**{"X-Request-Id": "id-404"})
    )
    process.arm(Fault("raise"))
    failed = post(served, COMPLETIONS, asked(), **{"X-Request-Id": "id-500"})
    process.arm()
    for answer, status in ((streamed, 200), (missing, 404), (failed, 500)):
        id = f"id-{'stream' if status == 200 else status}"
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, id)
        line_of(served, id)
    assert "failed" in json.dumps(line_of(served, "id-500"))
    result = json.dumps(process.lines)
    assert "a fault of the test" in result, "its traceback is there"
    for word in (*SECRET.split(), KEY, ADMIN):
        assert word not in result
    texts = [json.loads(data)["choices"][0]["text"] for data in re.findall(r"^data: (\{.*)$", streamed.text, re.M)]
    assert not [text for text in texts if len(text) > 3 and text in result]


# Line breaks


def hostile_requests() -> Iterator[bytes]:
    """Invalid requests too."""
    key, end = f"Authorization: Bearer {KEY}\r\n", "Connection: close\r\n\r\n"
    for name in ("X-Request-Id", "tracestate", "traceparent", "User-Agent", "X-Request-Timeout"):
        for byte in (b"\x1b[31m", b"\x9b", b"\xe2\x80\xa8", b"\x85", b"\x0b", b"\n ", b"\r"):
            value = b"a" + byte + FORGED.encode()
            yield (
                f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{key}{name}: ".encode() + value + f"\r\n{end}".encode()
            )
    for path in (b"/%0d%0a" + b"2026%20forged", b"/\x1b[31m", b"/\xc2\x85", b"/a\rb", b"/%1b%5b31m%e2%80%a8"):
        yield b"GET " + path + f" HTTP/1.1\r\nHost: localhost\r\n{key}{end}".encode()
    yield f"FORGED\x1b / HTTP/1.1\r\nHost: localhost\r\n{end}".encode()
    yield f"BREW / HTTP/1.1\r\nHost: localhost\r\n{end}".encode()


def test_no_client_begins_a_line_or_reaches_a_terminal(served: Served) -> None:
    process, shape = served
    for sent in hostile_requests():
        assert raw(served, sent).startswith(b"HTTP/1.1 ")
    post(served, COMPLETIONS, asked(model=HOSTILE))
    post(served, COMPLETIONS, {HOSTILE: 1})
    for body in ({"name": HOSTILE, "source": "/nowhere"}, {"name": "fine", "source": HOSTILE}):
        CLIENT.post(f"{process.url}/admin/models", json=body, headers=authorization(ADMIN))
    post(served, COMPLETIONS, asked(), **{"X-Request-Id": "last"})
    line_of(served, "last")
    whole = "\n".join(line["message"] for line in process.lines)
    if shape == "json":
        assert all("level" in line for line in process.lines), "a line that is not an object"
    else:
        lines = [line["message"] for line in process.lines]  # as in the pipe: \n and \r end a line
        assert not [line for line in lines if not CONSOLE.match(line) and not FIRST_STEPS.match(line)]
        assert sum(bool(FIRST_STEPS.match(line)) for line in lines) == 4, "once, when the models are ready"
        assert not logs.UNSAFE_CHARS.search(whole.replace("\n", ""))
    assert FORGED in whole, "it was quoted in no line, so the test would show nothing"


# The formats


@contextmanager
def writing(shape: Any) -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    logging.captureWarnings(False)  # reset what an earlier test may have changed in pytest
    try:
        logs.configure_logging(shape, "info")
        yield
    finally:
        sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
        logging.captureWarnings(False)
        logging.basicConfig(handlers=before, level=level, force=True)


def record(message: str, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error is not None else None
    return logging.LogRecord("a", logging.INFO, "", 0, "%s", (message,), info)


ANY = st.text(st.characters(codec=None, categories=None))  # unpaired surrogates, too


@settings(max_examples=100, deadline=None)
@given(ANY)
def test_a_message_is_one_line_of_printable_characters(text: str) -> None:
    for line in (logs.ConsoleFormatter().format(record(text)), logs.JsonFormatter().format(record(text))):
        assert len(line.splitlines()) == 1
        assert not logs.UNSAFE_CHARS.search(line)
        line.encode()


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_json_lines_keep_all_characters(text: str) -> None:
    assert json.loads(logs.JsonFormatter().format(record(text)))["message"] == text


@settings(max_examples=100, deadline=None)
@given(ANY)
def test_the_lines_of_a_traceback_are_marked(text: str) -> None:
    try:
        try:
            raise ValueError(text)
        except ValueError as cause:
            cause.add_note(text)
            raise KeyError(text) from cause
    except KeyError as error:
        failed = record("it failed", error)
    first, *others = logs.ConsoleFormatter().format(failed).split("\n")
    assert first.endswith("it failed")
    assert len(others) > 5
    assert all(line.startswith(logs.CONTINUATION_PREFIX) and not logs.UNSAFE_CHARS.search(line) for line in others)
    [line] = logs.JsonFormatter().format(failed).splitlines()
    assert "KeyError" in json.loads(line)["traceback"]


@pytest.mark.parametrize("code", [*b"\x1b\n\r\x0b\x0c\x7f\x85\x9b", 0x2028, 0x2029, 0x202E, 0x2066, 0xD800, 0xE0041])
def test_control_characters_are_escaped(code: int) -> None:
    line = logs.ConsoleFormatter().format(record(f"a{chr(code)}b"))
    assert chr(code) not in line
    assert re.search(rf"a(\\u{code:04x}|\\U{code:08x}|\\n|\\r)b$", line)


def test_every_invisible_format_character_is_escaped_and_every_letter_stays() -> None:
    """A character of the category Cf is kept if it is seen (Arabic number signs), or is part of words and emoji."""
    kept = {
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) == "Cf" and logs.escape_lines(chr(code)) == chr(code)
    }
    joiners, hieroglyphs = "\u200c\u200d", map(chr, range(0x13430, 0x13440))
    seen = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
    assert kept <= {*joiners, *hieroglyphs, *seen}
    for text in ("שלום עולם", "مرحبا بالعالم", "می\u200cخواهم", "👩\u200d💻 ❤\ufe0f", "größer\t日本\n"):
        assert logs.escape_lines(text) == text


@pytest.mark.parametrize("shape", ["console", "json"])
def test_warnings_go_the_same_way(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    with writing(shape), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(f"x\n{FORGED}\x1b", stacklevel=1)
        logs.drain_lines()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert FORGED in lines[0]


@pytest.mark.parametrize("shape", ["console", "json"])
def test_everything_goes_through_the_queue(
    shape: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is logged, what is written beside it, uncaught tracebacks, and records that cannot be formatted."""

    class Broken:
        def __del__(self) -> None:
            raise ValueError("unraisable")

    with writing(shape):
        [handler] = logs.queued_logs()
        written = list[str]()
        monkeypatch.setattr(handler.stream, "write", written.append)
        logging.getLogger("polyhead").info("logged")
        logs.write_lines("said\n")
        thread = threading.Thread(target=lambda: int("of a thread"))
        thread.start()
        thread.join()
        sys.excepthook(KeyError, KeyError("uncaught"), None)
        del (broken := [Broken()])[0]
        logging.getLogger("polyhead").info("%d", FORGED + "\n")
        monkeypatch.undo()
    assert not broken
    assert not capsys.readouterr().err
    for line, words in zip(
        written, ("logged", "said", "of a thread", "uncaught", "unraisable", "polyhead, test_logs:"), strict=True
    ):
        assert words in line
        assert line.endswith("\n")
    assert written[-1].count("\n") == 1


@pytest.mark.parametrize("shape", ["console", "json"])
def test_dropped_lines_are_counted_and_named(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with writing(shape):
        [handler] = logs.queued_logs()
        monkeypatch.setattr(line_queue, "QUEUED_CHARS", 0)
        before = logs.count_dropped_lines()
        logging.getLogger("polyhead").info("lost")
        assert logs.count_dropped_lines() == before + 1
        line = handler.describe_dropped(7)
    message = json.loads(line)["message"] if shape == "json" else line
    assert "7 lines of the log were dropped" in message
    assert line.count("\n") == 1


ENDS = {
    "exit": "logs.exit_process(3)",
    "traceback": "raise RuntimeError('the last line')",
    "return": "raise SystemExit(3)",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_last_lines_of_a_process_are_written(end: str) -> None:
    """However it ends, and before it serves, too."""
    code = f"""
import logging
from polyhead.service.core import logs
logs.configure_logging("console", "info")
for number in range(2000):
    logging.getLogger("polyhead").info("line %d", number)
logging.getLogger("polyhead").critical("the last line")
{ENDS[end]}
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == (1 if end == "traceback" else 3)
    assert result.stderr.count(" line ") >= 2000
    assert "the last line" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("formatter", [logs.ConsoleFormatter(), logs.CommandFormatter(), logs.JsonFormatter()])
def test_a_password_in_a_url_is_hidden_in_messages_and_tracebacks(formatter: logging.Formatter) -> None:
    """As in the source of a model that an administrator loads."""
    url = "https://user:SECRETPW@hub.example/x"
    try:
        raise ValueError(f"{url!r} is refused, and git+ssh://TOKEN@hub.example too")
    except ValueError as error:
        line = formatter.format(record(f"loading x from {url}, see https://hub.example/a@b", error))
    assert "SECRETPW" not in line
    assert "TOKEN" not in line
    assert line.count("://***@hub.example") >= 3
    assert "https://hub.example/a@b" in line


def test_addresses_that_a_hub_leads_to_are_not_logged() -> None:
    """The HTTP client of the library logs each request with its whole address, of which a password may be a part."""
    client = type(huggingface_hub.get_session()).__module__.partition(".")[0]
    assert client in logs.WARNING_LOGGERS


def test_commands_write_no_control_characters_of_a_file_to_a_terminal() -> None:
    """Neither in what they log, which Python would write as it is, nor in a traceback, also of a thread."""
    result = subprocess.run(
        [sys.executable, "-c", COMMAND.format(hostile=HOSTILE)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert result.returncode == 1
    assert not logs.UNSAFE_CHARS.search(result.stderr.replace("\n", ""))
    assert result.stderr.startswith(f"{logs.escape_controls(HOSTILE)}: it is warned\n")
    for kind in ("ValueError: x", "ValueError: invalid literal for int()", "RuntimeError: x"):
        assert f"\n{kind}" in result.stderr
