"""A recipe: one TOML file that says from what, on what and how an adapter is learned.  `run(path, out)` follows it.

It doesn't know how steps are taken or files are written.  The one idea: the figure that is reported is measured last,
once, on what was held out, with the adapter read back from the files that are shipped.
"""

import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import ConfigDict, PositiveInt, TypeAdapter, ValidationError

from models.architectures import FAMILIES
from models.checkpoint import Checkpoint, load
from models.checkpoint.package import Package, fetch
from models.checkpoint.parts import read_json
from models.heads import SequenceHead
from training import vader
from training.adapter import WEIGHTS, Adapter, head_spec, refuse_unnamed, save, write_json
from training.classifier import Classifier, Labelled, accuracy
from training.data import Example, Split, split_by_domain, split_by_source
from training.errors import RecipeError
from training.lora import LoraLinear, LowRank, wrap
from training.trainer import Plan, train

SOURCES: dict[str, tuple[Callable[[Path], list[Example]], tuple[str, ...]]] = {
    "vader": (lambda downloads: vader.read(vader.fetch_archive(downloads)), vader.LABELS)
}


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

    `batch` is how many texts make a step.
    """

    source: Literal["vader"]
    batch: PositiveInt = 32
    validation: float = 0.1
    held_out: float = 0.1
    leave_out: str = ""


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
    """What came of it.  `majority` is the accuracy of always saying the label that is commoner in what was learned."""

    adapter: Path
    bytes: int
    texts: dict[str, int]
    held_out: dict[str, float]
    validation: dict[str, float]
    majority: float
    seconds: float


def run(path: Path, out: Path) -> Result:
    """Follow the recipe: `out` gets adapter/, metrics.jsonl and result.json; downloads are kept beside it.

    RecipeError says what is wrong with the recipe, CheckpointError what is wrong with a download or a checkpoint.
    """
    recipe = read(path)
    torch.set_num_threads(recipe.threads)
    downloads = out.parent / "downloads"
    folder = trunk_folder(recipe.trunk, path.parent, downloads)
    examples, labels = SOURCES[recipe.data.source]
    return learn(recipe, folder, divide(recipe.data, examples(downloads)), labels, out)


def read(path: Path) -> Recipe:
    """The recipe in a file; RecipeError names the field at fault."""
    try:
        return TypeAdapter(Recipe).validate_python(tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: no TOML: {error}") from None
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise RecipeError(f"{path}: {'; '.join(faults)}") from None


def trunk_folder(trunk: Trunk, beside: Path, downloads: Path) -> Path:
    if trunk.package is None:
        return beside / trunk.folder
    fetch(trunk.package, downloads, f"{trunk.folder}/")
    return downloads / trunk.folder


def divide(data: Data, examples: Sequence[Example]) -> Split:
    """RecipeError if a part would be empty."""
    domains = sorted({example.domain for example in examples})
    if data.leave_out and data.leave_out not in domains:
        raise RecipeError(f"data.leave_out: {data.leave_out!r} is none of {', '.join(domains)}")
    if data.leave_out:
        split = split_by_domain(examples, data.leave_out, data.validation)
    else:
        split = split_by_source(examples, data.validation, data.held_out)
    for part, texts in vars(split).items():
        if not texts:
            raise RecipeError(f"data: nothing falls to {part}; give it a share of the sources between 0 and 1")
    return split


def learn(recipe: Recipe, folder: Path, split: Split, labels: Sequence[str], out: Path) -> Result:
    """Adapt the checkpoint in `folder` to the split, write the adapter, and measure what was written."""
    started = time.monotonic()
    trunk = load(str(folder))
    parts = {part: Labelled.of(texts, trunk.tokenizer, trunk.max_tokens) for part, texts in vars(split).items()}
    task, layers = classifier(recipe, trunk, parts, len(labels))
    train(task, recipe.plan, out / "metrics.jsonl")
    learned = Adapter(
        base=folder,
        base_name=recipe.trunk.name,
        family=trunk.family,
        architecture=recipe.architecture,
        shape=recipe.lora,
        layers=layers,
        head=task.head,
        labels=labels,
    )
    save(learned, out / "adapter")
    result = measured(folder, out / "adapter", parts, time.monotonic() - started)
    write_json(out / "result.json", {**asdict(result), "adapter": "adapter"})
    return result


def classifier(
    recipe: Recipe, trunk: Checkpoint, parts: dict[str, Labelled], labels: int
) -> tuple[Classifier, dict[str, LoraLinear]]:
    """The task, with the trunk's layers wrapped and a new head, both drawn from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    spec = head_spec(FAMILIES[trunk.family], recipe.architecture)
    scoring = spec.scoring(read_json(Path(trunk.source) / "config.json"))
    head = SequenceHead(trunk.config, labels, scoring, "softmax")
    layers = wrap(trunk.network, recipe.lora)
    refuse_unnamed(Path(trunk.source), FAMILIES[trunk.family], layers)
    task = Classifier(
        network=trunk.network,
        head=head,
        train=parts["train"],
        test=parts["validation"],
        batch=recipe.data.batch,
        seed=recipe.seed,
    )
    return task, layers


def measured(folder: Path, adapter: Path, parts: dict[str, Labelled], seconds: float) -> Result:
    """Read back what was written, merged as it will be served."""
    merged = load(f"{folder}+{adapter}")
    commonest, _ = Counter(parts["train"].labels).most_common(1)[0]
    return Result(
        adapter=adapter,
        bytes=(adapter / WEIGHTS).stat().st_size,
        texts={part: len(texts) for part, texts in parts.items()},
        held_out=accuracy(merged.network, merged.head, parts["held_out"]),
        validation=accuracy(merged.network, merged.head, parts["validation"]),
        majority=parts["held_out"].labels.count(commonest) / len(parts["held_out"]),
        seconds=seconds,
    )
