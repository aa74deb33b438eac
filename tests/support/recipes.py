"""Runs of training commands, and recipes in their smoke form."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from polyhead.service.cli.main import app
from polyhead.training.data.examples import Corpus, Split
from polyhead.training.loop.trainer import RunFolder
from polyhead.training.recipes import commands
from polyhead.training.recipes.finetune_run import prepare_split
from polyhead.training.recipes.recipe import FinetuneRecipe

RECIPES = Path(commands.__file__).parent


def command(*arguments: object) -> str:
    """The output of a command; the test fails if the command fails."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def tried(names: Sequence[str], folder: Path) -> Path:
    """The folder in which `polyhead train --smoke` wrote the result of each recipe, under its name."""
    threads = torch.get_num_threads()
    for name in names:
        command("train", RECIPES / f"{name}.toml", "--out", folder / name, "--smoke")
    torch.set_num_threads(threads)
    return folder


def finetuned(chosen: FinetuneRecipe, base: Path, split: Split, corpus: Corpus, out: Path) -> dict[str, Any]:
    """The figures of a recipe on a base model and a split of a corpus.

    On one thread: for matrices this small a second one costs more than it brings.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return commands.complete_run(prepare_split(chosen, base, split, corpus), RunFolder(out))
    finally:
        torch.set_num_threads(threads)
