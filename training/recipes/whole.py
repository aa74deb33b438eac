"""A recipe of a whole network: one TOML file that says from what, as what and how it is learned.  `run` follows it.

It doesn't know how steps are taken, what networks are made of, or how files are written.  The one idea: a run's folder
has all that it takes to go on, to measure and to export: the recipe as it was read, the vocabulary, the weights.
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

from polyhead.models.core.files import copy
from polyhead.models.seq2seq.protocol import Seq2Seq
from polyhead.models.tokenizer import Tokenizer

from ..data.examples import Split, split_by_source
from ..export.adapter_folder import write_json
from ..loop import saved_runs as saved
from ..loop.errors import RecipeError
from ..loop.loss_plot import draw
from ..loop.schedule import Plan
from ..loop.toml_file import checked, content
from ..loop.trainer import BEST, RUN, Place, train
from ..networks.named_networks import NETWORKS, Network, device_named
from ..objectives.causal import Causal
from ..objectives.masked import HIDDEN, Masked
from ..objectives.objective import Objective, Practice, measure
from ..objectives.translation import Translation
from ..objectives.translation_scores import quality
from ..tasks.sources import TEXTS

VOCABULARY, MODEL, RECIPE = "vocabulary", "model", "recipe.json"


def known(source: str) -> str:
    if source not in TEXTS:
        raise ValueError(f"{source!r} is none of {', '.join(TEXTS)}")
    return source


@dataclass(frozen=True, kw_only=True)
class Data:
    """`tokens` are those of a batch, at most; `context` those read at once.  `words` is the size of the vocabulary,
    which is learned from the same texts.  `validation` and `held_out` are shares of the sources."""

    source: Annotated[str, AfterValidator(known)]
    tokens: PositiveInt
    context: PositiveInt
    words: PositiveInt
    validation: float = 0.02
    held_out: float = 0.02


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that a run depends on.  `network` has its `kind` and what its shape wants.

    `smoothing` of the target is for translations alone, the share of `hidden` tokens for those who are to tell them.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    seed: int
    threads: PositiveInt
    data: Data
    network: dict[str, Any]
    plan: Plan
    device: str = "auto"
    smoothing: NonNegativeFloat = 0.0
    hidden: Annotated[float, Field(gt=0, lt=1)] = HIDDEN

    @property
    def named(self) -> Network:
        return NETWORKS[self.network["kind"]]

    def shape(self, path: Path) -> Any:
        """What is said of the network; RecipeError names the field at fault."""
        said = {name: value for name, value in self.network.items() if name != "kind"}
        return checked(self.named.shape, said, path, "network")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of it: a folder that can be served, how large it is, what it learned from, how well it does."""

    model: str
    parameters: int
    texts: dict[str, int]
    tokens: dict[str, int]
    held_out: dict[str, float]
    validation: dict[str, float]
    learned: dict[str, float]
    notes: list[str] = field(default_factory=list)


def read(path: Path) -> Recipe:
    """The recipe in a file; RecipeError names the field at fault."""
    recipe = checked(Recipe, content(path), path)
    kind = recipe.network.get("kind")
    if kind not in NETWORKS:
        raise RecipeError(f"{path}: network.kind: {kind!r} is none of {', '.join(NETWORKS)}")
    recipe.shape(path)
    translates = recipe.named.aim == "translation"
    if translates != TEXTS[recipe.data.source].translated:
        fit = ", ".join(name for name, texts in TEXTS.items() if texts.translated == translates)
        raise RecipeError(f"{path}: data.source: a network of kind {kind!r} learns from one of {fit}")
    if recipe.smoothing and not translates:
        raise RecipeError(f"{path}: smoothing: only translations have it")
    if recipe.hidden != HIDDEN and recipe.named.aim != "masked":
        raise RecipeError(f"{path}: hidden: a network of kind {kind!r} has no tokens hidden from it")
    return recipe


def smoke(recipe: Recipe) -> Recipe:
    """The same in a few seconds: a tiny network, a few steps, a few made-up texts."""
    data = replace(recipe.data, tokens=256, context=32, words=320, validation=0.2, held_out=0.2)
    network = {**recipe.network, **recipe.named.smoke}
    return replace(recipe, data=data, plan=recipe.plan.short(), network=network, threads=1)


@dataclass(frozen=True)
class Course:
    """A recipe, ready to be followed: its texts divided and read, its network and what it is taught."""

    recipe: Recipe
    vocabulary: Tokenizer
    objective: Objective[Any]
    split: Split[Any]
    items: Mapping[str, list[Any]]


