"""A tokenizer with token ids that the network lacks is rejected with a message. If only few texts have such tokens,
each such request is rejected."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from polyhead.models.checkpoint import load
from polyhead.models.core.errors import CheckpointError
from polyhead.service.cli import main as cli
from tests.support.processes import PATIENCE, Process

HUGE = 2_000_000_000
Change = Callable[[dict[str, Any]], None]


def special(id: int) -> Change:
    def change(tokenizer: dict[str, Any]) -> None:
        tokenizer["post_processor"]["special_tokens"]["[CLS]"]["ids"] = [id]

    return change


def segment(number: int, kind: str = "single") -> Change:
    def change(tokenizer: dict[str, Any]) -> None:
        tokenizer["post_processor"][kind][-1]["SpecialToken"]["type_id"] = number

    return change


def shifted(tokenizer: dict[str, Any]) -> None:
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: id + 1000 for word, id in words.items()}
    for token in tokenizer["added_tokens"]:
        token["id"] += 1000


def larger(tokenizer: dict[str, Any]) -> None:
    """One word more than the network has embeddings for."""
    tokenizer["model"]["vocab"]["zzz"] = 999


FOREIGN: dict[str, tuple[Change, str]] = {
    "a huge special token": (special(HUGE), f"its tokenizer makes token {HUGE} of the text, and the network has"),
    "the next special token": (special(300), "its tokenizer makes token 300 of the text, and the network has"),
    "a segment": (segment(3), "its tokenizer makes segment 3 of the text, and the network has 2 segments"),
    "a huge segment": (segment(HUGE), f"its tokenizer makes segment {HUGE} of the text"),
    "a segment of a pair": (segment(2, "pair"), "its tokenizer makes segment 2 of the text"),
    "other numbers for all words": (shifted, "its tokenizer makes token"),
}


def edited(folder: Path, target: Path, change: Change) -> Path:
    shutil.copytree(folder, target)
    file = target / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    change(tokenizer)
    file.write_text(json.dumps(tokenizer))
    return target


@pytest.mark.parametrize("name", FOREIGN)
def test_a_tokenizer_of_another_network_is_rejected(name: str, tiny_classifier: Path, tmp_path: Path) -> None:
    change, said = FOREIGN[name]
    folder = edited(tiny_classifier, tmp_path / "foreign", change)
    with pytest.raises(CheckpointError, match=said):
        load(str(folder))
    result = CliRunner().invoke(cli.app, ["check", str(folder), "--device", "cpu"])
    assert result.exit_code == 1
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture
def served() -> Iterator[Callable[..., Process]]:
    """Starts servers; each is ended after the test."""
    started: list[Process] = []

    def start(*arguments: str) -> Process:
        started.append(Process(*arguments))
        started[-1].until(lambda: started[-1].get("/startupz").status_code == 200)
        return started[-1]

    yield start
    for process in started:
        process.child.kill()
        process.child.wait()


@pytest.mark.timeout(120)
def test_a_token_that_the_network_lacks_fails_one_request(
    served: Callable[..., Process], tiny_classifier: Path, tmp_path: Path
) -> None:
    """A model that is rejected does not stop the others."""
    larger_folder = edited(tiny_classifier, tmp_path / "larger", larger)
    foreign = edited(tiny_classifier, tmp_path / "foreign", special(HUGE))
    server = served(f"judge={larger_folder}", f"foreign={foreign}", "--device", "cpu")

    def ask(model: str, text: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/models/{model}/predict", json={"inputs": text}, timeout=PATIENCE)

    assert ask("judge", "a good film").status_code == 200
    refused = ask("judge", "a zzz film")
    assert refused.status_code in (400, 422)
    assert "token 999 is outside the vocabulary of" in refused.text
    assert ask("judge", "a good film").status_code == 200
    assert ask("foreign", "a good film").status_code == 503
    assert server.child.poll() is None
