"""Finetuning: trains a task on a base model.

With `lora`, an adapter and a head are trained and the base model is frozen; without it, the whole base model is trained
with its new head.  The reported figure is measured last and once, on the held-out part, with the weights read back from
the written files.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.models.architectures import FAMILIES, HeadSpec
from polyhead.models.checkpoint import Checkpoint, describe_source, load
from polyhead.models.checkpoint.folder_files import read_json
from polyhead.models.network.heads import SequenceHead, TokenHead
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.transformer import Transformer

from ..data.examples import Corpus, Split
from ..export.adapter_folder import TrainedAdapter, check_layer_names, head_spec, save_adapter
from ..export.finetuned_folder import FinetunedModel, check_architecture, save_finetuned
from ..loop.dropout import add_dropout
from ..loop.errors import RecipeError
from ..loop.lora_training import LoraLinear, add_adapters
from ..networks.base_model import find_base_folder, initialise_head, with_fresh_weights, write_tiny_base
from ..networks.delimiter_tokens import add_delimiters
from ..tasks.auxiliary import LanguageModelLoss, special_tokens
from ..tasks.task import Task, TaskTraining, measure_task, split_batches
from ..tasks.text_reader import TextReader
from .recipe import FinetuneData, FinetuneRecipe, RunOptions, split_corpus


@dataclass(frozen=True, kw_only=True)
class FinetuneRun:
    """A prepared run: the items of each part of the data, and the adapted layers, none without LoRA."""

    recipe: FinetuneRecipe
    base: Checkpoint
    corpus: Corpus[Any]
    parts: Mapping[str, Sequence[Any]]
    layers: Mapping[str, LoraLinear]
    training: TaskTraining[Any]
    started: float  # by time.monotonic

    def write(self, out: Path) -> Path:
        """Write adapter/ or model/, and return it."""
        recipe, folder = self.recipe, out / ("adapter" if self.recipe.lora else "model")
        if recipe.lora:
            adapter = TrainedAdapter(
                base=Path(self.base.source),
                base_name=recipe.trunk.name,
                family=self.base.family,
                architecture=recipe.architecture,
                lora=recipe.lora,
                layers=self.layers,
                head=self.training.head,
                labels=self.corpus.labels,
            )
            save_adapter(adapter, folder)
        else:
            finetuned = FinetunedModel(
                base_folder=Path(self.base.source),
                family=self.base.family,
                architecture=recipe.architecture,
                network=self.training.network,
                head=self.training.head,
                labels=self.corpus.labels,
                config_fields=recipe.source.config_fields,
            )
            save_finetuned(finetuned, folder)
        return folder

    def measure(self, folder: Path, learned: dict[str, float]) -> dict[str, Any]:  # noqa: ARG002
        """Measure the written files as they would be served, an adapter merged.

        `cut` counts the truncated texts of each part, `left_out` the texts without anything to learn.  `baselines` are
        figures of simple methods on the held-out part.
        """
        task, reader, parts = self.training.task, self.training.reader, self.parts
        served = load(f"{self.base.source}+{folder}" if self.recipe.lora else str(folder))
        figures = partial(measure_task, task, served.network, served.head, reader)
        embed = partial(embed_texts, self.base.source, reader)
        return {
            folder.name: str(folder),
            "bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
            "texts": {part: len(items) for part, items in parts.items()},
            "cut": {part: task.truncated_count(items) for part, items in parts.items()},
            "left_out": self.corpus.left_out,
            "held_out": figures(parts["held_out"]),
            "validation": figures(parts["validation"]),
            "baselines": task.baselines(parts["train"], parts["held_out"], embed),
            "seconds": time.monotonic() - self.started,
        }


def prepare_run(recipe: FinetuneRecipe, corpus: Corpus[Any], options: RunOptions) -> FinetuneRun:
    """Find the base model, or write a tiny one for a smoke run, and load it with the data."""
    split, out = split_corpus(recipe.data, corpus), options.run_folder.folder
    folder = out / "trunk"
    if options.smoke:
        torch.manual_seed(recipe.seed)
        write_tiny_base(recipe.architecture, corpus.examples, folder, embeds=recipe.lora is not None)
    else:
        folder = find_base_folder(recipe.trunk, options.recipe_file.parent, out.parent)
        describe_source(str(folder), folder_check=options.folder_check)  # before anything else reads the tokenizer
    if recipe.trunk.delimited:
        folder = add_delimiters(folder, out / "delimited", recipe.seed)
    return prepare_split(recipe, folder, split, corpus)


def prepare_split(recipe: FinetuneRecipe, folder: Path, split: Split[Any], corpus: Corpus[Any]) -> FinetuneRun:
    """Load the base model in `folder`, and encode the data."""
    started, base, task = time.monotonic(), load(str(folder)), recipe.source.create_task(corpus.labels)
    reader = build_reader(recipe.data, base)
    parts = {part: task.items(examples, reader) for part, examples in vars(split).items()}
    network, head, layers = build_modules(recipe, base, task, len(corpus.labels))
    training = TaskTraining(
        task=task,
        network=network,
        head=head,
        reader=reader,
        train=parts["train"],
        validation=parts["validation"],
        batch=recipe.data.batch,
        seed=recipe.seed,
        auxiliary=auxiliary_losses(recipe, base),
    )
    return FinetuneRun(
        recipe=recipe, base=base, corpus=corpus, parts=parts, layers=layers, training=training, started=started
    )


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


def build_modules(
    recipe: FinetuneRecipe, base: Checkpoint, task: Task[Any], labels: int
) -> tuple[Transformer, nn.Module, dict[str, LoraLinear]]:
    """Return the network, its new head and its adapted layers.  Random weights come from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    family, network = FAMILIES[base.family], base.network
    spec = head_spec(family, recipe.architecture, task.kind)
    if spec.global_tokens != base.config.global_tokens:
        message = f"{recipe.architecture} reads attention with other global tokens than {base.source} computes"
        raise RecipeError(f"architecture: {message}; name a trunk with this head")
    head = build_head(base, spec, labels)
    if recipe.lora:
        layers = add_adapters(network, recipe.lora)
        check_layer_names(Path(base.source), family, layers)
        return network, head, layers
    check_architecture(base.family, recipe.architecture)
    network = with_fresh_weights(network) if recipe.trunk.fresh else network
    initialise_head(head, base, spec, recipe.trunk.fresh)
    add_dropout(network, recipe.dropout)
    return network, head, {}


def build_head(base: Checkpoint, spec: HeadSpec, labels: int) -> nn.Module:
    match spec.task:
        case "tag":
            return TokenHead(base.config, labels, "softmax")
        case "span":
            return TokenHead(base.config, 2, "none")
        case _:
            scoring = spec.scoring(read_json(Path(base.source) / "config.json"))
            return SequenceHead(base.config, labels, scoring, "softmax")


@torch.no_grad()
def embed_texts(source: str, read: TextReader, texts: Sequence[str]) -> Tensor:
    """Return vectors [N, W] of the base model.  Raises RecipeError if it is no embedder."""
    base = load(source)
    if base.task != "embed":
        raise RecipeError(f"trunk: {source} makes no vectors, which the ranking baseline needs; name an embedder")
    vectors = []
    for batch_texts in split_batches([text.tokens for text in read(texts)], 64):
        batch = RaggedBatch.of(batch_texts)
        vectors.append(base.head.postprocess(base.head(base.network(batch), batch.starts)))  # type: ignore[operator]
    return torch.cat(vectors)
