"""A recipe: one TOML file that says from what, on what and how an adapter is learned.  `run(path, out)` follows it.

It doesn't know how steps are taken or files are written.  The one idea: the figure that is reported is measured last,
once, on what was held out, with the adapter read back from the files that are shipped.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, ConfigDict, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from models.architectures import FAMILIES
from models.checkpoint import Checkpoint, load
from models.checkpoint.package import Package, fetch
from models.checkpoint.parts import read_json
from models.heads import SequenceHead, TokenHead
from models.ragged import Ragged
from training.adapter import WEIGHTS, Adapter, head_spec, refuse_unnamed, save, write_json
from training.data import Corpus, Split, split_by_domain, split_by_source
from training.errors import RecipeError
from training.lesson import Learning, Lesson, measure, portions
from training.lora import LoraLinear, LowRank, wrap
from training.plan import Plan
from training.reading import Reader
from training.sources import SOURCES
from training.toml_file import checked, content
from training.trainer import Place, train


def known(source: str) -> str:
    if source not in SOURCES:
        raise ValueError(f"{source!r} is none of {', '.join(SOURCES)}")
    return source


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """The checkpoint that is adapted: a folder beside the recipe, or one inside a package.

    `name` is what others know it by; the adapter names it as its base.
    """

    name: str
    folder: Path
    package: Package | None = None


@dataclass(frozen=True, kw_only=True)
class Data:
    """`validation` and `held_out` are shares of the sources; `leave_out` holds out a whole domain instead.

    `batch` is how many examples make a step.  Of a text the first `most_tokens` are read, special ones included; 0: a
    text that the trunk has no room for is an error.
    """

    source: Annotated[str, AfterValidator(known)]
    batch: PositiveInt = 32
    validation: float = 0.1
    held_out: float = 0.1
    leave_out: str = ""
    most_tokens: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that a run depends on."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    architecture: str
    seed: int
    threads: PositiveInt
    trunk: Trunk
    data: Data
    lora: LowRank
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of it.  `cut` counts the texts of each part that were not read to their end; `baselines` are what
    something simple reaches on what was held out."""

    adapter: Path
    bytes: int
    texts: dict[str, int]
    cut: dict[str, int]
    held_out: dict[str, float]
    validation: dict[str, float]
    baselines: dict[str, float]
    seconds: float


def run(path: Path, out: Path, *, resume: bool = False) -> Result:
    """Follow the recipe: `out` gets adapter/, metrics.jsonl and result.json; downloads are kept beside it.

    RecipeError says what is wrong with the recipe, CheckpointError what is wrong with a download or a checkpoint.
    """
    recipe = read(path)
    torch.set_num_threads(recipe.threads)
    downloads = out.parent / "downloads"
    folder = trunk_folder(recipe.trunk, path.parent, downloads)
    corpus = SOURCES[recipe.data.source].corpus(downloads)
    return learn(recipe, folder, divide(recipe.data, corpus), corpus.labels, Place(out, resume, repr(recipe)))


def read(path: Path) -> Recipe:
    """The recipe in a file; RecipeError names the field at fault."""
    return checked(Recipe, content(path), path)


def trunk_folder(trunk: Trunk, beside: Path, downloads: Path) -> Path:
    if trunk.package is None:
        return beside / trunk.folder
    fetch(trunk.package, downloads, f"{trunk.folder}/")
    return downloads / trunk.folder


def divide(data: Data, corpus: Corpus[Any]) -> Split[Any]:
    """RecipeError if a part would be empty."""
    domains = sorted({example.domain for example in corpus.examples})
    if data.leave_out and data.leave_out not in domains:
        raise RecipeError(f"data.leave_out: {data.leave_out!r} is none of {', '.join(domains)}")
    if data.leave_out:
        split = split_by_domain(corpus, data.leave_out, data.validation)
    else:
        split = split_by_source(corpus, data.validation, data.held_out)
    for part, texts in vars(split).items():
        if not texts:
            raise RecipeError(f"data: nothing falls to {part}; give it a share of the sources between 0 and 1")
    return split


