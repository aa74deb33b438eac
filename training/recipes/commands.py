"""`polyhead train | evaluate | export`.  A kind of recipe is a line in KINDS."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polyhead.models.checkpoint.folder_files import FolderCheck, accept_folder

from ..data.examples import Corpus
from ..export.adapter_folder import write_json
from ..export.result_folder import copy_result
from ..loop import trainer
from ..loop.errors import RecipeError
from ..networks.base_model import check_written_files, find_downloads
from . import finetune_run, network_run
from .evaluate import evaluate_network, evaluate_task, evaluate_texts
from .recipe import FinetuneRecipe, NetworkRecipe, Recipe, RunOptions, read_recipe

PreparedRun = finetune_run.FinetuneRun | network_run.NetworkRun


@dataclass(frozen=True)
class RecipeKind:
    """How a run is prepared, and how a folder is measured on what the recipe holds out; a Path is the recipe's file."""

    prepare: Callable[[Any, Corpus[Any], RunOptions], PreparedRun]
    evaluate: Callable[[Path, Any, Path, FolderCheck], dict[str, float]]


KINDS: Mapping[type[Recipe], RecipeKind] = {
    FinetuneRecipe: RecipeKind(finetune_run.prepare_run, evaluate_task),
    NetworkRecipe: RecipeKind(network_run.prepare_run, evaluate_network),
}


def train(
    path: Path, out: Path, *, smoke: bool = False, resume: bool = False, folder_check: FolderCheck = accept_folder
) -> dict[str, Any]:
    """Run the recipe in a file, and return the figures of the result by name.

    `out` gets adapter/ or model/, metrics.jsonl, result.json and the files to `resume` from.  Downloads are kept in its
    parent.  `smoke`: a run of seconds without downloads.  `folder_check`: see RunOptions.
    Raises RecipeError for a wrong recipe or run, CheckpointError for a wrong download or checkpoint.
    """
    check_written_files(out)
    recipe = read_recipe(path).smoke_recipe() if smoke else read_recipe(path)
    torch.set_num_threads(recipe.threads)
    corpus = recipe.source.create_sample() if smoke else recipe.source.read_corpus(find_downloads(out.parent))
    options = RunOptions(path, trainer.RunFolder(out, resume, recipe.describe()), smoke, folder_check)
    return complete_run(KINDS[type(recipe)].prepare(recipe, corpus, options), options.run_folder)


def complete_run(run: PreparedRun, run_folder: trainer.RunFolder) -> dict[str, Any]:
    """Train, write the result, measure it, and write its figures to result.json."""
    training: trainer.Trainable[Any] = run.training
    learned = trainer.train(training, run.recipe.plan, run_folder)
    folder = run.write(run_folder.folder)
    figures = run.measure(folder, learned)
    write_json(run_folder.folder / "result.json", {**figures, folder.name: folder.name})
    return figures


def evaluate(folder: Path, data: Path, folder_check: FolderCheck = accept_folder) -> dict[str, float]:
    """Measure a checkpoint or an adapter on a recipe's held-out part, or on the texts in a file.  `folder_check` is
    called with each folder before its tokenizer is read."""
    if data.suffix != ".toml":
        return evaluate_texts(folder, data, folder_check)
    recipe = read_recipe(data)
    return KINDS[type(recipe)].evaluate(folder, recipe, data, folder_check)


def export(run: Path, out: Path, folder_check: FolderCheck = accept_folder) -> None:
    """Write a run's result as a folder that can be served; a network from scratch as far as it is trained.

    The run may be a stranger's: what is copied is checked as what is loaded, and `folder_check` is called with the
    folder of its vocabulary before that is read.  Raises CheckpointError and RecipeError.
    """
    if out.is_symlink() and not out.exists():
        raise RecipeError(f"{out}: it is a link to a missing path; name a new or an empty folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(f"{out}: it is not empty; name a new or an empty folder")
    results = [name for name in ("adapter", "model") if (run / name).is_dir()]
    if results and not (run / network_run.RECIPE_FILE).exists():
        copy_result(run, results[0], out)
    else:
        network_run.export_run(run, out, folder_check)
