"""Training from scratch: builds a network, learns its vocabulary and its weights, and measures it.

A run's folder has everything needed to resume, measure and export it: the recipe, the vocabulary and the weights.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from polyhead.models.core.files import copy_file
from polyhead.models.seq2seq.protocol import Seq2Seq
from polyhead.models.tokenizer import Tokenizer

from ..data.examples import Corpus, Split
from ..loop import saved_runs as saved
from ..loop.errors import RecipeError
from ..loop.loss_plot import draw_loss
from ..loop.toml_file import validate
from ..loop.trainer import BEST_FILE, RUN_FILE
from ..networks.named_networks import choose_device
from ..objectives.causal import CausalObjective
from ..objectives.masked import MaskedObjective
from ..objectives.objective import Objective, ObjectiveTraining, measure_objective
from ..objectives.translation import TranslationObjective
from ..objectives.translation_scores import score_translations
from .recipe import NetworkRecipe, RunOptions, split_corpus

VOCABULARY_FOLDER, MODEL_FOLDER, RECIPE_FILE = "vocabulary", "model", "recipe.json"


@dataclass(frozen=True)
class NetworkRun:
    """A prepared run.  `items` are those of each part of the data."""

    recipe: NetworkRecipe
    vocabulary: Tokenizer
    objective: Objective[Any]
    split: Split[Any]
    items: Mapping[str, list[Any]]

    @property
    def training(self) -> ObjectiveTraining[Any]:
        return ObjectiveTraining(
            objective=self.objective,
            train=self.items["train"],
            validation=self.items["validation"],
            tokens=self.recipe.data.tokens,
            seed=self.recipe.seed,
        )

    def write(self, out: Path) -> Path:
        """Write model/, and return it."""
        write_model(self.recipe, self.vocabulary, self.objective.modules(), out, out / MODEL_FOLDER)
        return out / MODEL_FOLDER

    def measure(self, folder: Path, learned: dict[str, float]) -> dict[str, Any]:
        """Measure the trained network, and draw its loss.  `learned` are the figures of the weights in use."""
        out, objective, items, tokens = folder.parent, self.objective, self.items, self.recipe.data.tokens
        note = draw_loss(out / "metrics.jsonl", out / "loss.png")
        parameters = {id(p): p.numel() for module in objective.modules() for p in module.parameters()}
        return {
            folder.name: folder.name,
            "parameters": sum(parameters.values()),
            "texts": {part: len(examples) for part, examples in vars(self.split).items()},
            "tokens": {part: sum(map(objective.size, some)) for part, some in items.items()},
            "held_out": measure_objective(objective, items["held_out"], tokens)
            | score_translations(objective, self.split.held_out, tokens),
            "validation": measure_objective(objective, items["validation"], tokens),
            "learned": learned,
            "notes": [note],
        }


def prepare_run(recipe: NetworkRecipe, corpus: Corpus[Any], options: RunOptions) -> NetworkRun:
    """Learn the vocabulary, unless a saved run is resumed, build the network, and encode the data."""
    split, run_folder = split_corpus(recipe.data, corpus), options.run_folder
    vocabulary = run_folder.folder / VOCABULARY_FOLDER
    if not (run_folder.resume and (run_folder.folder / RUN_FILE).exists()):
        shutil.rmtree(vocabulary, ignore_errors=True)
        sentences = [each for example in split.train for each in (example.text, example.label) if each is not None]
        recipe.network_kind.train_vocabulary(sentences, recipe.data.words, vocabulary)
    tokenizer = Tokenizer.from_folder(vocabulary)
    objective = build_objective(recipe, tokenizer, build_modules(recipe, tokenizer))
    items = {part: objective.items(examples) for part, examples in vars(split).items()}
    if isinstance(objective, MaskedObjective):
        objective.initialise_bias(items["train"])
    (run_folder.folder / RECIPE_FILE).write_text(recipe.describe() + "\n")
    return NetworkRun(recipe, tokenizer, objective, split, items)


def build_modules(recipe: NetworkRecipe, tokenizer: Tokenizer) -> list[nn.Module]:
    """Build the network's modules, initialised from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    shape = recipe.network_size(Path(RECIPE_FILE))
    device = choose_device(recipe.device)
    return [module.to(device) for module in recipe.network_kind.build(shape, tokenizer, recipe.data.context)]


def build_objective(recipe: NetworkRecipe, tokenizer: Tokenizer, modules: Sequence[Any]) -> Objective[Any]:
    limit = recipe.data.context
    match recipe.network_kind.objective:
        case "causal":
            return CausalObjective(network=modules[0], head=modules[1], tokenizer=tokenizer, limit=limit)
        case "masked":
            network, head, follows = modules
            hidden = recipe.hidden
            return MaskedObjective(
                network=network, head=head, next_head=follows, tokenizer=tokenizer, limit=limit, hidden_share=hidden
            )
        case "translation":
            writer = cast(Seq2Seq, modules[0])
            return TranslationObjective(network=writer, tokenizer=tokenizer, limit=limit, smoothing=recipe.smoothing)


def write_model(recipe: NetworkRecipe, tokenizer: Tokenizer, modules: list[nn.Module], run: Path, out: Path) -> None:
    """Write the files of the run's vocabulary and of the network: a folder that can be served."""
    out.mkdir(parents=True, exist_ok=True)
    for file in (run / VOCABULARY_FOLDER).iterdir():
        if not file.is_dir():
            copy_file(file, out / file.name)
    recipe.network_kind.write(modules, tokenizer, out)


def export_run(folder: Path, out: Path) -> None:
    """Write a run's current weights, or the best if a figure is watched, as a folder that can be served."""
    if not (folder / RECIPE_FILE).exists():
        raise RecipeError(f"{folder}: not a run of a network recipe: it has no {RECIPE_FILE}")
    recipe = validate(NetworkRecipe, json.loads((folder / RECIPE_FILE).read_text()), folder / RECIPE_FILE)
    tokenizer = Tokenizer.from_folder(folder / VOCABULARY_FOLDER)
    modules = build_modules(recipe, tokenizer)
    best = recipe.plan.watch and (folder / BEST_FILE).exists()
    saved.read_weights(folder / (BEST_FILE if best else RUN_FILE), modules)
    write_model(recipe, tokenizer, modules, folder, out)
