"""Folders of models that answer questions about a text: those of the packages laya (rl_agent_config.json) and gliner2
(model_type extractor). The network is an encoder of a known family, whose configuration is in a subfolder."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..architectures import Family
from ..core.decision_prompt import (
    COUNT_NAMES,
    PROMPT_KINDS,
    SCHEMA_TOKENS,
    DecisionPrompt,
    LabelSchemaPrompt,
    OptionMarkPrompt,
)
from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..core.files import subfolder
from ..core.json_files import LARGE_JSON
from ..network.decision_heads import LabelSchemaHead, OptionMarkHead, count_heads
from ..network.model_config import ModelConfig
from ..network.transformer import Transformer
from .description import Description, HeadDescription, NamedPieces
from .folder import find_family, list_tensors, load_tokenizer
from .folder_files import FolderCheck, JsonObject, accept_folder, parse_config, read_json
from .label_folders import LabelFolder, check_positions, extend_positions, label_translation, read_size
from .unread_formats import check_folder

LAYA_CONFIG, EXTRACTOR = "rl_agent_config.json", "extractor"
MAX_HEAD_LAYERS = 32  # above the network; published models have two
MAX_LIMIT = 1 << 16  # tokens of a sequence
SCHEMA_LIMIT = 2048  # tokens of questions and a text, for networks that see distances and no positions
TEMPERATURES = 0.5, 5.0  # the package laya takes the nearest one for a temperature outside of these
SCHEMA_TEMPERATURES = 0.01, 100.0
ENCODER = "encoder."
MARK_NAMES: Mapping[str, str] = {  # the beginning of a tensor's name, and of ours
    "type_emb.": "kinds.",
    "scorer.0.": "norm.",
    "scorer.1.": "layers.inner.",
    "scorer.3.": "layers.out.",
}
LAYER_NAMES: Mapping[str, str] = {  # of a layer above the network
    "self_attn.in_proj_": "fused.",
    "self_attn.out_proj.": "output.",
    "norm1.": "attention_norm.",
    "norm2.": "mlp_norm.",
    "linear1.": "mlp.inner.",
    "linear2.": "mlp.out.",
}
UNREAD_MARKS = ("act_head.", "temperature")  # whether to act at all; a buffer that nothing reads
UNREAD_SCHEMA = (
    *("span_rep.", "count_pred.", "count_embed."),
    *("boundary_head.", "record_decoder.", "relation_scorer.", "relation_pair_generator."),
)  # what finds spans
log = getLogger(__name__)


@dataclass(frozen=True)
class DecisionParts:
    """What one of the packages adds to a network: its head, its prompt, the longest sequence, and how its tensors are
    called. Tensors whose names begin with one of `unread` are left out."""

    head: HeadDescription
    prompt: DecisionPrompt
    limit: int
    names: Mapping[str, str]
    unread: tuple[str, ...]


def is_decision_folder(folder: Path) -> bool:
    """Whether a folder was saved by laya or gliner2."""
    if (folder / LAYA_CONFIG).is_file():
        return True
    file = folder / "config.json"
    return file.is_file() and read_json(file).get("model_type") == EXTRACTOR


def describe_decision_folder(folder: Path, folder_check: FolderCheck = accept_folder) -> Description:
    """The description of the folder. `folder_check` is called before the tokenizer is read. CheckpointError or
    UnsupportedError names the field."""
    marks_options = (folder / LAYA_CONFIG).is_file()
    if marks_options:
        opened = open_decision_folder(folder, LAYA_CONFIG, "encoder", folder_check)
    else:
        opened = open_decision_folder(folder, "config.json", "encoder_config", folder_check)
    config = parse_config(str(opened.file), partial(opened.family.config, opened.encoder))
    if config.causal:
        raise UnsupportedError("its encoder is a causal network; only encoders are known", file=str(opened.file))
    check_positions(opened, config)
    if marks_options:
        parts = option_mark_parts(opened, config)
    else:
        config = extend_positions(config, SCHEMA_LIMIT)
        parts = label_schema_parts(opened, config)
    return Description(
        file=str(opened.file),
        family=opened.family.name,
        config=config,
        head=parts.head,
        entries=opened.entries,
        translate=decision_translation(opened.family, parts),
        tokenizer=opened.tokenizer,
        max_tokens=min(parts.limit, config.max_positions),
        decisions=parts.prompt,
    )


def open_decision_folder(folder: Path, name: str, encoder_folder: str, folder_check: FolderCheck) -> LabelFolder:
    """Read the small files and the tensor headers."""
    config = read_json(folder / name)
    check_folder(folder)
    encoder_file = subfolder(folder, encoder_folder) / "config.json"
    encoder = read_json(encoder_file)
    family = find_family(encoder_file, encoder)
    place = subfolder(folder, "tokenizer") if name == LAYA_CONFIG else folder
    return LabelFolder(
        folder, folder / name, config, encoder, family, list_tensors(folder), load_tokenizer(place, folder_check)
    )


def decision_translation(family: Family, parts: DecisionParts) -> Callable[[str, Tensor], NamedPieces]:
    """The function from a tensor of the files to tensors under our names."""
    rename = label_translation(family, ENCODER, parts.names)

    def translate(name: str, tensor: Tensor) -> NamedPieces:
        return [] if name.startswith(parts.unread) else rename(name, tensor)

    return translate


# Laya


def option_mark_parts(opened: LabelFolder, config: ModelConfig) -> DecisionParts:
    """Laya's head and prompt."""
    layout = opened.config.get("option_layout", "sequential")
    if layout != "sequential":
        message = f"option_layout is {show_value(layout)}; only 'sequential' is known"
        raise UnsupportedError(message, file=str(opened.file))
    width = config.state_width
    if width % count_heads(width):
        message = f"the states have {width} features, which should be a multiple of {count_heads(width)}, the heads"
        raise CheckpointError(f"{message} of the layers above the network", file=str(opened.file))
    depth = read_size(opened, "head_layers", 2, MAX_HEAD_LAYERS, least=0)
    mark = opened.tokenizer.mask_id
    if mark is None:
        raise CheckpointError("mask_token should be a token of the vocabulary", file=str(opened.path / "tokenizer"))
    prompt = OptionMarkPrompt(
        opening=read_role(opened, "cls_token"),
        separator=read_role(opened, "sep_token"),
        mark=mark,
        question_tokens=read_size(opened, "head_max_len", 192, MAX_LIMIT),
        temperatures=read_temperatures(opened),
        count_temperatures=read_count_temperatures(opened),
    )
    names = dict(MARK_NAMES)
    for layer in range(depth):
        names |= {f"head.layers.{layer}.{theirs}": f"stack.{layer}.{ours}" for theirs, ours in LAYER_NAMES.items()}

    def build(network: Transformer) -> nn.Module:
        return OptionMarkHead(network.config, depth)

    head = HeadDescription("decide", build, width=width)
    return DecisionParts(head, prompt, read_size(opened, "max_len", 512, MAX_LIMIT), names, UNREAD_MARKS)


