"""`polyhead train | evaluate | export`: dispatches on the kind of recipe.

A recipe with `trunk` finetunes a checkpoint; one with `network` trains a network from scratch.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..loop.errors import RecipeError
from ..loop.toml_file import read_toml
from . import finetune_recipe as recipe
from . import network_recipe as whole
from .evaluate import evaluate_checkpoint, evaluate_task


def train(path: Path, out: Path, *, smoke: bool = False, resume: bool = False) -> Mapping[str, Any]:
    """Run the recipe in a file, and return the figures of the result by name."""
    if is_network_recipe(path):
        return vars(whole.run(path, out, quick=smoke, resume=resume))
    return recipe.run(path, out, quick=smoke, resume=resume).as_dict()


def evaluate(folder: Path, data: Path) -> dict[str, float]:
    """Measure a checkpoint or an adapter on a recipe's held-out part, or on the texts in a file."""
    if data.suffix == ".toml" and not is_network_recipe(data):
        return evaluate_task(folder, data)
    return evaluate_checkpoint(folder, data)


def export(run: Path, out: Path) -> None:
    """Write a run's result as a folder that can be served; a network from scratch as far as it is trained."""
    if out.exists() and any(out.iterdir()):
        raise RecipeError(f"{out}: it is not empty; name a new or an empty folder")
    results = [run / name for name in ("adapter", "model") if (run / name).is_dir()]
    if results and not (run / whole.RECIPE_FILE).exists():
        shutil.copytree(results[0], out, symlinks=True, dirs_exist_ok=True)  # symbolic links are not followed
    else:
        whole.export_run(run, out)


def is_network_recipe(path: Path) -> bool:
    fields = read_toml(path)
    if ("network" in fields) == ("trunk" in fields):
        raise RecipeError(
            f"{path}: it needs either trunk, a checkpoint to finetune, or network, to train one from scratch"
        )
    return "network" in fields
