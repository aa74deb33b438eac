"""`polyhead train | evaluate | export`: what a recipe is of, and who follows it.

It doesn't know how.  A recipe with `lora` adapts a checkpoint, one with `network` makes one.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training import recipe, whole
from training.errors import RecipeError
from training.evaluate import of_adapter, of_checkpoint
from training.toml_file import content


def train(path: Path, out: Path, *, smoke: bool = False, resume: bool = False) -> Mapping[str, Any]:
    """Follow the recipe in a file; what came of it, by name."""
    if is_whole(path):
        return vars(whole.run(path, out, quick=smoke, resume=resume))
    if smoke:
        raise RecipeError(f"{path}: a trunk has to be fetched before it is adapted: only whole networks have --smoke")
    return vars(recipe.run(path, out, resume=resume))


def evaluate(folder: Path, what: Path) -> dict[str, float]:
    """The figures of a checkpoint, or of an adapter, on what a recipe holds out or on the texts in a file."""
    if what.suffix == ".toml" and not is_whole(what):
        return of_adapter(folder, what)
    return of_checkpoint(folder, what)


def export(run: Path, out: Path) -> None:
    """What a run made, as a folder that can be served: its adapter, or its network as far as it is."""
    if out.exists() and any(out.iterdir()):
        raise RecipeError(f"{out}: there is something in it; name a new or an empty folder")
    if (run / "adapter").is_dir():
        shutil.copytree(run / "adapter", out, dirs_exist_ok=True)
    else:
        whole.export(run, out)


def is_whole(path: Path) -> bool:
    given = content(path)
    if ("network" in given) == ("lora" in given):
        raise RecipeError(f"{path}: it needs either lora, for an adapter of a trunk, or network, for one from scratch")
    return "network" in given
