"""The command line: short start time, late imports, clear error messages."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from polyhead.models.checkpoint import hub
from polyhead.service.cli import checkpoint_commands as cli_checkpoint
from polyhead.service.cli import client, conversation, terminal
from polyhead.service.cli import main as cli
from polyhead.service.cli.chat_options import ChatOptions
from polyhead.service.cli.client import ApiClient, ClientError
from polyhead.service.core.version import VERSION
from polyhead.service.runtime import quickstart

Answer = Callable[[httpx.Request], httpx.Response]


def polyhead(*arguments: str, **options: Any) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), **options)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_help_imports_no_large_libraries() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from polyhead.service.cli.main import app\n"
        "result = CliRunner().invoke(app, ['--help'])\n"
        "assert result.exit_code == 0, result\n"
        "heavy = {'torch', 'fastapi', 'pydantic', 'httpx', 'transformers', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_help_is_fast() -> None:
    """0.12 s on an idle core; the limit leaves room for a busy one."""
    fastest = min(computed("--help") for _ in range(3))
    assert fastest < 0.6


def computed(*arguments: str) -> float:
    """Seconds of processor time, which a busy machine hardly changes."""
    before = os.times()
    subprocess.run([sys.executable, "-m", "polyhead", *arguments], capture_output=True, check=True)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def test_every_command_is_listed() -> None:
    said = polyhead("--help").stdout
    assert all(
        command in said
        for command in (
            "serve",
            "chat",
            "classify",
            "embed",
            "decide",
            "models",
            "train",
            "quantize",
            "quality",
            "verify-determinism",
        )
    )
    assert polyhead("--version").stdout == f"polyhead {VERSION}\n"


def test_flags_of_serve_are_the_settings() -> None:
    result = polyhead("serve", "--help")
    assert result.exit_code == 0
    assert "--max-body-bytes" in result.stdout
    assert "NAME=SOURCE" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prot", "1"], "no setting is called 'prot'; did you mean port?"),
        (["--port", "99999"], "port: should be less than or equal to 65535"),
        (["./llama"], "'./llama' is not of the form name=source"),
        (["--config", "/nowhere"], "config: /nowhere cannot be read"),
    ],
)
def test_invalid_settings_are_reported_before_anything_is_loaded(arguments: list[str], said: str) -> None:
    result = polyhead("serve", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


ENDS_WITH_A_THREAD = """
import threading
from polyhead.service.cli import main

class Left:
    def __del__(self):
        print("the interpreter has ended", flush=True)

left = Left()

def run_server(chosen):
    threading.Thread(target=threading.Event().wait).start()  # not a daemon: the interpreter would wait for it
    return 3

