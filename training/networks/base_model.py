"""The checkpoint that a recipe finetunes: where it is, the first weights of its new head, and a tiny one for smoke
runs.

A base model is a checkpoint folder, whether it was downloaded or trained by another recipe.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.models.architectures import FAMILIES, Family, HeadSpec, rename_weight
from polyhead.models.checkpoint import Checkpoint
from polyhead.models.checkpoint.folder import list_tensors
from polyhead.models.checkpoint.package_files import Package, fetch
from polyhead.models.network.transformer import Transformer
from polyhead.models.tokenizer import Tokenizer

from ..data.examples import Example, join_texts
from ..loop.errors import RecipeError
from .named_networks import NETWORKS, initialise_weights, write_in_family

TINY_KINDS = {"bert": "bert", "gpt2": "gpt"}  # of networks that can be trained here, by family
TINY_VOCABULARY, TINY_CONTEXT = 320, 96


@dataclass(frozen=True, kw_only=True)
class BaseModelSpec:
    """The table `trunk` of a recipe: the checkpoint to finetune.

    It is the result of another run (`run`, its name, in the same folder of runs), a folder relative to the recipe, or a
    folder inside a package.  `name` is the public name, which an adapter gives as its base.  `fresh`: only its
    architecture and its vocabulary are used, with new weights.  `delimited`: a generator that gets delimiter tokens
    around texts.
    """

    name: str = ""
    run: str = ""
    folder: Path = Path()
    package: Package | None = None
    fresh: bool = False
    delimited: bool = False


def find_base_folder(base: BaseModelSpec, beside: Path, runs: Path) -> Path:
    """Return the base model's folder, fetched if needed.  Raises RecipeError if the run that trains it was not run."""
    if base.run:
        folder = runs / base.run / "model"
        if not (folder / "config.json").exists():
            message = f"{folder} does not exist; train the recipe {base.run!r} first, or name another in trunk.run"
            raise RecipeError(f"trunk.run: {message}")
        return folder
    if base.package is None:
        return beside / base.folder
    downloads = find_downloads(runs)
    fetch(base.package, downloads, f"{base.folder}/")
    return downloads / base.folder


def find_downloads(runs: Path) -> Path:
    """The folder of what was downloaded for the runs in a folder.  Raises RecipeError for a link, and as
    `check_written_files` does."""
    downloads = runs / "downloads"
    if downloads.is_symlink():
        raise RecipeError(f"{downloads}: is a link; downloads are written to a folder of their own")
    check_written_files(downloads)
    return downloads


def check_written_files(written: Path) -> None:
    """Raises RecipeError unless a folder that is written to has files and folders alone.  It may be a stranger's: a
    link would lead elsewhere, and opening a pipe may never return.
    """
    for path in (Path(folder, name) for folder, *names in os.walk(written) for name in chain(*names)):
        if path.is_symlink():
            raise RecipeError(f"{path}: is a link; a run is written to files and folders of its own")
        if not (path.is_file() or path.is_dir()):
            raise RecipeError(f"{path}: is neither a file nor a folder; a run is written to files and folders")


def with_fresh_weights(network: Transformer) -> Transformer:
    """Return a network of the same configuration with new weights."""
    fresh = Transformer(network.config)
    initialise_weights([fresh], network.config.depth if network.config.causal else 1)
    return fresh


@torch.no_grad()
def initialise_head(head: nn.Module, base: Checkpoint, spec: HeadSpec, fresh: bool) -> None:
    """Initialise a head.  Unless `fresh`, its layers before the scores get the base model's weights if it has them."""
    initialise_weights([head], 1)
    if not fresh:
        own = head.state_dict()
        for name, tensor in read_head_tensors(Path(base.source), FAMILIES[base.family], spec).items():
            if not name.startswith("out.") and name in own and own[name].shape == tensor.shape:
                own[name].copy_(tensor)


def read_head_tensors(folder: Path, family: Family, spec: HeadSpec) -> dict[str, Tensor]:
    """Return the tensors of a folder that belong to such a head, by our names."""
    found = {}
    for name, entry in list_tensors(folder).items():
        for own_name, _ in rename_weight(family, spec.renames, name, torch.empty(0, device="meta")):
            if own_name.startswith("head."):
                found[own_name.removeprefix("head.")] = entry.read(torch.float32, torch.device("cpu"))
    return found


def write_tiny_base(architecture: str, examples: Sequence[Example[Any]], folder: Path, embeds: bool) -> None:
    """Write a tiny base model of the architecture's family, with a vocabulary of the examples' words.

    With `embeds`, a BERT is written as an embedder.  Raises RecipeError if the family cannot be trained here.
    """
    family = next((name for name, each in FAMILIES.items() if architecture in each.heads), "")
    if family not in TINY_KINDS:
        raise RecipeError(
            f"architecture: {architecture!r} is of no family that can be trained here: {', '.join(TINY_KINDS)}"
        )
    network = NETWORKS[TINY_KINDS[family]]
    network.train_vocabulary(
        [sentences for example in examples for sentences in example_texts(example)], TINY_VOCABULARY, folder
    )
    tokenizer = Tokenizer.from_folder(folder)
    modules = network.build(network.size_type(**network.smoke_size), tokenizer, TINY_CONTEXT)
    if embeds and family == "bert":
        write_in_family(modules[:1], family, "BertModel", folder, {})
    else:
        network.write(modules, tokenizer, folder)


def example_texts(example: Example[Any]) -> list[str]:
    """Return all texts of an example; its label may be one too."""
    return [join_texts(example.text), *([example.label] if isinstance(example.label, str) else [])]
