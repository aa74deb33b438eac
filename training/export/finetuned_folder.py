"""Writes what a whole trunk became, with the head that was learned on it, as a folder that can be served.

It doesn't know how they were learned.  The one idea: what is not numbers (the vocabulary's files, what config.json says
of the arithmetic) is the trunk's own, word for word.
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
    "sentence_transformers",
    "problem_type",
)


@dataclass(frozen=True, kw_only=True)
class FinetunedModel:
    """All that goes into the folder.  `trunk` is the one that it was begun with; `family` is its; `said` goes into
    config.json too."""

    base_folder: Path
    family: str
    architecture: str
    network: Transformer
    head: nn.Module
    labels: Sequence[str]
    config_fields: Mapping[str, object]


def check_architecture(family: str, architecture: str) -> None:
    """RecipeError where nobody here knows how to write it."""
    known = [f"{name} ({', '.join(form.head_names)})" for name, form in FAMILY_FORMATS.items()]
    if family not in FAMILY_FORMATS or architecture not in FAMILY_FORMATS[family].head_names:
        message = f"{architecture!r} of family {family!r} can be adapted (lora), not written whole; these can: "
        raise RecipeError(f"architecture: {message}{'; '.join(known)}")


def save_finetuned(tuned: FinetunedModel, folder: Path) -> None:
    """Write the vocabulary's files, model.safetensors, and config.json last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (tuned.base_folder / name).exists():
            copy_file(tuned.base_folder / name, folder / name)
    said = {
        key: value for key, value in read_json(tuned.base_folder / "config.json").items() if key not in DROPPED_FIELDS
    }
    said["vocab_size"] = tuned.network.config.vocab_size
    kind = FAMILIES[tuned.family].heads[tuned.architecture].task
    said |= {**labels_config(tuned.architecture, kind, tuned.labels), **tuned.config_fields}
    write_network(FAMILY_FORMATS[tuned.family], tuned.architecture, [tuned.network, tuned.head], folder, said)
