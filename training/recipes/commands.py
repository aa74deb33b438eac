"""`polyhead train | evaluate | export`: what a recipe is of, and who follows it.

It doesn't know how.  A recipe with `trunk` goes on with a checkpoint, one with `network` makes one.
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
    """Follow the recipe in a file; what came of it, by name."""
    if is_network_recipe(path):
        return vars(whole.run(path, out, quick=smoke, resume=resume))
    return recipe.run(path, out, quick=smoke, resume=resume).as_dict()


def evaluate(folder: Path, what: Path) -> dict[str, float]:
    """The figures of a checkpoint, or of an adapter, on what a recipe holds out or on the texts in a file."""
    if what.suffix == ".toml" and not is_network_recipe(what):
        return evaluate_task(folder, what)
    return evaluate_checkpoint(folder, what)


def export(run: Path, out: Path) -> None:
    """What a run made, as a folder that can be served; a network from scratch as far as it is."""
    if out.exists() and any(out.iterdir()):
        raise RecipeError(f"{out}: there is something in it; name a new or an empty folder")
    made = [run / name for name in ("adapter", "model") if (run / name).is_dir()]
    if made and not (run / whole.RECIPE_FILE).exists():
        shutil.copytree(made[0], out, symlinks=True, dirs_exist_ok=True)  # a link is not followed
    else:
        whole.export_run(run, out)


def is_network_recipe(path: Path) -> bool:
    given = read_toml(path)
    if ("network" in given) == ("trunk" in given):
        raise RecipeError(f"{path}: it needs either trunk, a network to go on with, or network, for one from scratch")
    return "network" in given