def run(path: Path, out: Path, *, quick: bool = False, resume: bool = False) -> Result:
    """Follow the recipe.  `out` gets model/, metrics.jsonl, loss.png, result.json, and what it takes to `resume`.

    `quick`: in its smoke form, in which nothing is fetched.  RecipeError says what is wrong with the recipe or the run,
    CheckpointError what is wrong with a download; downloads are kept beside `out`.
    """
    recipe = smoke(read(path)) if quick else read(path)
    torch.set_num_threads(recipe.threads)
    course = prepared(recipe, out, out.parent / "downloads", quick, again=resume and (out / RUN).exists())
    described = json.dumps(asdict(recipe), indent=2)
    (out / RECIPE).write_text(described + "\n")
    task = Practice(
        objective=course.objective,
        train=course.items["train"],
        validation=course.items["validation"],
        tokens=recipe.data.tokens,
        seed=recipe.seed,
    )
    learned = train(task, recipe.plan, Place(out, resume, described))
    write_model(course.recipe, course.vocabulary, course.objective.modules(), out / VOCABULARY, out / MODEL)
    result = measured(course, learned, draw(out / "metrics.jsonl", out / "loss.png"))
    write_json(out / "result.json", asdict(result))
    return result


def prepared(recipe: Recipe, out: Path, downloads: Path, quick: bool, again: bool) -> Course:
    texts = TEXTS[recipe.data.source]
    corpus = texts.sample() if quick else texts.corpus(downloads)
    split = split_by_source(corpus, recipe.data.validation, recipe.data.held_out)
    if empty := [part for part, examples in vars(split).items() if not examples]:
        raise RecipeError(f"data: nothing falls to {empty[0]}; give it a share of the sources between 0 and 1")
    if not again:
        shutil.rmtree(out / VOCABULARY, ignore_errors=True)
        said = [each for example in split.train for each in (example.text, example.label) if each is not None]
        recipe.named.words(said, recipe.data.words, out / VOCABULARY)
    words = Tokenizer.from_folder(out / VOCABULARY)
    objective = aimed(recipe, words, built(recipe, words))
    items = {part: objective.items(examples) for part, examples in vars(split).items()}
    if isinstance(objective, Masked):
        objective.expect(items["train"])
    return Course(recipe, words, objective, split, items)


def built(recipe: Recipe, words: Tokenizer) -> list[nn.Module]:
    """The network, from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    shape = recipe.shape(Path(RECIPE))
    device = device_named(recipe.device)
    return [module.to(device) for module in recipe.named.build(shape, words, recipe.data.context)]


def aimed(recipe: Recipe, words: Tokenizer, modules: Sequence[Any]) -> Objective[Any]:
    limit = recipe.data.context
    match recipe.named.aim:
        case "causal":
            return Causal(network=modules[0], head=modules[1], tokenizer=words, limit=limit)
        case "masked":
            network, head, follows = modules
            hidden = recipe.hidden
            return Masked(network=network, head=head, follows=follows, tokenizer=words, limit=limit, hidden=hidden)
        case "translation":
            writer = cast(Seq2Seq, modules[0])
            return Translation(network=writer, tokenizer=words, limit=limit, smoothing=recipe.smoothing)


def measured(course: Course, learned: dict[str, float], note: str) -> Result:
    objective, items = course.objective, course.items
    parameters = {id(p): p.numel() for module in objective.modules() for p in module.parameters()}
    tokens = course.recipe.data.tokens
    held_out = measure(objective, items["held_out"], tokens)
    written = quality(objective, course.split.held_out, tokens) if isinstance(objective, Translation) else {}
    return Result(
        model=MODEL,
        parameters=sum(parameters.values()),
        texts={part: len(examples) for part, examples in vars(course.split).items()},
        tokens={part: sum(map(objective.size, some)) for part, some in items.items()},
        held_out=held_out | written,
        validation=measure(objective, items["validation"], tokens),
        learned=learned,
        notes=[note],
    )


def write_model(recipe: Recipe, words: Tokenizer, modules: Sequence[nn.Module], known: Path, out: Path) -> None:
    """The vocabulary's files and the network's, a folder that can be served."""
    out.mkdir(parents=True, exist_ok=True)
    for file in known.iterdir():
        if not file.is_dir():
            copy(file, out / file.name)
    recipe.named.write(modules, words, out)


def export(folder: Path, out: Path) -> None:
    """What a run has learned so far, at its best where that is watched, as a folder that can be served."""
    if not (folder / RECIPE).exists():
        raise RecipeError(f"{folder}: no run of a whole network: it has no {RECIPE}")
    recipe = checked(Recipe, json.loads((folder / RECIPE).read_text()), folder / RECIPE)
    words = Tokenizer.from_folder(folder / VOCABULARY)
    modules = built(recipe, words)
    best = recipe.plan.watch and (folder / BEST).exists()
    saved.read_weights(folder / (BEST if best else RUN), modules)
    write_model(recipe, words, modules, folder / VOCABULARY, out)
