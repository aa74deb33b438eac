"""Recipes: what a TOML file of a training run has.

A recipe with `trunk` finetunes a checkpoint; one with `network` trains a network from scratch.  A run resumes only if
`describe` returns the same text, so the order of fields stays.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from polyhead.models.checkpoint.folder_files import FolderCheck, accept_folder
from polyhead.models.core.errors import show_value

from ..data.examples import Corpus, Split, split_by_domain, split_by_source
from ..loop.dropout import DropoutRate
from ..loop.errors import RecipeError
from ..loop.lora_training import LoraConfig
from ..loop.schedule import TrainingPlan
from ..loop.toml_file import read_toml, validate
from ..loop.trainer import RunFolder
from ..networks.base_model import BaseModelSpec
from ..networks.named_networks import NETWORKS, NetworkKind
from ..objectives.masked import HIDDEN_SHARE
from ..tasks.sources import TASK_SOURCES, TEXT_SOURCES, TaskSource, TextSource


def check_name(table: Mapping[str, object], name: str) -> str:
    if name not in table:
        raise ValueError(f"{show_value(name)} is none of {', '.join(table)}")
    return name


@dataclass(frozen=True, kw_only=True)
class FinetuneData:
    """The data of a finetune recipe.

    `validation` and `held_out` are shares of the sources; `leave_out` holds out a whole domain instead.  `batch` is the
    number of examples in a step.  Of each text the first `most_tokens` are read, special tokens included; 0: a text
    that is too long for the base model is an error.
    """

    source: Annotated[str, AfterValidator(partial(check_name, TASK_SOURCES))]
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

    @property
    def source(self) -> TaskSource:
        return TASK_SOURCES[self.data.source]

    def check(self, path: Path) -> None:
        """Raise RecipeError if fields contradict each other."""
        trunk = self.trunk
        if bool(trunk.run) == (trunk.folder != Path()):
            raise RecipeError(f"{path}: trunk: it needs either run, the name of another run, or folder")
        if self.lora and (trunk.fresh or self.dropout):
            wrong = "trunk.fresh" if trunk.fresh else "dropout"
            raise RecipeError(f"{path}: {wrong}: only a trunk that is trained whole has it; leave it out, or lora")
        if self.lora and self.source.config_fields:
            raise RecipeError(
                f"{path}: lora: an adapter has no field for how {self.data.source} are read; leave it out"
            )
        if self.lora and not trunk.name:
            raise RecipeError(f"{path}: trunk.name: an adapter names its base; give the trunk's public name")

    def smoke_recipe(self) -> "FinetuneRecipe":
        """Return the recipe changed to run in a few seconds."""
        data = replace(self.data, batch=8, validation=0.3, held_out=0.3, leave_out="", most_tokens=0)
        return replace(self, data=data, plan=self.plan.smoke_plan(), threads=1)

    def describe(self) -> str:
        return repr(self)


@dataclass(frozen=True, kw_only=True)
class NetworkData:
    """The data of a network recipe.

    `tokens` is the size of a batch, at most; `context` the length of a sequence; `words` the size of the vocabulary,
    which is learned from the same texts.  `validation` and `held_out` are shares of the sources.
    """

    source: Annotated[str, AfterValidator(partial(check_name, TEXT_SOURCES))]
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
    def source(self) -> TextSource:
        return TEXT_SOURCES[self.data.source]

    @property
    def network_kind(self) -> NetworkKind:
        return NETWORKS[self.network["kind"]]

    def network_size(self, path: Path) -> Any:
        """Return the network's size.  Raises RecipeError that names the wrong field."""
        fields = {name: value for name, value in self.network.items() if name != "kind"}
        return validate(self.network_kind.size_type, fields, path, "network")

    def check(self, path: Path) -> None:
        """Raise RecipeError if the network's fields are wrong, or fields contradict each other."""
        kind = self.network.get("kind")
        if not isinstance(kind, str) or kind not in NETWORKS:
            raise RecipeError(f"{path}: network.kind: {show_value(kind)} is none of {', '.join(NETWORKS)}")
        self.network_size(path)
        translates = self.network_kind.objective == "translation"
        if translates != self.source.is_translated:
            fit = ", ".join(name for name, texts in TEXT_SOURCES.items() if texts.is_translated == translates)
            raise RecipeError(f"{path}: data.source: a network of kind {kind!r} learns from one of {fit}")
        if self.smoothing and not translates:
            raise RecipeError(f"{path}: smoothing: only translation networks have it")
        if self.hidden != HIDDEN_SHARE and self.network_kind.objective != "masked":
            raise RecipeError(f"{path}: hidden: a network of kind {kind!r} has no tokens hidden from it")

    def smoke_recipe(self) -> "NetworkRecipe":
        """Return the recipe changed to run in a few seconds: a tiny network, a few steps, a few generated texts."""
        data = replace(self.data, tokens=256, context=32, words=320, validation=0.2, held_out=0.2)
        network = {**self.network, **self.network_kind.smoke_size}
        return replace(self, data=data, plan=self.plan.smoke_plan(), network=network, threads=1)

    def describe(self) -> str:
        return json.dumps(asdict(self), indent=2)


Recipe = FinetuneRecipe | NetworkRecipe


@dataclass(frozen=True)
class RunOptions:
    """What a run depends on besides its recipe: the recipe's file, the run's folder, and whether it is a smoke run.
    `folder_check` is called with the base model's folder, or with that of a resumed run's vocabulary, before its
    tokenizer is read."""

    recipe_file: Path
    run_folder: RunFolder
    smoke: bool = False
    folder_check: FolderCheck = accept_folder


def read_recipe(path: Path) -> Recipe:
    """Read the recipe in a file.  Raises RecipeError that names the wrong field."""
    fields = read_toml(path)
    if ("network" in fields) == ("trunk" in fields):
        raise RecipeError(
            f"{path}: it needs either trunk, a checkpoint to finetune, or network, to train one from scratch"
        )
    kind: type[Recipe] = NetworkRecipe if "network" in fields else FinetuneRecipe
    recipe = validate(kind, fields, path)
    recipe.check(path)
    return recipe


def split_corpus(data: FinetuneData | NetworkData, corpus: Corpus[Any]) -> Split[Any]:
    """Split a corpus.  Raises RecipeError if a part would be empty."""
    left_out = data.leave_out if isinstance(data, FinetuneData) else ""
    domains = sorted({example.domain for example in corpus.examples})
    if left_out and left_out not in domains:
        raise RecipeError(f"data.leave_out: {left_out!r} is none of {', '.join(domains)}")
    if left_out:
        split = split_by_domain(corpus, left_out, data.validation)
    else:
        split = split_by_source(corpus, data.validation, data.held_out)
    if empty := [part for part, examples in vars(split).items() if not examples]:
        raise RecipeError(f"data: {empty[0]} would be empty; give it a share of the sources between 0 and 1")
    return split
