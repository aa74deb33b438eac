"""A recipe: one TOML file that says from what, on what and how a task is learned.  `run(path, out)` follows it.

It doesn't know how steps are taken or files are written.  With `lora` an adapter and a head are learned on a trunk that
stays as it is; without it the whole trunk is, with its new head.  The one idea: the figure that is reported is measured
last, once, on what was held out, with what was learned read back from the files that are shipped.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from polyhead.models.architectures import FAMILIES, HeadSpec
from polyhead.models.checkpoint import Checkpoint, load
from polyhead.models.checkpoint.folder_files import read_json
from polyhead.models.network.heads import SequenceHead, TokenHead
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.transformer import Transformer

from ..data.examples import Corpus, Split, split_by_domain, split_by_source
from ..export.adapter_folder import TrainedAdapter, check_layer_names, head_spec, write_json
from ..export.adapter_folder import save_adapter as save_adapter
from ..export.finetuned_folder import FinetunedModel, check_architecture
from ..export.finetuned_folder import save_finetuned as save_whole
from ..loop.dropout import DropoutRate, add_dropout
from ..loop.errors import RecipeError
from ..loop.lora_training import LoraConfig, LoraLinear, add_adapters
from ..loop.schedule import TrainingPlan
from ..loop.toml_file import read_toml, validate
from ..loop.trainer import RunFolder, train
from ..networks.base_model import BaseModelSpec, find_base_folder, initialise_head, with_fresh_weights, write_tiny_base
from ..networks.delimiter_tokens import add_delimiters
from ..tasks.auxiliary import LanguageModelLoss, special_tokens
from ..tasks.sources import TASK_SOURCES
from ..tasks.task import Task, TaskTraining, measure_task, split_batches
from ..tasks.text_reader import TextReader


def check_source(source: str) -> str:
    if source not in TASK_SOURCES:
        raise ValueError(f"{source!r} is none of {', '.join(TASK_SOURCES)}")
    return source


@dataclass(frozen=True, kw_only=True)
class FinetuneData:
    """`validation` and `held_out` are shares of the sources; `leave_out` holds out a whole domain instead.

    `batch` is how many examples make a step.  Of a text the first `most_tokens` are read, special ones included; 0: a
    text that the trunk has no room for is an error.
    """

    source: Annotated[str, AfterValidator(check_source)]
    batch: PositiveInt = 32
    validation: float = 0.1
    held_out: float = 0.1
    leave_out: str = ""
    most_tokens: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True)
class FinetuneRecipe:
    """All that a run depends on.  Without `lora` the whole trunk is learned, with `dropout` as networks made here have
    it.  `auxiliary` weighs what is learned beside the task: to tell each token of its texts from those before it."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    architecture: str
    seed: int
    threads: PositiveInt
    trunk: BaseModelSpec
    data: FinetuneData
    plan: TrainingPlan
    lora: LoraConfig | None = None
    dropout: DropoutRate = 0.0
    auxiliary: NonNegativeFloat = 0.0


