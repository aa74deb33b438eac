"""polyhead decide: rows in, a line for each out, in order; what is interrupted is continued."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from polyhead.service.cli import decide_command, decision_rows
from polyhead.service.cli import main as cli

QUESTIONS = """
model: m
questions:
  urgent: {type: noul, instructions: "Is it urgent?", criteria: {true: at once, false: can wait}}
  team: {type: choice, criteria: {yes: ~, billing: all of money}}
"""
Respond = Callable[[Mapping[str, Any]], tuple[int, Any]]


def answer(body: Mapping[str, Any]) -> tuple[int, Any]:
    """The answers of a server to which all states are alike."""
    urgent = {"type": "noul", "noul": 0.75, "probabilities": {"yes": 0.75, "no": 0.25}, "confidence": 0.75}
    team = {"type": "choice", "choice": "billing", "probabilities": {"yes": 0.1, "billing": 0.9}, "confidence": 0.3}
    return 200, {
        "id": "decision-1",
        "model": body["model"],
        "answers": {"urgent": urgent, "team": team},
        "diagnostics": {"urgent": {"label_mass": 1.0}, "team": {"label_mass": 0.34}},
        "usage": {"input_tokens": 9, "output_tokens": 2},
    }


def refuse(status: int, message: str, code: str = "invalid_request", param: str | None = None) -> tuple[int, Any]:
    return status, {"error": {"message": message, "code": code, "param": param}}


class Server(ThreadingHTTPServer):
    """Answers each state by `respond`, which gets the questions with the state, and keeps what it got. `refused` is the
    answer to a whole call of so many states; None: its states are answered, in the `order` of their numbers. At a
    state whose status is 0 the connection ends.
    """

    daemon_threads = True

    def __init__(self) -> None:
        self.respond: Respond = answer
        self.refused: Callable[[int], tuple[int, Any] | None] = lambda states: None
        self.order: Callable[[range], Iterable[int]] = iter
        self.bodies: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), Exchange)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Requests of a command that has ended are closed."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def states(self) -> list[Any]:
        return [body["state"] for body in self.bodies]


class Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # one write for head and body

    def do_POST(self) -> None:
        server: Any = self.server
        first, *states = map(json.loads, self.rfile.read(int(self.headers["content-length"])).splitlines())
        if refused := server.refused(len(states)):
            status, content = refused
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(data)
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for index in server.order(range(len(states))):
            body = first | states[index]
            server.bodies.append(body)
            status, content = server.respond(body)
            if not status:
                return
            line = {"index": index, **({} if status == 200 else {"status": status}), **content}
            with suppress(OSError):  # the command has ended
                self.wfile.write(json.dumps(line).encode() + b"\n")
                self.wfile.flush()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as started:
        Thread(target=started.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield started
        started.shutdown()


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.yaml"
    path.write_text(QUESTIONS)
    return path


def rows_file(folder: Path, *rows: Any, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def run(server: Server, *arguments: Any, **options: Any) -> Any:
    return CliRunner().invoke(cli.app, ["decide", *map(str, arguments), "--url", server.url], **options)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_rows_are_answered_in_order_whatever_the_order_of_the_answers(
    server: Server, questions: Path, tmp_path: Path
) -> None:
    server.order = reversed
    rows = rows_file(tmp_path, {"state": "first", "id": "a"}, {"state": {"x": 1}}, {"subject": "b", "id": 3})
    result = run(server, questions, rows)
    assert result.exit_code == 0, result.output
    found = lines(result.stdout)
    assert [line["index"] for line in found] == [0, 1, 2]
    assert [line.get("id") for line in found] == ["a", None, 3]
    assert found[0] == {"index": 0, "id": "a"} | {
        name: answer({"model": "m"})[1][name] for name in ("model", "answers", "diagnostics", "usage")
    }
    assert sorted(map(str, server.states)) == sorted(map(str, ["first", {"x": 1}, {"subject": "b", "id": 3}]))
    sent = server.bodies[0]["questions"]
    assert sent["urgent"]["criteria"] == {"true": "at once", "false": "can wait"}
    assert sent["team"]["criteria"] == {"yes": None, "billing": "all of money"}
    assert "3 rows, 0 failed" in result.stderr
    assert "urgent: yes 3; mean confidence 0.750\n" in result.stderr
    assert "team: billing 3; mean confidence 0.300; label mass below 0.5 in 3" in result.stderr


@pytest.mark.parametrize(
    ("name", "text", "options", "states"),
    [
        ("rows.txt", '{"a": 1}\n\nb c \n', [], ['{"a": 1}', "b c"]),
        ("rows.jsonl", '"a"\n["b"]\n{"state": "c"}\n', [], ["a", ["b"], "c"]),
        ("rows.csv", "text,n\nsome,1\n", [], [{"text": "some", "n": "1"}]),
        ("rows.csv", "text,n\nsome,1\n", ["--field", "text"], ["some"]),
        ("rows.log", '{"state": "a"}\n12\n{x\n', [], ["a", "12", "{x"]),
    ],
    ids=["text", "lines", "table", "a column", "either"],
)
def test_kinds_of_rows(
    server: Server, questions: Path, tmp_path: Path, name: str, text: str, options: list[str], states: list[Any]
) -> None:
    (tmp_path / name).write_text(text)
    result = run(server, questions, tmp_path / name, "--concurrency", 1, *options)
    assert result.exit_code == 0, result.output
    assert server.states == states


def test_rows_come_from_standard_input(server: Server, questions: Path) -> None:
    result = run(server, questions, "-", "--field", "text", "--concurrency", 1, input='{"text": "a"}\n{"text": "b"}\n')
    assert result.exit_code == 0, result.output
    assert server.states == ["a", "b"]


def test_a_row_that_fails_has_its_error(server: Server, questions: Path, tmp_path: Path) -> None:
    def refuse_some(body: Mapping[str, Any]) -> tuple[int, Any]:
        match body["state"]:
            case "empty":
                return refuse(400, "state: is empty", "empty_input", "state")
            case "long":
                return refuse(400, "questions.urgent: has 9 tokens", "context_length_exceeded", "questions.urgent")
            case "large":
                return refuse(413, "the body has more than 9 bytes", "body_too_large")
            case "broken":
                return refuse(500, "the step failed", "step_failed")
        return answer(body)

    server.respond = refuse_some
    rows = rows_file(tmp_path, '"empty"', '"fine"', "{", '"long"', '"large"', '"broken"', '{"state": null}')
    result = run(server, questions, rows)
    assert result.exit_code == 1
    found = lines(result.stdout)
    assert ["error" in line for line in found] == [True, False, True, True, True, True, True]
    assert found[0]["error"] == {"message": "state: is empty", "code": "empty_input", "param": "state", "status": 400}
    assert found[2]["error"]["message"].startswith("is not JSON")
    assert found[6]["error"]["message"] == "state: is missing; there are: state"
    assert "7 rows, 6 failed" in result.stderr


@pytest.mark.parametrize(
    "refused",
    [
        refuse(400, "questions.urgent.type: is wrong", param="questions.urgent.type"),
        refuse(401, "a key is required"),
        refuse(404, "no model is called 'm'"),
        (404, {"detail": "another server"}),
    ],
    ids=["a question", "the key", "the model", "another server"],
)
def test_what_is_wrong_with_all_rows_ends_the_command(
    server: Server, questions: Path, tmp_path: Path, refused: tuple[int, Any]
) -> None:
    server.refused = lambda _: refused
    result = run(server, questions, rows_file(tmp_path, *['"a"', '"b"', '"c"']))
    assert result.exit_code == 1
    assert not result.stdout
    message = refused[1].get("error", {}).get("message", "it is no error of a Polyhead server")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_rows_without_an_answer_are_sent_again(server: Server, questions: Path, tmp_path: Path) -> None:
    """Where the server refuses a call or a row because it is busy, and where the connection ends."""
    statuses, calls = [200, 503, 0, 200, 200], [refuse(429, "full"), None, None, None]
    server.refused = lambda _: calls.pop(0)
    server.respond = lambda body: answer(body) if (status := statuses.pop(0)) == 200 else refuse(status, "full")
    result = run(server, questions, rows_file(tmp_path, *['"a"', '"b"', '"c"']))
    assert result.exit_code == 0, result.output
    assert server.states == ["a", "b", "c", "b", "c"]
    assert [line["index"] for line in lines(result.stdout)] == [0, 1, 2]


def test_rows_that_are_too_much_together_are_sent_one_by_one(server: Server, questions: Path, tmp_path: Path) -> None:
    server.refused = lambda states: refuse(413, "the body has more than 9 bytes") if states > 1 else None
    result = run(server, questions, rows_file(tmp_path, *['"a"', '"b"', '"c"']))
    assert result.exit_code == 0, result.output
    assert server.states == ["a", "b", "c"]


def test_an_output_is_continued(server: Server, questions: Path, tmp_path: Path) -> None:
    rows, output = rows_file(tmp_path, *(f'"{number}"' for number in range(5))), tmp_path / "out.jsonl"
    whole = run(server, questions, rows).stdout.splitlines(keepends=True)
    output.write_text("".join(whole[:2]) + whole[2][:20])
    refused = run(server, questions, rows, "--output", output)
    assert (refused.exit_code, output.read_text()) == (1, "".join(whole[:2]) + whole[2][:20])
    assert "exists already; --resume continues it" in refused.stderr
    server.bodies.clear()
    result = run(server, questions, rows, "--output", output, "--resume")
    assert result.exit_code == 0, result.output
    assert output.read_text() == "".join(whole)
    assert sorted(server.states) == ["2", "3", "4"]
    assert "5 rows, 2 of them before, 0 failed" in result.stderr
    assert "urgent: yes 5" in result.stderr


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('{"index": 1}\n', "line 1: is not an answer of polyhead decide to row 0"),
        ("text\n", "line 1: is not an answer of polyhead decide to row 0"),
        ('{"index": 0, "answers": {"odd": {}}}\n', "has answers to other questions"),
        ('{"index": 0, "error": {}}\n{"index": 1, "error": {}}\n', "has 2 answers, more than"),
    ],
    ids=["another row", "text", "other questions", "more rows"],
)
def test_another_file_is_not_continued(
    server: Server, questions: Path, tmp_path: Path, written: str, said: str
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text(written)
    result = run(server, questions, rows_file(tmp_path, '"a"'), "--output", output, "--resume")
    assert result.exit_code == 1
    assert said in result.stderr
    assert output.read_text() == written
    assert not server.bodies


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("questions: {}", "must be an object with the questions by their names"),
        ("- a", "must be a mapping"),
        ("questions: {a: {type: noul}, a: {type: noul}}", "stands twice"),
        ("state: a\nquestions: {a: {type: noul}}", "state: belongs in the rows"),
    ],
    ids=["none", "a list", "twice", "a state"],
)
def test_a_wrong_file_of_questions(server: Server, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "questions.yaml"
    path.write_text(text)
    result = run(server, path, rows_file(tmp_path, '"a"'))
    assert result.exit_code == 1
    assert said in result.stderr


def test_files_that_are_missing(server: Server, questions: Path, tmp_path: Path) -> None:
    for arguments in ((tmp_path / "no.yaml", questions), (questions, tmp_path / "no.jsonl")):
        result = run(server, *arguments)
        assert result.exit_code == 1
        assert re.search(r"no\.\w+ cannot be read: No such file", result.stderr)


def interrupted(arguments: Sequence[str], is_due: Callable[[], bool]) -> tuple[int, str]:
    """The exit code and the messages of a command that gets Ctrl-C.

    A child ignores signals that its parent ignores, as tests that run in the background of a shell do with SIGINT.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    child = subprocess.Popen([sys.executable, "-m", "polyhead", *arguments], stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    wait = Event()
    while not is_due() and child.poll() is None:
        wait.wait(0.01)
    child.send_signal(signal.SIGINT)
    return child.wait(), child.communicate()[1]


def test_ctrl_c_leaves_whole_lines_and_the_rest_can_be_asked(server: Server, questions: Path, tmp_path: Path) -> None:
    rows, output, gate = rows_file(tmp_path, *(f'"{number}"' for number in range(40))), tmp_path / "out.jsonl", Event()

    def block_some(body: Mapping[str, Any]) -> tuple[int, Any]:
        if int(body["state"]) >= 10:
            gate.wait()
        return answer(body)

    server.respond = block_some
    arguments = [*map(str, ("decide", questions, rows, "--output", output, "--url", server.url))]
    code, said = interrupted(arguments, lambda: output.exists() and output.read_bytes().count(b"\n") == 10)
    gate.set()
    assert (code, said.strip()) == (130, "polyhead: stopped after 10 rows; --resume continues")
    assert [line["index"] for line in lines(output.read_text())] == list(range(10))
    assert run(server, questions, rows, "--output", output, "--resume").exit_code == 0
    assert [line["index"] for line in lines(output.read_text())] == list(range(40))


def test_no_more_rows_are_read_than_are_asked(server: Server, questions: Path, tmp_path: Path) -> None:
    """Rows are read as they are needed, however long the file is."""
    read = list[int]()

    class Counted(decision_rows.ReadPosition):
        def __setattr__(self, name: str, value: int) -> None:
            super().__setattr__(name, value)
            read.extend([value] if name == "done" else [])

    most = 0

    def note(body: Mapping[str, Any]) -> tuple[int, Any]:
        nonlocal most
        most = max(most, len(read) - int(body["state"]))
        return answer(body)

    server.respond = note
    rows = rows_file(tmp_path, *(f'"{number}"' for number in range(400)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decide_command, "ReadPosition", Counted)
        assert run(server, questions, rows, "--concurrency", 4).exit_code == 0
    assert 0 < most <= 2 * decide_command.ROWS_AHEAD * 4 + 2
    assert os.path.getsize(rows) == max(read)


def test_what_a_terminal_shows_has_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"index": 0, "model": "a\u009b2J\u202eb"}
    assert "\u009b" in decide_command.format_line(line, is_shown=False).decode()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = decide_command.format_line(line, is_shown=True).decode()
    assert shown.removesuffix("\n").isprintable()
    assert json.loads(shown) == line
