"""Network recipes: one TOML file that describes a network, its data and its training from scratch.  `run` runs it.

A run's folder has everything needed to resume, measure and export it: the recipe, the vocabulary and the weights.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import AfterValidator, ConfigDict, Field, NonNegativeFloat, PositiveInt
from torch import nn

from polyhead.models.core.files import copy_file
from polyhead.models.seq2seq.protocol import Seq2Seq
from polyhead.models.tokenizer import Tokenizer

from ..data.examples import Split, split_by_source
from ..export.adapter_folder import write_json
from ..loop import saved_runs as saved
from ..loop.errors import RecipeError
from ..loop.loss_plot import draw_loss
from ..loop.schedule import TrainingPlan
from ..loop.toml_file import read_toml, validate
from ..loop.trainer import BEST_FILE, RUN_FILE, RunFolder, train
from ..networks.named_networks import NETWORKS, NetworkKind, choose_device
from ..objectives.causal import CausalObjective
from ..objectives.masked import HIDDEN_SHARE, MaskedObjective
from ..objectives.objective import Objective, ObjectiveTraining, measure_objective
from ..objectives.translation import TranslationObjective
from ..objectives.translation_scores import score_translations
from ..tasks.sources import TEXT_SOURCES

VOCABULARY_FOLDER, MODEL_FOLDER, RECIPE_FILE = "vocabulary", "model", "recipe.json"


def check_source(source: str) -> str:
    if source not in TEXT_SOURCES:
        raise ValueError(f"{source!r} is none of {', '.join(TEXT_SOURCES)}")
    return source


@dataclass(frozen=True, kw_only=True)
class NetworkData:
    """The data of a recipe.

    `tokens` is the size of a batch, at most; `context` the length of a sequence; `words` the size of the vocabulary,
    which is learned from the same texts.  `validation` and `held_out` are shares of the sources.
    """

    source: Annotated[str, AfterValidator(check_source)]
    tokens: PositiveInt
    context: PositiveInt
    words: PositiveInt
    validation: float = 0.02
    held_out: float = 0.02


@dataclass(frozen=True, kw_only=True)
class NetworkRecipe:
    """Everything that a run depends on.

    `network` has its `kind` and the fields of its size.  `smoothing` of the targets is for translation only, the share
    of `hidden` tokens for masked language models only.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    seed: int
    threads: PositiveInt
    data: NetworkData
    network: dict[str, Any]
    plan: TrainingPlan
    device: str = "auto"
    smoothing: NonNegativeFloat = 0.0
    hidden: Annotated[float, Field(gt=0, lt=1)] = HIDDEN_SHARE

    @property
    def network_kind(self) -> NetworkKind:
        return NETWORKS[self.network["kind"]]

    def network_size(self, path: Path) -> Any:
        """Return the network's size.  Raises RecipeError that names the wrong field."""
        fields = {name: value for name, value in self.network.items() if name != "kind"}
        return validate(self.network_kind.size_type, fields, path, "network")


@dataclass(frozen=True, kw_only=True)
class NetworkResult:
    """The result of a run: a folder that can be served, its size, its data and its figures."""

    model: str
    parameters: int
    texts: dict[str, int]
    tokens: dict[str, int]
    held_out: dict[str, float]
    validation: dict[str, float]
    learned: dict[str, float]
    notes: list[str] = field(default_factory=list)


def read_recipe(path: Path) -> NetworkRecipe:
    """Read the recipe in a file.  Raises RecipeError that names the wrong field."""
    recipe = validate(NetworkRecipe, read_toml(path), path)
    kind = recipe.network.get("kind")
    if kind not in NETWORKS:
        raise RecipeError(f"{path}: network.kind: {kind!r} is none of {', '.join(NETWORKS)}")
    recipe.network_size(path)
    translates = recipe.network_kind.objective == "translation"
    if translates != TEXT_SOURCES[recipe.data.source].is_translated:
        fit = ", ".join(name for name, texts in TEXT_SOURCES.items() if texts.is_translated == translates)
        raise RecipeError(f"{path}: data.source: a network of kind {kind!r} learns from one of {fit}")
    if recipe.smoothing and not translates:
        raise RecipeError(f"{path}: smoothing: only translation networks have it")
    if recipe.hidden != HIDDEN_SHARE and recipe.network_kind.objective != "masked":
        raise RecipeError(f"{path}: hidden: a network of kind {kind!r} has no tokens hidden from it")
    return recipe