main.run_server = run_server
main.app(["serve", "--port", "0"])
"""


def test_a_server_exits_whatever_other_threads_do() -> None:
    """A thread of a library that computes while the interpreter ends crashes the process."""
    done = subprocess.run([sys.executable, "-c", ENDS_WITH_A_THREAD], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (3, ""), done.stderr


def answering(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> list[httpx.Request]:
    """The requests that commands send; `answer` creates the answers."""
    seen: list[httpx.Request] = []

    def answered(request: httpx.Request) -> httpx.Response:
        request.read()
        seen.append(request)
        return answer(request)

    real = httpx.Client
    monkeypatch.setattr(
        client.httpx, "Client", lambda **options: real(transport=httpx.MockTransport(answered), **options)
    )
    return seen


def served(request: httpx.Request) -> httpx.Response:
    match request.url.path:
        case "/v1/models":
            data = [{"id": "clf", "task": "classify"}, {"id": "talk", "task": "generate"}, {"id": "v", "task": "embed"}]
            return httpx.Response(200, json={"data": data})
        case "/v1/chat/completions":
            pieces = ["Par", "is", None]
            chunks = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces] + [{"choices": []}]
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
            return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))
        case "/models/clf/predict":
            return httpx.Response(200, json=[{"label": "good", "score": 0.75}, {"label": "bad", "score": 0.25}])
        case "/v1/embeddings":
            return httpx.Response(200, json={"data": [{"embedding": [0.5, -1.0]}]})
        case _:
            return httpx.Response(404, json={"error": {"message": "no such thing"}})


def body(request: httpx.Request) -> Any:
    return json.loads(request.content)


def test_a_question_is_read_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = answering(monkeypatch, served)
    result = polyhead("chat", "--key", "s3cret", "--max-tokens", "9", input="What is\nthe capital?")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "Paris\n"
    assert seen[1].headers["authorization"] == "Bearer s3cret"
    assert body(seen[1]) == {
        "model": "talk",
        "messages": [{"role": "user", "content": "What is\nthe capital?"}],
        "stream": True,
        "max_tokens": 9,
    }


def test_a_question_is_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = answering(monkeypatch, served)
    assert polyhead("chat", "What is", "the capital?", "--model", "talk").stdout == "Paris\n"
    assert body(seen[0])["messages"] == [{"role": "user", "content": "What is the capital?"}]


@pytest.mark.parametrize(
    ("finish", "arguments", "is_cut"),
    [("stop", (), False), ("length", (), True), ("length", ("--max-tokens", "2"), True), (None, (), True)],
)
def test_an_answer_to_a_pipe_that_was_cut_says_so(
    monkeypatch: pytest.MonkeyPatch, finish: str | None, arguments: tuple[str, ...], *, is_cut: bool
) -> None:
    """Without a limit of the request the command ends it after PIPED_TOKENS pieces."""
    monkeypatch.setattr(cli, "PIPED_TOKENS", 2 if finish else 1)
    ended = {"choices": [{"delta": {}, "finish_reason": finish}]}

    def answer(request: httpx.Request) -> httpx.Response:
        found = served(request)
        if "chat" not in request.url.path:
            return found
        return httpx.Response(200, text=found.text.replace('{"choices": []}', json.dumps(ended)))

    answering(monkeypatch, answer)
    result = polyhead("chat", *arguments, input="What?")
    assert result.stdout == ("Paris\n" if finish else "Par\n")
    assert ("the answer was cut" in result.stderr) == is_cut


def test_commands_find_the_server_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = answering(monkeypatch, served)
    monkeypatch.setenv("POLYHEAD_URL", "http://testserver:7")
    polyhead("classify", "x")
    polyhead("chat", input="What?")
    polyhead("embed", "x", "--url", "http://testserver:8")
    assert [request.url.port for request in seen if "v1/models" not in request.url.path] == [7, 7, 8]


def test_a_conversation_keeps_its_messages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = answering(monkeypatch, served)
    monkeypatch.setattr(sys, "stdin", Typed("One\n\nTwo\n"))
    conversation.hold_conversation(ApiClient("http://testserver", ""), TALK)
    assert capsys.readouterr().out == "Paris\nParis\n"
    said = [(message["role"], message["content"]) for message in body(seen[-1])["messages"]]
    assert said == [("user", "One"), ("assistant", "Paris"), ("user", "Two")]
    assert "authorization" not in seen[0].headers


TALK = ChatOptions("talk", renders_markdown=False)


class Typed(io.StringIO):
    def isatty(self) -> bool:
        return True


def read_typed(prompt: str) -> str:
    """`input` where standard input is no real terminal."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


class Screen(Typed):
    """A terminal that stores what is written."""


HOSTILE = "\x1b]0;own\x07\x1b[2J\r\x9b31m\u202e\u2069\u200b\U000e0041"
WRITTEN_OUT = r"\u001b]0;own\u0007\u001b[2J\r\u009b31m\u202e\u2069\u200b\U000e0041"


