"""What is printed when a server is ready: every line can be used as it stands."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyhead.service.cli.main import app
from polyhead.service.core.request import Task
from polyhead.service.server.first_steps import (
    DEFAULT_URL,
    ServerAddress,
    choose_example,
    describe_first_steps,
    program_name,
)
from tests.support.audit import take_violations
from tests.support.processes import started
from tests.support.scripted import model

KEY, EVERY_INTERFACE = "first-steps-key", "0.0.0.0"


def rows(text: str) -> dict[str, str]:
    """The printed lines by their labels."""
    return dict(re.findall(r"^  (\w+) +(.*)$", text, flags=re.MULTILINE))


@pytest.fixture(scope="module")
def printed(tiny_generator: Path, tiny_classifier: Path, tiny_embedder: Path) -> Iterator[dict[str, str]]:
    """The rows that a real server prints. It stops after the tests."""
    models = f"judge={tiny_classifier}", f"talk={tiny_generator}", f"vectors={tiny_embedder}"
    process = started(("serve",), ("--port", "0", "--api-key", KEY, *models))
    assert process.stderr is not None
    lines = list[str]()
    for line in process.stderr:
        lines.append(line)
        if line.startswith("  terminal"):
            break
    else:
        pytest.fail("".join(lines))
    yield rows("".join(lines))
    process.kill()
    process.wait()


def test_a_server_prints_its_page_and_models(printed: dict[str, str]) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", printed["page"])
    assert printed["models"] == "judge (classify), talk (generate), vectors (embed)"


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not here")
def test_the_printed_request_is_answered(printed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHEAD_API_KEY", KEY)
    done = subprocess.run(["sh", "-c", printed["request"]], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["object"] == "chat.completion", done.stdout


def test_the_printed_command_reaches_the_server(printed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHEAD_API_KEY", KEY)
    _, command, *options = shlex.split(printed["terminal"])
    assert [command, *options[:2]] == ["chat", "--temperature", "0"]  # its checkpoint suggests no temperature
    result = CliRunner().invoke(app, [command, *options, "--max-tokens", "2"], input="Hi")
    assert result.exit_code == 0, result.stderr
    assert not take_violations()


HERE = ServerAddress(DEFAULT_URL, requires_key=False, has_page=True)


@pytest.mark.parametrize(
    ("tasks", "path", "command"),
    [
        (("rank", "embed", "classify"), "/models/classify/predict", 'polyhead classify "A warm'),
        (("rank", "embed"), "/v1/embeddings", 'polyhead embed "A warm'),
        (("generate", "classify"), "/v1/completions", "polyhead --help"),  # without a chat template
        (("rank", "span"), "/v1/models", "polyhead --help"),
    ],
)
def test_the_example_is_of_a_task_that_is_served(
    tasks: tuple[Task, ...], path: str, command: str, tiny_generator: Path
) -> None:
    models = [model(tiny_generator, task, task, chat=None) for task in tasks]
    found = rows(describe_first_steps(HERE, models, "polyhead"))
    assert f"{DEFAULT_URL}{path}" in shlex.split(found["request"])
    assert found["terminal"].startswith(command)
    assert "--url" not in found["terminal"]
    assert "authorization" not in found["request"].lower()


def test_a_checkpoint_that_suggests_a_temperature_needs_no_option(tiny_generator: Path) -> None:
    suggesting = replace(model(tiny_generator, "talk", "generate"), sampling={"temperature": 0.2})
    assert rows(describe_first_steps(HERE, [suggesting], "polyhead"))["terminal"] == "polyhead chat"


def test_an_address_of_all_interfaces_is_shown_as_one_to_call(tiny_embedder: Path) -> None:
    assert (
        ServerAddress(f"http://{EVERY_INTERFACE}:81", requires_key=False, has_page=True).local_url
        == "http://127.0.0.1:81"
    )
    assert ServerAddress("https://[::]:81", requires_key=False, has_page=True).local_url == "https://[::1]:81"
    without = ServerAddress(f"http://{EVERY_INTERFACE}:81", requires_key=False, has_page=False)
    found = rows(describe_first_steps(without, [model(tiny_embedder, "v", "embed")], "polyhead"))
    assert "page" not in found
    assert found["terminal"].endswith("--url http://127.0.0.1:81")
    assert choose_example([]) is None


def test_the_program_is_named_as_it_can_be_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "my files" / "bin" / "polyhead"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    assert program_name(str(program), tmp_path) == "'my files/bin/polyhead'"
    assert program_name(str(program), Path("/nowhere")) == shlex.quote(str(program))
    monkeypatch.setenv("PATH", str(program.parent))
    assert program_name(str(program), tmp_path) == "polyhead"
    assert program_name("/some/polyhead/__main__.py", Path("/nowhere")) == f"{shlex.quote(sys.executable)} -m polyhead"
