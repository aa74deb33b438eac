"""Runs of training commands, and recipes in their smoke form."""

from collections.abc import Sequence
from pathlib import Path

import torch
from typer.testing import CliRunner

from polyhead.service.cli.main import app
from polyhead.training.recipes import finetune_recipe as recipe

RECIPES = Path(recipe.__file__).parent


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
