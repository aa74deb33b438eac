"""Writes an adapter as a PEFT folder: low-rank matrices and head under the names of the base checkpoint.

The names are not listed here.  The base checkpoint's own names are run through the family's renames, and the resulting
table is read backwards.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save as serialized
from torch import Tensor, nn

from polyhead.models.architectures import FAMILIES, Family, HeadSpec, rename_weight
from polyhead.models.checkpoint.tensor_files import read_safetensors

from ..loop.errors import RecipeError
from ..loop.lora_training import LoraConfig, LoraLinear

WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_TASKS = {"classify": "SEQ_CLS", "tag": "TOKEN_CLS", "span": "QUESTION_ANS"}  # PEFT's names, by kind of head
HEAD_MODULES = (
    "{prefix}.pooler.dense",
    "{prefix}.pooler",
    "pre_classifier",
    "classifier.dense",
    "classifier.out_proj",
    "classifier",
    "head.dense",
    "head.norm",
    "score",
    "qa_outputs",
)


@dataclass(frozen=True, kw_only=True)
class TrainedAdapter:
    """The content of the folder.  `base` is the folder that was trained on, `base_name` its public name."""

    base: Path
    base_name: str
    family: str
    architecture: str
    lora: LoraConfig
    layers: Mapping[str, LoraLinear]
    head: nn.Module
    labels: Sequence[str]


def save_adapter(adapter: TrainedAdapter, folder: Path, dtype: torch.dtype = torch.float16) -> None:
    """Write adapter_config.json, adapter_model.safetensors and config.json, as PEFT would."""
    family = FAMILIES[adapter.family]
    spec = family.heads[adapter.architecture]
    body, head = body_names(adapter.base, family), head_names(family, spec)
    tensors: dict[str, Tensor] = {}
    for name, layer in adapter.layers.items():
        peft_name = f"base_model.model.{body[name]}"
        tensors |= {f"{peft_name}.lora_A.weight": layer.a, f"{peft_name}.lora_B.weight": layer.b}
    for name, tensor in adapter.head.state_dict().items():
        module, _, kind = name.rpartition(".")
        tensors[f"base_model.model.{head[module]}.{kind}"] = tensor
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in sorted(tensors.items())}
    saved = sorted({name.removeprefix(f"{family.prefix}.").split(".")[0] for name in head.values()})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS_FILE).write_bytes(serialized(stored, metadata={"format": "pt"}))
    write_json(folder / "adapter_config.json", peft_config(adapter, [body[name] for name in adapter.layers], saved))
    write_json(folder / "config.json", labels_config(adapter.architecture, spec.task, adapter.labels))


def head_spec(family: Family, architecture: str, kind: str) -> HeadSpec:
    spec = family.heads.get(architecture)
    if spec is None or spec.task != kind:
        supported = ", ".join(name for name, spec in family.heads.items() if spec.task == kind)
        raise RecipeError(
            f"architecture: {architecture!r} has no head of the base's family that can {kind}; there are: {supported}"
        )
    return spec


def body_names(base: Path, family: Family) -> dict[str, str]:
    """Return the base checkpoint's module name, with prefix, by our name, for every weight matrix in its folder."""
    names = {}
    for file in sorted(base.glob("*.safetensors")):
        for base_name, entry in read_safetensors(file).items():
            pieces = rename_weight(family, (), base_name, torch.empty(entry.shape, device="meta"))
            if len(pieces) == 1 and pieces[0][1].is_contiguous() and base_name.endswith(".weight"):
                module = base_name.removeprefix(f"{family.prefix}.").removesuffix(".weight")
                names[pieces[0][0].removesuffix(".weight")] = f"{family.prefix}.{module}"
    if not names:
        raise RecipeError(f"base: {base} holds no safetensors file to take names from; an adapter needs such a folder")
    return names


def check_layer_names(base: Path, family: Family, layers: Iterable[str]) -> None:
    """Raise RecipeError if the base's files store a layer transposed or fused with others: PEFT would adapt the stored
    layer.
    """
    if missing := sorted(set(layers) - body_names(base, family).keys()):
        raise RecipeError(f"lora.targets: {missing[0]} is stored transposed or as one with others; name other layers")


def head_names(family: Family, spec: HeadSpec) -> dict[str, str]:
    """Return the base family's module name by our name, for the modules of a head."""
    names = {}
    for base_name in (module.format(prefix=family.prefix) for module in HEAD_MODULES):
        bare = f"{base_name}.weight".removeprefix(f"{family.prefix}.")
        if any(re.search(pattern, bare) for pattern, _ in spec.renames):
            [(own_name, _)] = rename_weight(family, spec.renames, bare, torch.empty(0, device="meta"))
            module = own_name.removeprefix("head.").removesuffix(".weight")
            if "." not in module:  # a name of another family with the same beginning
                names[module] = base_name
    return names


def peft_config(adapter: TrainedAdapter, targets: list[str], saved: list[str]) -> dict[str, object]:
    """Return the fields of PEFT's LoraConfig that differ from its defaults."""
    kind = FAMILIES[adapter.family].heads[adapter.architecture].task
    return {
        "peft_type": "LORA",
        "task_type": PEFT_TASKS[kind],
        "base_model_name_or_path": adapter.base_name,
        "r": adapter.lora.rank,
        "lora_alpha": adapter.lora.alpha,
        "lora_dropout": adapter.lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": targets,
        "modules_to_save": saved,
    }


def labels_config(architecture: str, kind: str, labels: Sequence[str]) -> dict[str, object]:
    """Return what a new head changes in the base's config.json."""
    config: dict[str, object] = {"architectures": [architecture]}
    if kind != "span":  # the scores of a span have no names
        config["id2label"] = {str(index): label for index, label in enumerate(labels)}
        config["label2id"] = {label: index for index, label in enumerate(labels)}
    if kind == "classify" and len(labels) > 1:
        config["problem_type"] = "single_label_classification"
    return config


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
