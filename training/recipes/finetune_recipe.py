"""Finetune recipes: one TOML file that names the base model, the data and the training plan of a task.  `run(path,
out)` runs it.

With `lora`, an adapter and a head are trained and the base model is frozen; without it, the whole base model is trained
with its new head.  The reported figure is measured last and once, on the held-out part, with the weights read back from
the written files.
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
    """The data of a recipe.

    `validation` and `held_out` are shares of the sources; `leave_out` holds out a whole domain instead.  `batch` is the
    number of examples in a step.  Of each text the first `most_tokens` are read, special tokens included; 0: a text
    that is too long for the base model is an error.
    """

    source: Annotated[str, AfterValidator(check_source)]
    batch: PositiveInt = 32
    validation: float = 0.1
    held_out: float = 0.1
    leave_out: str = ""
    most_tokens: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True)
class FinetuneRecipe:
    """Everything that a run depends on.

    Without `lora` the whole base model is trained, with `dropout`.  `auxiliary` is the weight of a second loss:
    predicting each token of the texts from those before it.
    """

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
    """The result of a run, in the folder `made`.

    `cut` counts the truncated texts of each part, `left_out` the texts without anything to learn.  `baselines` are
    figures of simple methods on the held-out part.
    """

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
        """Return the fields by name; the folder is named "adapter" or "model"."""
        figures = {name: value for name, value in asdict(self).items() if name != "made"}
        return {self.made.name: str(self.made), **figures}


def run(path: Path, out: Path, *, quick: bool = False, resume: bool = False) -> FinetuneResult:
    """Run the recipe: `out` gets adapter/ or model/, metrics.jsonl and result.json.  Downloads are kept in the folder
    of `out`.

    `quick`: a smoke run with a tiny base model and a few generated examples.  Raises RecipeError for a wrong recipe,
    CheckpointError for a wrong download or checkpoint.
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
    """Read the recipe in a file.  Raises RecipeError that names the wrong field."""
    recipe = validate(FinetuneRecipe, read_toml(path), path)
    trunk = recipe.trunk
    if bool(trunk.run) == (trunk.folder != Path()):
        raise RecipeError(f"{path}: trunk: it needs either run, the name of another run, or folder")
    if recipe.lora and (trunk.fresh or recipe.dropout):
        wrong = "trunk.fresh" if trunk.fresh else "dropout"
        raise RecipeError(f"{path}: {wrong}: only a trunk that is trained whole has it; leave it out, or lora")
    if recipe.lora and TASK_SOURCES[recipe.data.source].config_fields:
        raise RecipeError(f"{path}: lora: an adapter has no field for how {recipe.data.source} are read; leave it out")
    if recipe.lora and not trunk.name:
        raise RecipeError(f"{path}: trunk.name: an adapter names its base; give the trunk's public name")
    return recipe


def smoke_recipe(recipe: FinetuneRecipe) -> FinetuneRecipe:
    """Return the recipe changed to run in a few seconds."""
    data = replace(recipe.data, batch=8, validation=0.3, held_out=0.3, leave_out="", most_tokens=0)
    return replace(recipe, data=data, plan=recipe.plan.smoke_plan(), threads=1)


def split_corpus(data: FinetuneData, corpus: Corpus[Any]) -> Split[Any]:
    """Split a corpus.  Raises RecipeError if a part would be empty."""
    domains = sorted({example.domain for example in corpus.examples})
    if data.leave_out and data.leave_out not in domains:
        raise RecipeError(f"data.leave_out: {data.leave_out!r} is none of {', '.join(domains)}")
    if data.leave_out:
        split = split_by_domain(corpus, data.leave_out, data.validation)
    else:
        split = split_by_source(corpus, data.validation, data.held_out)
    for part, texts in vars(split).items():
        if not texts:
            raise RecipeError(f"data: {part} would be empty; give it a share of the sources between 0 and 1")
    return split


def train_and_measure(
    recipe: FinetuneRecipe, folder: Path, split: Split[Any], corpus: Corpus[Any], run_folder: RunFolder
) -> FinetuneResult:
    """Train the checkpoint in `folder`, write the result, read it back and measure it."""
    started, labels = time.monotonic(), corpus.labels
    base = load(str(folder))
    task = TASK_SOURCES[recipe.data.source].create_task(labels)
    reader = build_reader(recipe.data, base)
    parts = {part: task.items(examples, reader) for part, examples in vars(split).items()}
    model = prepare_model(recipe, base, task, len(labels))
    training = TaskTraining(
        task=task,
        network=model.network,
        head=model.head,
        reader=reader,
        train=parts["train"],
        validation=parts["validation"],
        batch=recipe.data.batch,
        seed=recipe.seed,
        auxiliary=auxiliary_losses(recipe, base),
    )
    train(training, recipe.plan, run_folder)
    result_folder = write_trained(recipe, folder, model, labels, run_folder.folder)
    result = measure_written(training, folder, result_folder, parts, corpus.left_out)
    result = replace(result, seconds=time.monotonic() - started)
    write_json(run_folder.folder / "result.json", {**result.as_dict(), result_folder.name: result_folder.name})
    return result