def learn(recipe: Recipe, folder: Path, split: Split[Any], labels: tuple[str, ...], place: Place) -> Result:
    """Adapt the checkpoint in `folder` to the split, write the adapter, and measure what was written."""
    started, out = time.monotonic(), place.folder
    trunk = load(str(folder))
    lesson = SOURCES[recipe.data.source].lesson(labels)
    read = reader(recipe.data, trunk)
    parts = {part: lesson.items(examples, read) for part, examples in vars(split).items()}
    head, layers = wrapped(recipe, trunk, lesson, len(labels))
    task = Learning(
        lesson=lesson,
        network=trunk.network,
        head=head,
        read=read,
        train=parts["train"],
        validation=parts["validation"],
        batch=recipe.data.batch,
        seed=recipe.seed,
    )
    train(task, recipe.plan, place)
    learned = Adapter(
        base=folder,
        base_name=recipe.trunk.name,
        family=trunk.family,
        architecture=recipe.architecture,
        shape=recipe.lora,
        layers=layers,
        head=head,
        labels=labels,
    )
    save(learned, out / "adapter")
    result = measured(task, folder, out / "adapter", parts, time.monotonic() - started)
    write_json(out / "result.json", {**asdict(result), "adapter": "adapter"})
    return result


def reader(data: Data, trunk: Checkpoint) -> Reader:
    """RecipeError if more is to be read than the trunk has room for."""
    if data.most_tokens > trunk.max_tokens:
        raise RecipeError(f"data.most_tokens: {data.most_tokens} is more than the trunk reads, {trunk.max_tokens}")
    return Reader(trunk.tokenizer, data.most_tokens or trunk.max_tokens, cut=data.most_tokens > 0)


def wrapped(
    recipe: Recipe, trunk: Checkpoint, lesson: Lesson[Any], labels: int
) -> tuple[nn.Module, dict[str, LoraLinear]]:
    """A new head, and the trunk's layers wrapped, both drawn from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    spec = head_spec(FAMILIES[trunk.family], recipe.architecture, lesson.kind)
    head: nn.Module
    if lesson.kind == "tag":
        head = TokenHead(trunk.config, labels, "softmax")
    else:
        scoring = spec.scoring(read_json(Path(trunk.source) / "config.json"))
        head = SequenceHead(trunk.config, labels, scoring, "softmax")
    layers = wrap(trunk.network, recipe.lora)
    refuse_unnamed(Path(trunk.source), FAMILIES[trunk.family], layers)
    return head, layers


def measured(
    task: Learning[Any], folder: Path, adapter: Path, parts: Mapping[str, Sequence[Any]], seconds: float
) -> Result:
    """Read back what was written, merged as it will be served."""
    merged = load(f"{folder}+{adapter}")
    figures = partial(measure, task.lesson, merged.network, merged.head, task.read)
    return Result(
        adapter=adapter,
        bytes=(adapter / WEIGHTS).stat().st_size,
        texts={part: len(items) for part, items in parts.items()},
        cut={part: task.lesson.cut(items) for part, items in parts.items()},
        held_out=figures(parts["held_out"]),
        validation=figures(parts["validation"]),
        baselines=task.lesson.baselines(parts["train"], parts["held_out"], partial(vectors, folder, task.read)),
        seconds=seconds,
    )


@torch.no_grad()
def vectors(folder: Path, read: Reader, texts: Sequence[str]) -> Tensor:
    """[N, W], as the trunk makes them by itself; RecipeError if it makes none."""
    trunk = load(str(folder))
    if trunk.task != "embed":
        raise RecipeError(f"trunk: {folder} makes no vectors, with which a ranking is compared; name one that embeds")
    found = []
    for some in portions([text.tokens for text in read(texts)], 64):
        batch = Ragged.of(some)
        found.append(trunk.head.close(trunk.head(trunk.network(batch), batch.starts)))  # type: ignore[operator]
    return torch.cat(found)
