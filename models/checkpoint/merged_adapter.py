"""Merges a PEFT LoRA folder into its base while the base is read (Hu et al. 2021, arXiv:2106.09685).

An adapter names the base's own tensors, so merging comes before renaming: W becomes W + scale * B @ A, and a saved
module replaces the base's. Everything in an adapter is used, or refused by name.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..architectures import Family, HeadSpec, rename_weight
from ..core.errors import CheckpointError, UnsupportedError, show_value, truncate
from ..core.turns import convert_by_parts
from .adapter_targets import AdaptedModules, check_target_settings
from .folder_files import FolderParts, JsonObject, read_json
from .head_config import OUTPUT, TOKENS
from .hub import is_id
from .module_patterns import MAX_PATTERN_LENGTH, UnsupportedPattern, matches, parse_pattern
from .source_policy import SourcePolicy
from .tensor_files import FLOAT_ENCODINGS, TensorEntry, check_readable, ignore_bytes, read_safetensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
OUTPUT_LAYERS = ("lm_head.weight", "output_projection.weight")  # the names that generators have for their output matrix
LOW_RANK = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.weight)?")
TASKS = {
    "SEQ_CLS": "classify",
    "TOKEN_CLS": "tag",
    "QUESTION_ANS": "span",
    "CAUSAL_LM": "generate",
    "FEATURE_EXTRACTION": "embed",
}
OVERLAY_FIELDS = (
    *("id2label", "label2id", "num_labels", "problem_type", "sentence_transformers"),
    "sbert_ce_default_activation_function",
)
# Settings that do not change the merged weights: those of training, or of the adapter's placement.
IGNORED_SETTINGS = (
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern"),
    *("layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "modules_to_save", "peft_type"),
    *("peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules"),
    *("task_type", "use_rslora"),
)
# Some values of these do change them: biases of the base, and initialisations that subtract from the base.
SUPPORTED_VALUES: JsonObject = {
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
MAX_PATTERNS = 1024  # of ranks, and as many of alphas
MAX_PATTERN_STEPS = 1 << 24  # of all patterns on all modules; 504 modules with two patterns each take 1.3 million
MAX_RANK = 1 << 13  # of a matrix that is merged; A and B are read whole
PRODUCTS = 1 << 28  # multiplications of B @ A between two calls of the progress callback
MAX_ALPHA = 1e9  # a larger value is an error
META = torch.empty((3, 3), device="meta")  # a matrix of which only the name is asked for
log = getLogger(__name__)


@dataclass(frozen=True)
class Adapter:
    """A LoRA folder: its settings, what it changes in the base's configuration, and its tensors by the base's names."""

    path: Path
    settings: JsonObject
    overlay: JsonObject
    pairs: Mapping[str, tuple[TensorEntry, TensorEntry]]  # module -> (A, B)
    saved: Mapping[str, TensorEntry]  # tensor -> its replacement


class PatternSteps:
    """Counts the steps of matching an adapter's patterns with its modules."""

    def __init__(self, file: Path) -> None:
        self._file, self._left = file, MAX_PATTERN_STEPS

    def spend(self, count: int) -> None:
        """UnsupportedError when more than MAX_PATTERN_STEPS are spent."""
        self._left -= count
        if self._left < 0:
            message = "its patterns and lists of modules take too long to be matched with all modules"
            raise UnsupportedError(f"{message}; merge the adapter with peft", file=str(self._file))