def auxiliary_losses(recipe: FinetuneRecipe, base: Checkpoint) -> tuple[LanguageModelLoss, ...]:
    """Return the auxiliary loss, if any.  Raises RecipeError if the base model attends to later tokens."""
    if not recipe.auxiliary:
        return ()
    if not base.config.causal:
        raise RecipeError(f"auxiliary: {base.source} attends to later tokens; only generators can predict the next one")
    return (LanguageModelLoss(recipe.auxiliary, special_tokens(base.tokenizer)),)


def build_reader(data: FinetuneData, base: Checkpoint) -> TextReader:
    """Return the text reader.  Raises RecipeError if `most_tokens` is more than the base model reads."""
    if data.most_tokens > base.max_tokens:
        raise RecipeError(f"data.most_tokens: {data.most_tokens} is more than the trunk reads, {base.max_tokens}")
    return TextReader(base.tokenizer, data.most_tokens or base.max_tokens, may_truncate=data.most_tokens > 0)


@dataclass(frozen=True)
class PreparedModel:
    """A network and a head to train, and its adapted layers, empty without LoRA."""

    family: str
    network: Transformer
    head: nn.Module
    layers: dict[str, LoraLinear]


def prepare_model(recipe: FinetuneRecipe, base: Checkpoint, task: Task[Any], labels: int) -> PreparedModel:
    """Create the head, and wrap the layers in adapters or take the whole base model.  Random weights come from the
    recipe's seed.
    """
    torch.manual_seed(recipe.seed)
    family, network, layers = FAMILIES[base.family], base.network, {}
    spec = head_spec(family, recipe.architecture, task.kind)
    head = build_head(base, spec, labels)
    if recipe.lora is None:
        check_architecture(base.family, recipe.architecture)
        network = with_fresh_weights(network) if recipe.trunk.fresh else network
        initialise_head(head, base, spec, recipe.trunk.fresh)
        add_dropout(network, recipe.dropout)
    else:
        layers = add_adapters(network, recipe.lora)
        check_layer_names(Path(base.source), family, layers)
    return PreparedModel(base.family, network, head, layers)


def build_head(base: Checkpoint, spec: HeadSpec, labels: int) -> nn.Module:
    match spec.task:
        case "tag":
            return TokenHead(base.config, labels, "softmax")
        case "span":
            return TokenHead(base.config, 2, "none")
        case _:
            scoring = spec.scoring(read_json(Path(base.source) / "config.json"))
            return SequenceHead(base.config, labels, scoring, "softmax")


def write_trained(recipe: FinetuneRecipe, folder: Path, model: PreparedModel, labels: Sequence[str], out: Path) -> Path:
    """Write the adapter or the whole model, and return its folder."""
    if recipe.lora is None:
        finetuned = FinetunedModel(
            base_folder=folder,
            family=model.family,
            architecture=recipe.architecture,
            network=model.network,
            head=model.head,
            labels=labels,
            config_fields=TASK_SOURCES[recipe.data.source].config_fields,
        )
        save_whole(finetuned, out / "model")
        return out / "model"
    adapter = TrainedAdapter(
        base=folder,
        base_name=recipe.trunk.name,
        family=model.family,
        architecture=recipe.architecture,
        lora=recipe.lora,
        layers=model.layers,
        head=model.head,
        labels=labels,
    )
    save_adapter(adapter, out / "adapter")
    return out / "adapter"


def measure_written(
    training: TaskTraining[Any], folder: Path, result_folder: Path, parts: Mapping[str, Sequence[Any]], left_out: int
) -> FinetuneResult:
    """Measure the written files as they would be served, an adapter merged."""
    served = load(str(result_folder) if result_folder.name == "model" else f"{folder}+{result_folder}")
    figures = partial(measure_task, training.task, served.network, served.head, training.reader)
    return FinetuneResult(
        made=result_folder,
        bytes=sum(file.stat().st_size for file in result_folder.glob("*.safetensors")),
        texts={part: len(items) for part, items in parts.items()},
        cut={part: training.task.truncated_count(items) for part, items in parts.items()},
        left_out=left_out,
        held_out=figures(parts["held_out"]),
        validation=figures(parts["validation"]),
        baselines=training.task.baselines(
            parts["train"], parts["held_out"], partial(embed_texts, folder, training.reader)
        ),
        seconds=0.0,
    )


@torch.no_grad()
def embed_texts(folder: Path, read: TextReader, texts: Sequence[str]) -> Tensor:
    """Return vectors [N, W] of the base model.  Raises RecipeError if it is no embedder."""
    base = load(str(folder))
    if base.task != "embed":
        raise RecipeError(f"trunk: {folder} makes no vectors, which the ranking baseline needs; name an embedder")
    vectors = []
    for batch_texts in split_batches([text.tokens for text in read(texts)], 64):
        batch = RaggedBatch.of(batch_texts)
        vectors.append(base.head.postprocess(base.head(base.network(batch), batch.starts)))  # type: ignore[operator]
    return torch.cat(vectors)
