"""`polyhead export` of a network's run that somebody else has made: a sentence, whatever its files are."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from polyhead.models.checkpoint.tensor_files import read_metadata
from polyhead.models.core.errors import CheckpointError
from polyhead.models.tokenizer import Tokenizer
from polyhead.service.cli.main import app
from polyhead.service.runtime.tokenizer_check import TokenizerCheck
from polyhead.training.recipes import network_run
from tests.support.recipes import tried

WEIGHTS, RECIPE = network_run.BEST_FILE, network_run.RECIPE_FILE


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smoke run."""
    return tried(["gpt"], tmp_path_factory.mktemp("runs")) / "gpt"


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it; its tokenizer is not tried in a child process."""
    monkeypatch.setattr(TokenizerCheck, "check_folder", lambda *_: None)
    return Path(shutil.copytree(trained, tmp_path / "run"))


def export(run: Path, out: Path) -> str:
    """The sentence that an export ends with; empty if it succeeds."""
    result = CliRunner().invoke(app, ["export", str(run), str(out)])
    assert result.exit_code == (1 if result.stderr else 0), result.exception
    return result.stderr


def change_recipe(table: str = "", **fields: object) -> Callable[[Path], object]:
    def change(run: Path) -> None:
        recipe = json.loads((run / RECIPE).read_text())
        (recipe[table] if table else recipe).update(fields)
        (run / RECIPE).write_text(json.dumps(recipe))

    return change


def write_recipe(text: str) -> Callable[[Path], object]:
    return lambda run: (run / RECIPE).write_text(text)


def change_tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def write(run: Path) -> None:
        metadata, tensors = dict(read_metadata(run / WEIGHTS)), load_file(run / WEIGHTS)
        change(tensors)
        save_file(tensors, run / WEIGHTS, metadata)

    return write


def move_out(name: str) -> Callable[[Path], object]:
    """Replace a file or a folder of the run by a link to it."""

    def move(run: Path) -> None:
        shutil.move(run / name, run.parent / "elsewhere")
        (run / name).symlink_to(run.parent / "elsewhere")

    return move


def replace_by_pipe(name: str) -> Callable[[Path], object]:
    return lambda run: ((run / name).unlink(), os.mkfifo(run / name))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (write_recipe("{"), "recipe.json: is no valid JSON"),
        (write_recipe("[" * 100_000), "recipe.json: is no valid JSON"),
        (write_recipe("[]"), "recipe.json: should hold a JSON dict"),
        (write_recipe("{}"), "recipe.json: seed: Field required"),
        (replace_by_pipe(RECIPE), "recipe.json: is no regular file"),
        (lambda run: os.truncate(run / RECIPE, 1 << 40), "recipe.json: is longer than 4 MiB"),
        (move_out(RECIPE), "recipe.json: is a link that leads out of its folder"),
        (move_out("vocabulary"), "'vocabulary' is no folder inside this one"),
        (move_out(WEIGHTS), "best.safetensors: no run can be resumed from it: is a link that leads out"),
        (replace_by_pipe(WEIGHTS), "best.safetensors: no run can be resumed from it: is no regular file"),
        (lambda run: os.mkfifo(run / "vocabulary" / "pipe"), "pipe: is no regular file"),
        (change_recipe("network", kind=[]), "network.kind: [] is none of gpt"),
        (change_recipe("network", width=1 << 40, heads=1), "network.width: 1099511627776 features are more than"),
        (change_recipe("data", context=1 << 40), "features are more than the saved weights have"),
        (change_recipe("network", depth=1 << 20), "network.depth: it is more than the saved weights have"),
        (change_recipe("network", mlp_width=1 << 40), "network.mlp_width: it is more than the saved weights have"),
        (change_recipe("network", mlp_width=1 << 13), "it is of another network: 0.blocks.0.mlp"),
        (change_tensors(lambda tensors: tensors.pop("weight.0.tokens.weight")), "is only in one of both"),
        (
            change_tensors(lambda tensors: tensors.update({"weight.0.tokens.weight": torch.zeros(2, 1)})),
            "0.tokens.weight is [2, 1] there",
        ),
    ],
)
def test_a_wrong_run_is_not_exported(
    run: Path, tmp_path: Path, change: Callable[[Path], object], complaint: str
) -> None:
    change(run)
    assert complaint in export(run, tmp_path / "out")


def test_weights_are_exported_without_progress_and_on_any_device(run: Path, tmp_path: Path) -> None:
    """What only training needs is not read, such as the progress and the state of the optimizer."""
    tensors = {name: tensor for name, tensor in load_file(run / WEIGHTS).items() if name.startswith("weight.")}
    save_file({**tensors, "optimizer.x.y": torch.zeros(1)}, run / WEIGHTS)
    change_recipe(device="cuda:7")(run)
    assert not export(run, tmp_path / "out")
    exported = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert exported == (run / "model" / "model.safetensors").read_bytes()


def test_a_tokenizer_is_tried_before_it_is_read(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: TokenizerCheck, source: Path, __: object) -> None:
        raise CheckpointError("the child process ended", file=str(source))

    monkeypatch.setattr(TokenizerCheck, "check_folder", refuse)
    monkeypatch.setattr(Tokenizer, "from_folder", lambda _: pytest.fail("the tokenizer was read"))
    assert "vocabulary: the child process ended" in export(run, tmp_path / "out")
