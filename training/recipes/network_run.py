"""Training from scratch: builds a network, learns its vocabulary and its weights, and measures it.

A run's folder has everything needed to resume, measure and export it: the recipe, the vocabulary and the weights.
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from polyhead.models.checkpoint.folder_files import FolderCheck, read_json
from polyhead.models.checkpoint.tensor_files import TensorEntry
from polyhead.models.core.files import subfolder
from polyhead.models.seq2seq.protocol import Seq2Seq
from polyhead.models.tokenizer import Tokenizer

from ..data.examples import Corpus, Split
from ..export.result_folder import copy_result
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
MAX_NUMBERS = 1 << 31  # numbers of a network that is exported; all are in memory
MAX_TABLE = 1 << 24  # numbers of a table of positions that any file of weights may have


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
    """Learn the vocabulary, unless a saved run is resumed, build the network, and encode the data.

    A run that is resumed may be a stranger's: `options.folder_check` is called with its vocabulary's folder first.
    Raises CheckpointError.
    """
    split, run_folder = split_corpus(recipe.data, corpus), options.run_folder
    vocabulary = run_folder.folder / VOCABULARY_FOLDER
    if run_folder.resume and (run_folder.folder / RUN_FILE).exists():
        vocabulary = subfolder(run_folder.folder, VOCABULARY_FOLDER)
        options.folder_check(vocabulary, {})
    else:
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
    copy_result(run, VOCABULARY_FOLDER, out)
    recipe.network_kind.write(modules, tokenizer, out)


def export_run(folder: Path, out: Path, folder_check: FolderCheck) -> None:
    """Write a run's current weights, or the best if a figure is watched, as a folder that can be served.

    The folder may be a stranger's: `folder_check` is called with that of its vocabulary before it is read, and the
    network is built after its sizes were compared with the file of weights.  Raises CheckpointError and RecipeError.
    """
    file = folder / RECIPE_FILE
    if not file.exists():
        raise RecipeError(f"{folder}: not a run of a network recipe: it has no {RECIPE_FILE}")
    recipe = replace(validate(NetworkRecipe, read_json(file), file), device="cpu")
    recipe.check(file)
    vocabulary = subfolder(folder, VOCABULARY_FOLDER)
    folder_check(vocabulary, {})
    tokenizer = Tokenizer.from_folder(vocabulary)
    best = recipe.plan.watch and (folder / BEST_FILE).exists()
    weights = folder / (BEST_FILE if best else RUN_FILE)
    entries = saved.read_entries(weights)
    check_size(recipe, tokenizer, [each for name, each in entries.items() if name.startswith(saved.WEIGHT)], file)
    with torch.device("meta"):
        saved.check_weights(weights, entries, build_modules(replace(recipe, device="meta"), tokenizer))
    modules = build_modules(recipe, tokenizer)
    saved.read_weights(weights, modules)
    write_model(recipe, tokenizer, modules, folder, out)


def check_size(recipe: NetworkRecipe, tokenizer: Tokenizer, entries: Collection[TensorEntry], file: Path) -> None:
    """Raise RecipeError for a network that has more layers or wider ones than the tensors `entries` can be of.

    A table of positions is computed, and layers are built, before shapes can be compared.
    """
    numbers, sizes = sum(prod(entry.shape) for entry in entries), asdict(recipe.network_size(file))
    if numbers > MAX_NUMBERS:
        raise RecipeError(f"{file}: its weights are {numbers} numbers, and {MAX_NUMBERS} are the most that is exported")
    width, context = sizes["width"], recipe.data.context
    if width * tokenizer.vocab_size > numbers or width * context > max(numbers, MAX_TABLE):
        raise RecipeError(f"{file}: network.width: {width} features are more than the saved weights have")
    wrong = next((name for name, size in sizes.items() if type(size) is int and size > 2 * numbers), "")
    if wrong or sizes["depth"] > len(entries):
        raise RecipeError(f"{file}: network.{wrong or 'depth'}: it is more than the saved weights have")