def read_role(opened: LabelFolder, role: str) -> int:
    """The id of the token that the tokenizer's configuration names for a role."""
    file = opened.path / "tokenizer" / "tokenizer_config.json"
    named = read_json(file.with_name("special_tokens_map.json"), {}, limit=LARGE_JSON)
    piece = (named | read_json(file, {}, limit=LARGE_JSON)).get(role)
    piece = piece.get("content") if isinstance(piece, dict) else piece
    found = opened.tokenizer.token_id(piece) if isinstance(piece, str) else None
    if found is None:
        message = f"{role} is {show_value(piece)}, which should be a token of the vocabulary"
        raise CheckpointError(message, file=str(file))
    return found


def read_temperatures(opened: LabelFolder) -> tuple[float, ...]:
    """One for each kind of question."""
    given = opened.config.get("temperature", [1.0] * len(PROMPT_KINDS))
    if not isinstance(given, list) or len(given) != len(PROMPT_KINDS):
        message = f"temperature is {show_value(given)}, which should be a list of {len(PROMPT_KINDS)} numbers"
        raise CheckpointError(message, file=str(opened.file))
    return tuple(clamp_temperature(opened, f"temperature[{index}]", value) for index, value in enumerate(given))


def read_count_temperatures(opened: LabelFolder) -> tuple[tuple[str, str, float], ...]:
    """Those for kinds of questions with a number of options."""
    field = "temperature_by_options"
    given = opened.config.get(field, {})
    if not isinstance(given, dict):
        message = f"{field} is {show_value(given)}, which should be an object of numbers"
        raise CheckpointError(message, file=str(opened.file))
    return tuple(
        (kind, count, clamp_temperature(opened, f"{field}.{kind}:{count}", given[f"{kind}:{count}"]))
        for kind in PROMPT_KINDS
        for count in COUNT_NAMES
        if f"{kind}:{count}" in given
    )


def clamp_temperature(opened: LabelFolder, field: str, value: Any) -> float:
    """The nearest temperature that is used. Published models have values outside, which sharpen too much."""
    least, most = TEMPERATURES
    number = check_number(opened, field, value)
    if not least <= number <= most:
        log.warning("%s: %s is %s; %s to %s are used", opened.file, field, show_value(value), least, most)
    return min(max(number, least), most)


def check_number(opened: LabelFolder, field: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        message = f"{field} is {show_value(value)}, which should be a number"
        raise CheckpointError(message, file=str(opened.file))
    return float(value)


# GLiNER2


def label_schema_parts(opened: LabelFolder, config: ModelConfig) -> DecisionParts:
    """GLiNER2's classifier and prompt."""
    kind = opened.config.get("architecture") or "span"
    if kind not in ("span", "boundary"):
        message = f"architecture {show_value(kind)} is not known; known are span, boundary"
        raise UnsupportedError(message, file=str(opened.file))
    for token in SCHEMA_TOKENS:
        if opened.tokenizer.token_id(token) is None:
            raise CheckpointError(f"its vocabulary has no token {token}", file=str(opened.path))
    temperature = read_schema_temperature(opened) if kind == "boundary" else 1.0
    last = 3 if "classifier.3.weight" in opened.entries else 2  # a layer of dropout may stand before it
    names = {"classifier.0.": "layers.inner.", f"classifier.{last}.": "layers.out."}
    log.info("%s: its classifier is served; what finds spans is not", opened.file)

    def build(network: Transformer) -> nn.Module:
        return LabelSchemaHead(network.config)

    head = HeadDescription("decide", build)
    return DecisionParts(head, LabelSchemaPrompt(temperature), config.max_positions, names, UNREAD_SCHEMA)


def read_schema_temperature(opened: LabelFolder) -> float:
    settings: JsonObject | None = opened.config.get("boundary_head")
    field, (least, most) = "boundary_head.classification_temperature", SCHEMA_TEMPERATURES
    if settings is not None and not isinstance(settings, dict):
        message = f"boundary_head is {show_value(settings)}, which should be an object"
        raise CheckpointError(message, file=str(opened.file))
    number = check_number(opened, field, (settings or {}).get("classification_temperature", 1.0))
    if not least <= number <= most:
        message = f"{field} is {show_value(number)}, which should be a number from {least} to {most}"
        raise CheckpointError(message, file=str(opened.file))
    return number