def smoke_recipe(recipe: NetworkRecipe) -> NetworkRecipe:
    """Return the recipe changed to run in a few seconds: a tiny network, a few steps, a few generated texts."""
    data = replace(recipe.data, tokens=256, context=32, words=320, validation=0.2, held_out=0.2)
    network = {**recipe.network, **recipe.network_kind.smoke_size}
    return replace(recipe, data=data, plan=recipe.plan.smoke_plan(), network=network, threads=1)


@dataclass(frozen=True)
class PreparedRun:
    """A recipe with its data split and encoded, its network and its objective."""

    recipe: NetworkRecipe
    vocabulary: Tokenizer
    objective: Objective[Any]
    split: Split[Any]
    items: Mapping[str, list[Any]]


def run(path: Path, out: Path, *, quick: bool = False, resume: bool = False) -> NetworkResult:
    """Run the recipe.  `out` gets model/, metrics.jsonl, loss.png, result.json, and the files to `resume` from.

    `quick`: a smoke run without downloads.  Raises RecipeError for a wrong recipe or run, CheckpointError for a wrong
    download.  Downloads are kept in the folder of `out`.
    """
    recipe = smoke_recipe(read_recipe(path)) if quick else read_recipe(path)
    torch.set_num_threads(recipe.threads)
    course = prepare_run(recipe, out, out.parent / "downloads", quick, again=resume and (out / RUN_FILE).exists())
    described = json.dumps(asdict(recipe), indent=2)
    (out / RECIPE_FILE).write_text(described + "\n")
    task = ObjectiveTraining(
        objective=course.objective,
        train=course.items["train"],
        validation=course.items["validation"],
        tokens=recipe.data.tokens,
        seed=recipe.seed,
    )
    learned = train(task, recipe.plan, RunFolder(out, resume, described))
    write_model(
        course.recipe, course.vocabulary, course.objective.modules(), out / VOCABULARY_FOLDER, out / MODEL_FOLDER
    )
    result = measure_run(course, learned, draw_loss(out / "metrics.jsonl", out / "loss.png"))
    write_json(out / "result.json", asdict(result))
    return result


def prepare_run(recipe: NetworkRecipe, out: Path, downloads: Path, quick: bool, again: bool) -> PreparedRun:
    texts = TEXT_SOURCES[recipe.data.source]
    corpus = texts.create_sample() if quick else texts.read_corpus(downloads)
    split = split_by_source(corpus, recipe.data.validation, recipe.data.held_out)
    if empty := [part for part, examples in vars(split).items() if not examples]:
        raise RecipeError(f"data: {empty[0]} would be empty; give it a share of the sources between 0 and 1")
    if not again:
        shutil.rmtree(out / VOCABULARY_FOLDER, ignore_errors=True)
        sentences = [each for example in split.train for each in (example.text, example.label) if each is not None]
        recipe.network_kind.train_vocabulary(sentences, recipe.data.words, out / VOCABULARY_FOLDER)
    tokenizer = Tokenizer.from_folder(out / VOCABULARY_FOLDER)
    objective = build_objective(recipe, tokenizer, build_modules(recipe, tokenizer))
    items = {part: objective.items(examples) for part, examples in vars(split).items()}
    if isinstance(objective, MaskedObjective):
        objective.initialise_bias(items["train"])
    return PreparedRun(recipe, tokenizer, objective, split, items)


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


def measure_run(course: PreparedRun, learned: dict[str, float], note: str) -> NetworkResult:
    objective, items = course.objective, course.items
    parameters = {id(p): p.numel() for module in objective.modules() for p in module.parameters()}
    tokens = course.recipe.data.tokens
    held_out = measure_objective(objective, items["held_out"], tokens)
    written = (
        score_translations(objective, course.split.held_out, tokens)
        if isinstance(objective, TranslationObjective)
        else {}
    )
    return NetworkResult(
        model=MODEL_FOLDER,
        parameters=sum(parameters.values()),
        texts={part: len(examples) for part, examples in vars(course.split).items()},
        tokens={part: sum(map(objective.size, some)) for part, some in items.items()},
        held_out=held_out | written,
        validation=measure_objective(objective, items["validation"], tokens),
        learned=learned,
        notes=[note],
    )


def write_model(
    recipe: NetworkRecipe, tokenizer: Tokenizer, modules: Sequence[nn.Module], vocabulary: Path, out: Path
) -> None:
    """Write the vocabulary's files and the network's: a folder that can be served."""
    out.mkdir(parents=True, exist_ok=True)
    for file in vocabulary.iterdir():
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
    write_model(recipe, tokenizer, modules, folder / VOCABULARY_FOLDER, out)