@dataclass(frozen=True)
class MergedEntry(TensorEntry):
    """A tensor of the base with its low-rank update, `scale` * B @ A, summed in float32."""

    base: TensorEntry
    pair: tuple[TensorEntry, TensorEntry]
    scale: float
    transposed: bool  # the base keeps [in, out] where B @ A is [out, in]

    @property
    def files(self) -> tuple[Path, ...]:
        return (*self.base.files, *(side.file for side in self.pair))

    @property
    def transformation(self) -> tuple[object, ...]:
        return self.scale, self.transposed

    @property
    def size(self) -> int:
        return self.base.size

    @property
    def read_size(self) -> int:
        return self.base.read_size + sum(side.read_size for side in self.pair)

    def read(
        self, dtype: torch.dtype, device: torch.device, report_bytes: Callable[[int], None] = ignore_bytes
    ) -> Tensor:
        a, b = (side.read(torch.float32, device, report_bytes) for side in self.pair)
        left, right = (a.t(), b.t()) if self.transposed else (b, a)
        out = self.base.read(torch.float32, device, report_bytes)
        rows = max(PRODUCTS // max(right.numel(), 1), 1)
        for first in range(0, len(out), rows):
            out[first : first + rows].addmm_(left[first : first + rows], right, alpha=self.scale)
            report_bytes(0)
        return convert_by_parts(out, dtype, out.device, partial(report_bytes, 0))


def is_adapter(path: Path) -> bool:
    return (path / CONFIG).is_file()


def base_source(path: Path, policy: SourcePolicy) -> str:
    """The source of the base the adapter was made for: an id on the hub, or a path relative to the adapter.

    Only `policy` looks for the path, and only it reads "~": nothing tells whether a folder outside of it exists.
    """
    settings = read_json(path / CONFIG)
    name = settings.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise CheckpointError(
            "base_model_name_or_path does not name the base; load BASE+ADAPTER", file=str(path / CONFIG)
        )
    near = name if name.startswith("~") else str(path / name)
    if policy.exists(near):
        return near
    revision = settings.get("revision")
    if revision is not None and not isinstance(revision, str):
        raise CheckpointError(f"revision is {show_value(revision)}, which should be a string", file=str(path / CONFIG))
    return f"{name}@{revision}" if revision and is_id(name) else name


def read_adapter(path: Path) -> Adapter:
    """The adapter's small files and tensor header."""
    settings = read_json(path / CONFIG)
    check_adapter_settings(path / CONFIG, settings)
    if not (path / WEIGHTS).is_file():
        message = f"{WEIGHTS} is missing; an adapter_model.bin has to be saved again by peft, as safetensors"
        raise UnsupportedError(message, file=str(path))
    sides: dict[str, dict[str, TensorEntry]] = {}
    saved = dict[str, TensorEntry]()
    for name, entry in read_safetensors(path / WEIGHTS).items():
        check_readable(entry)
        plain = re.sub(r"\.(modules_to_save|default)(?=\.)", "", name.removeprefix(PREFIX))
        if found := LOW_RANK.fullmatch(plain):
            add_once(sides.setdefault(found["module"], {}), found["side"], entry)
        elif "lora_" in plain:
            raise UnsupportedError(
                "only lora_A and lora_B of linear layers are merged", file=str(entry.file), tensor=name
            )
        elif ".original_module." not in plain:
            add_once(saved, plain, entry)
    overlay = {key: value for key, value in read_json(path / "config.json", {}).items() if key in OVERLAY_FIELDS}
    return Adapter(path, settings, overlay, {module: order_pair(both) for module, both in sides.items()}, saved)


def add_once(entries: dict[str, TensorEntry], place: str, entry: TensorEntry) -> None:
    """Add the entry. CheckpointError if another one has its place: only one of the two would be used."""
    if other := entries.get(place):
        message = f"it has the place of {truncate(other.name, 200)}; an adapter changes a tensor once"
        raise CheckpointError(message, file=str(entry.file), tensor=entry.name)
    entries[place] = entry


def check_adapter_settings(file: Path, settings: JsonObject) -> None:
    """UnsupportedError for settings under which the update is not scale * B @ A."""
    if settings.get("peft_type") != "LORA":
        raise UnsupportedError(
            f"peft_type {show_value(settings.get('peft_type'))}; only LORA is merged", file=str(file)
        )
    for key, value in settings.items():
        if (value and key not in IGNORED_SETTINGS) or (key in SUPPORTED_VALUES and value not in SUPPORTED_VALUES[key]):
            message = (
                f"{key} is {show_value(value)}, which plain LoRA does not have; merge it with peft and load the result"
            )
            raise UnsupportedError(message, file=str(file))
    check_target_settings(file, settings)
    for key in ("rank_pattern", "alpha_pattern"):
        check_patterns(file, key, settings.get(key))


def check_patterns(file: Path, key: str, patterns: Any) -> None:
    """UnsupportedError for too many patterns, or patterns with unsupported syntax."""
    patterns = patterns if isinstance(patterns, dict) else {}
    if len(patterns) > MAX_PATTERNS:
        raise UnsupportedError(f"{key} has {len(patterns)} patterns; {MAX_PATTERNS} are the most", file=str(file))
    for pattern in patterns:
        try:
            parse_pattern(pattern)
        except UnsupportedPattern:
            message = (
                f"{key} has the pattern {pattern[:MAX_PATTERN_LENGTH]!r}; patterns of at most {MAX_PATTERN_LENGTH} "
                "characters are matched, "
                "of names, \\d+, .* and alternatives such as (a|b); merge the adapter with peft"
            )
            raise UnsupportedError(message, file=str(file)) from None


def order_pair(sides: Mapping[str, TensorEntry]) -> tuple[TensorEntry, TensorEntry]:
    entry = next(iter(sides.values()))
    if set(sides) != {"A", "B"}:
        raise CheckpointError(
            "its other half is missing: A and B come in pairs", file=str(entry.file), tensor=entry.name
        )
    a, b = sides["A"], sides["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        message = f"shapes {list(a.shape)} of A and {list(b.shape)} of B do not multiply"
        raise CheckpointError(message, file=str(a.file), tensor=a.name)
    if not 1 <= (rank := a.shape[0]) <= MAX_RANK:
        message = f"its rank is {rank}; ranks from 1 to {MAX_RANK} are read; merge the adapter with peft"
        raise UnsupportedError(message, file=str(a.file), tensor=a.name)
    return a, b


def apply_adapter(adapter: Adapter, base: FolderParts) -> FolderParts:
    """The base with the adapter's tensors and labels, and with the head of the adapter's task."""
    spec = adapter_head_spec(adapter, base)
    config = {**base.config, **adapter.overlay}
    if spec.task in ("classify", "tag") and "id2label" not in adapter.overlay:
        config = label_overlay(adapter, base.family, spec, config)
    entries = merge_entries(adapter, base.family, base.entries)
    merged = replace(base, config=config, spec=spec, entries=entries)
    return replace(merged, entries={**entries, **kept_output(adapter, base, merged)})


def adapter_head_spec(adapter: Adapter, base: FolderParts) -> HeadSpec:
    """The head of the adapter's task in the base's family; the base's own if the adapter names no task."""
    task = adapter.settings.get("task_type")
    if task is None:
        return base.spec
    wanted = TASKS.get(task) if isinstance(task, str) else None
    if base.spec.task == wanted:
        return base.spec
    specs = [spec for spec in base.family.heads.values() if spec.task == wanted]
    if not specs:
        known = ", ".join(base.family.heads)
        message = f"task_type {show_value(task)} has no head in the {base.family.name} family, which has {known}"
        raise UnsupportedError(message, file=str(adapter.path / CONFIG))
    return specs[0]


def label_overlay(adapter: Adapter, family: Family, spec: HeadSpec, config: JsonObject) -> JsonObject:
    """Generic label names, if the saved head has another number of labels than the base. CheckpointError if it has
    none."""
    for name, entry in adapter.saved.items():
        names = [ours for ours, _ in rename_weight(family, spec.renames, name, META)]
        count = entry.shape[0] if entry.shape else 0
        if names != ["head.out.weight"]:
            continue
        if not count:
            message = f"its shape is {list(entry.shape)}; a head has a row for each label, and one label at least"
            raise CheckpointError(message, file=str(entry.file), tensor=name)
        if count != len(config.get("id2label") or (0, 0)):
            log.warning("%s: no config.json names its %d labels", adapter.path, count)
            return {**config, "id2label": {str(index): f"LABEL_{index}" for index in range(count)}}
    return config


def merge_entries(adapter: Adapter, family: Family, base: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The base's entries with the adapter's changes. CheckpointError for a tensor that is changed twice."""
    known = {strip_prefix(family, name): name for name in base}
    entries, changed = dict(base), dict[str, TensorEntry]()
    steps = PatternSteps(adapter.path / CONFIG)
    modules = AdaptedModules(adapter.settings, steps.spend)
    for name, entry in adapter.saved.items():
        add_once(changed, strip_prefix(family, name), entry)
        entries[known.get(strip_prefix(family, name), name)] = entry
    for module, pair in adapter.pairs.items():
        add_once(changed, strip_prefix(family, f"{module}.weight"), pair[0])
        place = known.get(strip_prefix(family, f"{module}.weight"))
        if place is None:
            message = f"the base has no tensor {module}.weight to merge it into"
            raise CheckpointError(message, file=str(pair[0].file), tensor=pair[0].name)
        scale = lora_scale(adapter, module, pair[0].shape[0], steps)
        if field := modules.find_exclusion(module):
            message = f"{field} leaves {module} out, so peft would not use this; remove it, or change {CONFIG}"
            raise UnsupportedError(message, file=str(pair[0].file), tensor=pair[0].name)
        # Not by fan_in_fan_out, which peft sets itself by the kind of the base's module.
        transposed = bool(re.search(family.transposed, strip_prefix(family, f"{module}.weight")))
        entries[place] = build_merged_entry(base[place], pair, scale, transposed=transposed)
    return entries


def kept_output(adapter: Adapter, base: FolderParts, merged: FolderParts) -> dict[str, TensorEntry]:
    """The output matrix of a base that is tied to a token embedding which `modules_to_save` replaces: peft replaces
    what reads texts alone, so the output layer keeps the base's table. One that `modules_to_save` does not name, as
    peft saves it after new tokens, replaces both. UnsupportedError where other layers share the embedding."""
    modules = AdaptedModules(adapter.settings, PatternSteps(adapter.path / CONFIG).spend)
    name = next((name for name in adapter.saved if read_name(merged, name) == TOKENS), "")
    task, has_decoder = merged.spec.task, merged.spec.reads_decoder or merged.spec.task == "translate"
    has_table = has_decoder or task in ("generate", "score", "fill")
    if not name or not has_table or not modules.is_saved(name.removesuffix(".weight")):
        return {}
    if not has_decoder:
        has_own = any(read_name(merged, each) == OUTPUT for each in merged.entries)
        if has_own or base.config.get("tie_word_embeddings", True) is False:
            return {}
        output = next((each for each in OUTPUT_LAYERS if read_name(merged, each) == OUTPUT), "")
        tables = [entry for each, entry in base.entries.items() if read_name(base, each) == TOKENS]
        if output and tables:
            return {output: tables[0]}
    message = "it replaces the token embedding, which other layers of this base share; merge it with peft"
    raise UnsupportedError(message, file=str(adapter.saved[name].file), tensor=adapter.saved[name].name)


def read_name(parts: FolderParts, name: str) -> str:
    """Our name of a tensor; empty for one that is split, or not used."""
    try:
        names = [ours for ours, _ in rename_weight(parts.family, parts.spec.renames, name, META)]
    except (RuntimeError, ValueError, IndexError):  # a matrix that is split; this one has three rows and columns
        return ""
    return names[0] if len(names) == 1 else ""


def strip_prefix(family: Family, name: str) -> str:
    """A name without the base model's prefix, which some folders write and some leave out."""
    return name.removeprefix(f"{family.prefix}.")


def build_merged_entry(
    base: TensorEntry, pair: tuple[TensorEntry, TensorEntry], scale: float, *, transposed: bool
) -> MergedEntry:
    """The base's tensor with an update. CheckpointError if its shape is another."""
    a, b = pair
    shape = (b.shape[0], a.shape[1])
    if base.shape != (shape[::-1] if transposed else shape):
        raise CheckpointError(
            f"it updates a matrix of shape {list(shape)}, but the base's is {list(base.shape)}",
            file=str(a.file),
            tensor=a.name,
        )
    kind = base.kind if base.kind in FLOAT_ENCODINGS else "F32"  # the sum is no longer whole multiples of a scale
    return MergedEntry(
        base.source, base.name, kind, base.shape, base.start, base.encoding, base, pair, scale, transposed
    )


def lora_scale(adapter: Adapter, module: str, rank: int, steps: PatternSteps) -> float:
    """Alpha over the rank, or over its square root (rank-stabilised, Kalajdzievski 2023, arXiv:2312.03732)."""
    settings = adapter.settings
    stated_rank = match_pattern(settings.get("rank_pattern"), module, settings.get("r"), steps)
    alpha = match_pattern(settings.get("alpha_pattern"), module, settings.get("lora_alpha"), steps)
    if stated_rank != rank or not isinstance(alpha, int | float) or not abs(alpha) < MAX_ALPHA:
        message = f"r {show_value(stated_rank)} and lora_alpha {show_value(alpha)} do not fit {module}"
        message += f", whose matrices have rank {rank}"
        raise CheckpointError(message, file=str(adapter.path / CONFIG))
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def match_pattern(pattern: Any, module: str, default: Any, steps: PatternSteps) -> Any:
    """The value of the first pattern that matches the end of the module's name, as peft chooses it."""
    items: Iterable[tuple[str, Any]] = pattern.items() if isinstance(pattern, dict) else ()
    return next((value for key, value in items if matches(key, module, steps.spend)), default)
