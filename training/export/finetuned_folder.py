"""Writes a finetuned model and its head as a folder that can be served.

The tokenizer's files, and the fields of config.json that describe the arithmetic, are copied from the base model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from polyhead.models.architectures import FAMILIES
from polyhead.models.checkpoint.folder_files import read_json
from polyhead.models.core.files import copy_file
from polyhead.models.network.transformer import Transformer

from ..loop.errors import RecipeError
from .adapter_folder import labels_config
from .network_folder import FAMILY_FORMATS, write_network

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)
DROPPED_FIELDS = (
    "architectures",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "transformers_weights",
    "sentence_transformers",
    "problem_type",
)


@dataclass(frozen=True, kw_only=True)
class FinetunedModel:
    """The content of the folder.

    `base_folder` is the model that training began with, `family` its family.  `config_fields` are added to config.json.
    """

    base_folder: Path
    family: str
    architecture: str
    network: Transformer
    head: nn.Module
    labels: Sequence[str]
    config_fields: Mapping[str, object]


def check_architecture(family: str, architecture: str) -> None:
    """Raise RecipeError if no writer for the architecture exists."""
    supported = [f"{name} ({', '.join(form.head_names)})" for name, form in FAMILY_FORMATS.items()]
    if family not in FAMILY_FORMATS or architecture not in FAMILY_FORMATS[family].head_names:
        message = f"{architecture!r} of family {family!r} can be adapted with lora, but not written whole; these can: "
        raise RecipeError(f"architecture: {message}{'; '.join(supported)}")


def save_finetuned(tuned: FinetunedModel, folder: Path) -> None:
    """Write the tokenizer's files, model.safetensors, and config.json last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (tuned.base_folder / name).exists():
            copy_file(tuned.base_folder / name, folder / name)
    config = {
        key: value for key, value in read_json(tuned.base_folder / "config.json").items() if key not in DROPPED_FIELDS
    }
    config["vocab_size"] = tuned.network.config.vocab_size
    kind = FAMILIES[tuned.family].heads[tuned.architecture].task
    config |= {**labels_config(tuned.architecture, kind, tuned.labels), **tuned.config_fields}
    write_network(FAMILY_FORMATS[tuned.family], tuned.architecture, [tuned.network, tuned.head], folder, config)