def test_a_terminal_gets_no_control_characters_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def hostile(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/predict"):
            return httpx.Response(200, json=[{"label": HOSTILE, "score": 1.0}])
        if HOSTILE in json.loads(request.content)["messages"][-1]["content"]:
            return httpx.Response(400, json={"error": {"message": HOSTILE}})
        piece = {"choices": [{"delta": {"content": f"a\tb\n{HOSTILE}"}}]}
        return httpx.Response(200, text=f"data: {json.dumps(piece)}\n\ndata: [DONE]\n\n")

    answering(monkeypatch, hostile)
    for stream in (Screen, io.StringIO):
        shown = WRITTEN_OUT if stream is Screen else HOSTILE
        out, err = stream(), stream()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        terminal.classify(ApiClient("http://testserver", ""), "talk", ["a text"])
        assert out.getvalue() == f"{shown}\t1.0000\ta text\n"
        monkeypatch.setattr(sys, "stdin", Typed(f"One\n{HOSTILE}\n"))
        monkeypatch.setattr("builtins.input", lambda prompt: read_typed(prompt))
        conversation.hold_conversation(ApiClient("http://testserver", ""), TALK)
        assert out.getvalue().endswith(f"a text\na\tb\n{shown}\n")
        assert f"{shown}\n" in err.getvalue()


def test_control_characters_of_a_model_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = Screen(), Screen()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    cli_checkpoint.print_text(f"a\n{HOSTILE}")
    cli_checkpoint.report_failure(HOSTILE)
    assert out.getvalue() == f"a\n{WRITTEN_OUT}\n"
    assert err.getvalue() == f"polyhead: {WRITTEN_OUT}\n"


def test_an_error_in_a_conversation_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([httpx.Response(400, json={"error": {"message": "too long"}}), None])
    seen = answering(monkeypatch, lambda request: next(answers) or served(request))
    monkeypatch.setattr(sys, "stdin", Typed("One\nTwo\n"))
    conversation.hold_conversation(ApiClient("http://testserver", ""), TALK)
    out, err = capsys.readouterr()
    assert out == "Paris\n"
    assert "too long" in err
    assert [message["content"] for message in body(seen[-1])["messages"]] == ["Two"]


def test_an_error_in_a_stream_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = 'data: {"choices": [{"delta": {"content": "Pa"}}]}\n\ndata: {"error": {"message": "the step failed"}}\n\n'
    answering(monkeypatch, lambda request: httpx.Response(200, text=failed))
    result = polyhead("chat", "--model", "talk", input="Hi")
    assert (result.exit_code, result.stdout) == (1, "Pa\n")
    assert result.stderr == "polyhead: the step failed\n"


def test_texts_are_labelled_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = answering(monkeypatch, served)
    assert polyhead("classify", "fine film", "fun").stdout == "good\t0.7500\tfine film\ngood\t0.7500\tfun\n"
    assert polyhead("classify", "--model", "clf", input="one\ntwo\n").stdout.count("\n") == 2
    assert body(seen[1]) == {"inputs": "fine film"}


def test_texts_become_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, served)
    assert polyhead("embed", "fine").stdout == "[0.5,-1.0]\n"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(401, json={"error": {"message": "no key"}}), "no key"),
        (httpx.Response(503, json={"error": "loading", "error_type": "Unhealthy"}), "loading"),
        (httpx.Response(502, text="<html>"), "answered 502, and it is no error of a Polyhead server"),
        (httpx.Response(200, json={"data": []}), "serves no model to classify; it serves: none is ready yet"),
    ],
)
def test_errors_are_one_message(monkeypatch: pytest.MonkeyPatch, answer: httpx.Response, said: str) -> None:
    answering(monkeypatch, lambda request: answer)
    result = polyhead("classify", "x")
    assert result.exit_code == 1
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_missing_server_is_reported_with_its_address() -> None:
    result = polyhead("classify", "x", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "http://127.0.0.1:9 does not answer" in result.stderr
    with pytest.raises(ClientError, match="does not answer"):
        ApiClient("ftp://127.0.0.1", "").find_model("embed")


def test_models_are_fetched_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHEAD_MODEL_DIR", "/somewhere")
    fetched: list[object] = []
    monkeypatch.setattr(quickstart, "fetch_all", fetched.append)
    lines = dict(line.split("=", 1) for line in polyhead("models").stdout.splitlines())
    assert lines.keys() == {"smollm2", "minilm", "sentiment"}
    assert str(fetched[0]) == "/somewhere"
    assert lines["minilm"].startswith("/somewhere/")


def test_models_of_the_hub_are_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []

    def download(source: str, options: hub.DownloadOptions) -> Path:
        asked.append((source, options.max_bytes))
        options.progress(1, 2)
        return tmp_path / source.partition("/")[2]

    monkeypatch.setattr(hub, "download", download)
    monkeypatch.setenv("POLYHEAD_DOWNLOAD_GIB", "3")
    result = polyhead("download", "org/a", "org/b:Q8_0")
    assert result.stdout.splitlines() == [str(tmp_path / "a"), str(tmp_path / "b:Q8_0")]
    assert asked == [("org/a", 3 << 30), ("org/b:Q8_0", 3 << 30)]
    assert "org/a, bytes: 1 of 2" in result.stderr
    assert polyhead("download", "://x").exit_code == 1


def test_an_invalid_recipe_is_reported() -> None:
    result = polyhead("train", "/nowhere.toml")
    assert result.exit_code == 1
    assert "/nowhere.toml" in result.stderr
    assert "Traceback" not in result.stderr