@dataclass(frozen=True, kw_only=True)
class FinetuneResult:
    """What came of it, in the folder `made`.  `cut` counts the texts of each part that were not read to their end,
    `left_out` those in which there was nothing to learn; `baselines` are what something simple reaches on what was held
    out."""

    made: Path
    bytes: int
    texts: dict[str, int]
    cut: dict[str, int]
    left_out: int
    held_out: dict[str, float]
    validation: dict[str, float]
    baselines: dict[str, float]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The same by name; the folder by its own: "adapter" or "model"."""
        figures = {name: value for name, value in asdict(self).items() if name != "made"}
        return {self.made.name: str(self.made), **figures}


def run(path: Path, out: Path, *, quick: bool = False, resume: bool = False) -> FinetuneResult:
    """Follow the recipe: `out` gets adapter/ or model/, metrics.jsonl and result.json; downloads are kept beside it.

    `quick`: in its smoke form, with a tiny trunk and a few made-up examples.  RecipeError says what is wrong with the
    recipe, CheckpointError what is wrong with a download or a checkpoint.
    """
    recipe = smoke_recipe(read_recipe(path)) if quick else read_recipe(path)
    torch.set_num_threads(recipe.threads)
    source = TASK_SOURCES[recipe.data.source]
    corpus = source.create_sample() if quick else source.read_corpus(out.parent / "downloads")
    folder = out / "trunk" if quick else find_base_folder(recipe.trunk, path.parent, out.parent)
    if quick:
        torch.manual_seed(recipe.seed)
        write_tiny_base(recipe.architecture, corpus.examples, folder, embeds=recipe.lora is not None)
    if recipe.trunk.delimited:
        folder = add_delimiters(folder, out / "delimited", recipe.seed)
    return train_and_measure(
        recipe, folder, split_corpus(recipe.data, corpus), corpus, RunFolder(out, resume, repr(recipe))
    )


def read_recipe(path: Path) -> FinetuneRecipe:
    """The recipe in a file; RecipeError names the field at fault."""
    recipe = validate(FinetuneRecipe, read_toml(path), path)
    trunk = recipe.trunk
    if bool(trunk.run) == (trunk.folder != Path()):
        raise RecipeError(f"{path}: trunk: it needs either run, for what another run made, or folder")
    if recipe.lora and (trunk.fresh or recipe.dropout):
        wrong = "trunk.fresh" if trunk.fresh else "dropout"
        raise RecipeError(f"{path}: {wrong}: only a trunk that is learned whole has it; leave it out, or lora")
    if recipe.lora and TASK_SOURCES[recipe.data.source].config_fields:
        raise RecipeError(f"{path}: lora: an adapter cannot say how {recipe.data.source} are read; leave it out")
    if recipe.lora and not trunk.name:
        raise RecipeError(f"{path}: trunk.name: an adapter names its base so; say what others know the trunk by")
    return recipe


def smoke_recipe(recipe: FinetuneRecipe) -> FinetuneRecipe:
    """The same in a few seconds."""
    data = replace(recipe.data, batch=8, validation=0.3, held_out=0.3, leave_out="", most_tokens=0)
    return replace(recipe, data=data, plan=recipe.plan.smoke_plan(), threads=1)


def split_corpus(data: FinetuneData, corpus: Corpus[Any]) -> Split[Any]:
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


def train_and_measure(
    recipe: FinetuneRecipe, folder: Path, split: Split[Any], corpus: Corpus[Any], place: RunFolder
) -> FinetuneResult:
    """Teach the checkpoint in `folder` the split of a corpus, write what was learned, and measure what was written."""
    started, labels = time.monotonic(), corpus.labels
    trunk = load(str(folder))
    lesson = TASK_SOURCES[recipe.data.source].create_task(labels)
    read = build_reader(recipe.data, trunk)
    parts = {part: lesson.items(examples, read) for part, examples in vars(split).items()}
    learner = prepare_model(recipe, trunk, lesson, len(labels))
    task = TaskTraining(
        task=lesson,
        network=learner.network,
        head=learner.head,
        reader=read,
        train=parts["train"],
        validation=parts["validation"],
        batch=recipe.data.batch,
        seed=recipe.seed,
        auxiliary=auxiliary_losses(recipe, trunk),
    )
    train(task, recipe.plan, place)
    made = write_trained(recipe, folder, learner, labels, place.folder)
    result = measure_written(task, folder, made, parts, corpus.left_out)
    result = replace(result, seconds=time.monotonic() - started)
    write_json(place.folder / "result.json", {**result.as_dict(), made.name: made.name})
    return result


def auxiliary_losses(recipe: FinetuneRecipe, trunk: Checkpoint) -> tuple[LanguageModelLoss, ...]:
    """RecipeError if the trunk sees what it would have to tell."""
    if not recipe.auxiliary:
        return ()
    if not trunk.config.causal:
        raise RecipeError(f"auxiliary: {trunk.source} sees what comes next; only generators learn to tell it")
    return (LanguageModelLoss(recipe.auxiliary, special_tokens(trunk.tokenizer)),)


def build_reader(data: FinetuneData, trunk: Checkpoint) -> TextReader:
    """RecipeError if more is to be read than the trunk has room for."""
    if data.most_tokens > trunk.max_tokens:
        raise RecipeError(f"data.most_tokens: {data.most_tokens} is more than the trunk reads, {trunk.max_tokens}")
    return TextReader(trunk.tokenizer, data.most_tokens or trunk.max_tokens, may_truncate=data.most_tokens > 0)


@dataclass(frozen=True)
class PreparedModel:
    """What learns: a network and a head, and the layers of it that are adapted, if it is adapted."""

    family: str
    network: Transformer
    head: nn.Module
    layers: dict[str, LoraLinear]


def prepare_model(recipe: FinetuneRecipe, trunk: Checkpoint, lesson: Task[Any], labels: int) -> PreparedModel:
    """A new head, and the trunk's layers wrapped or all of it, as it is or fresh; what is drawn, from the recipe's
    seed."""
    torch.manual_seed(recipe.seed)
    family, network, layers = FAMILIES[trunk.family], trunk.network, {}
    spec = head_spec(family, recipe.architecture, lesson.kind)
    head = build_head(trunk, spec, labels)
    if recipe.lora is None:
        check_architecture(trunk.family, recipe.architecture)
        network = with_fresh_weights(network) if recipe.trunk.fresh else network
        initialise_head(head, trunk, spec, recipe.trunk.fresh)
        add_dropout(network, recipe.dropout)
    else:
        layers = add_adapters(network, recipe.lora)
        check_layer_names(Path(trunk.source), family, layers)
    return PreparedModel(trunk.family, network, head, layers)


def build_head(trunk: Checkpoint, spec: HeadSpec, labels: int) -> nn.Module:
    match spec.task:
        case "tag":
            return TokenHead(trunk.config, labels, "softmax")
        case "span":
            return TokenHead(trunk.config, 2, "none")
        case _:
            scoring = spec.scoring(read_json(Path(trunk.source) / "config.json"))
            return SequenceHead(trunk.config, labels, scoring, "softmax")


def write_trained(
    recipe: FinetuneRecipe, folder: Path, learner: PreparedModel, labels: Sequence[str], out: Path
) -> Path:
    """The folder of the adapter, or of the whole model."""
    if recipe.lora is None:
        whole = FinetunedModel(
            base_folder=folder,
            family=learner.family,
            architecture=recipe.architecture,
            network=learner.network,
            head=learner.head,
            labels=labels,
            config_fields=TASK_SOURCES[recipe.data.source].config_fields,
        )
        save_whole(whole, out / "model")
        return out / "model"
    adapter = TrainedAdapter(
        base=folder,
        base_name=recipe.trunk.name,
        family=learner.family,
        architecture=recipe.architecture,
        lora=recipe.lora,
        layers=learner.layers,
        head=learner.head,
        labels=labels,
    )
    save_adapter(adapter, out / "adapter")
    return out / "adapter"


def measure_written(
    task: TaskTraining[Any], folder: Path, made: Path, parts: Mapping[str, Sequence[Any]], left_out: int
) -> FinetuneResult:
    """Read back what was written, an adapter merged, as it will be served."""
    served = load(str(made) if made.name == "model" else f"{folder}+{made}")
    figures = partial(measure_task, task.task, served.network, served.head, task.reader)
    return FinetuneResult(
        made=made,
        bytes=sum(file.stat().st_size for file in made.glob("*.safetensors")),
        texts={part: len(items) for part, items in parts.items()},
        cut={part: task.task.truncated_count(items) for part, items in parts.items()},
        left_out=left_out,
        held_out=figures(parts["held_out"]),
        validation=figures(parts["validation"]),
        baselines=task.task.baselines(parts["train"], parts["held_out"], partial(embed_texts, folder, task.reader)),
        seconds=0.0,
    )


@torch.no_grad()
def embed_texts(folder: Path, read: TextReader, texts: Sequence[str]) -> Tensor:
    """[N, W], as the trunk makes them by itself; RecipeError if it makes none."""
    trunk = load(str(folder))
    if trunk.task != "embed":
        raise RecipeError(f"trunk: {folder} makes no vectors, with which a ranking is compared; name one that embeds")
    found = []
    for some in split_batches([text.tokens for text in read(texts)], 64):
        batch = RaggedBatch.of(some)
        found.append(trunk.head.close(trunk.head(trunk.network(batch), batch.starts)))  # type: ignore[operator]
    return torch.cat(found)
