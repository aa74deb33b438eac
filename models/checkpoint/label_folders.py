"""Folders of models that read labels beside a text: those of the packages gliner (gliner_config.json) and gliclass
(model_type GLiClass). The network is an encoder of a known family, whose configuration is `encoder_config`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..architectures import Family, rename_weight
from ..architectures.family import Renames, activation_name
from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..core.label_prompt import MAX_LABELS, LabelPrompt
from ..network.label_heads import (
    TEXT_POOLINGS,
    SpanLabelHead,
    SpanLabelSpec,
    TextLabelHead,
    TextLabelSpec,
    TextScorer,
)
from ..network.model_config import ModelConfig
from ..network.transformer import Transformer
from ..tokenizer import Tokenizer
from .description import Description, HeadDescription, NamedPieces
from .folder import find_family, list_tensors, load_tokenizer
from .folder_files import FolderCheck, JsonObject, accept_folder, parse_config, read_json
from .head_config import input_limit
from .tensor_files import TensorEntry
from .unread_formats import check_folder

GLINER_CONFIG, GLICLASS = "gliner_config.json", "GLiClass"
MAX_WIDTH = 1 << 14  # features of a word
MAX_RECURRENCES = 16  # layers of an LSTM; published models have one
MAX_SPAN_WIDTH = 128  # words of a span; published models have 12
MAX_WORDS = 1 << 13  # of a text; published models have 384 to 2,048
MAX_SPANS = 1 << 15  # of a text, which are scored in one step; published models have up to 24,576
# Spans, and words for each layer of an LSTM, times the square of the width: a span takes 12 products for each.
# Published models have 24,576 spans and 2,048 words of 768 features at most, which is 1.6 * 10^10.
MAX_SPAN_WORK = 1 << 34
CLASSIFIED_TOKENS = 1024  # of a text and its labels: the default of gliclass
SCORERS: Mapping[str, TextScorer] = {"simple": "dot", "mlp": "mlp", "weighted-dot": "weighted"}
SPAN_NAMES: Mapping[str, str] = {  # the beginning of a tensor's name, and of ours
    "token_rep_layer.projection.": "projection.",
    "rnn.lstm.": "recurrence.",
    "prompt_rep_layer.0.": "label.inner.",
    "prompt_rep_layer.3.": "label.out.",
    "span_rep_layer.span_rep_layer.project_start.0.": "start.inner.",
    "span_rep_layer.span_rep_layer.project_start.3.": "start.out.",
    "span_rep_layer.span_rep_layer.project_end.0.": "end.inner.",
    "span_rep_layer.span_rep_layer.project_end.3.": "end.out.",
    "span_rep_layer.span_rep_layer.out_project.0.": "span.inner.",
    "span_rep_layer.span_rep_layer.out_project.3.": "span.out.",
    "scorer.proj_token.": "pairs.left.",
    "scorer.proj_label.": "pairs.right.",
    "scorer.out_mlp.0.": "pairs.layers.inner.",
    "scorer.out_mlp.3.": "pairs.layers.out.",
}
TEXT_NAMES: Mapping[str, str] = {
    "model.text_projector.linear_1.": "text.inner.",
    "model.text_projector.linear_2.": "text.out.",
    "model.classes_projector.linear_1.": "label.inner.",
    "model.classes_projector.linear_2.": "label.out.",
    "model.logit_scale": "logit_scale",
    "model.lstm.lstm.": "recurrence.",
    "model.scorer.mlp.0.": "scorer.first.",
    "model.scorer.mlp.2.": "scorer.second.",
    "model.scorer.mlp.4.": "scorer.out.",
    "model.scorer.proj_text.": "pairs.left.",
    "model.scorer.proj_label.": "pairs.right.",
    "model.scorer.out_mlp.0.": "pairs.layers.inner.",
    "model.scorer.out_mlp.3.": "pairs.layers.out.",
}
SPAN_ENCODER, TEXT_ENCODER = "token_rep_layer.bert_layer.model.", "model.encoder_model."
# Settings that ask for another network, with the values that ask for nothing.
NO_SPAN_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "fuse_layers": (False,),
    "post_fusion_schema": ("",),
    "span_encoder_config": (),
    "represent_spans": (False,),
    "precomputed_prompts_mode": (False,),
    "labels_encoder": (),
    "labels_decoder": (),
    "relations_layer": (),
    "words_splitter_type": ("whitespace",),
}
NO_TEXT_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "architecture_type": ("uni-encoder",),
    "squeeze_layers": (False,),
    "encoder_layer_id": (-1,),
    "use_segment_embeddings": (False,),
    "use_calibrator": (False,),
    "multimodal": (False,),
    "label_model_name": (),
}


@dataclass(frozen=True)
class LabelFolder:
    """The small files of a folder: `config` is that of the whole model, `encoder` that of its network."""

    path: Path
    file: Path
    config: JsonObject
    encoder: JsonObject
    family: Family
    entries: Mapping[str, TensorEntry]
    tokenizer: Tokenizer


def is_label_folder(folder: Path) -> bool:
    """Whether a folder was saved by gliner or gliclass."""
    if (folder / GLINER_CONFIG).is_file():
        return True
    file = folder / "config.json"
    return file.is_file() and read_json(file).get("model_type") == GLICLASS


def describe_label_folder(folder: Path, folder_check: FolderCheck = accept_folder) -> Description:
    """The description of the folder. `folder_check` is called before the tokenizer is read. CheckpointError or
    UnsupportedError names the field."""
    finds_spans = (folder / GLINER_CONFIG).is_file()
    parts = open_label_folder(folder, GLINER_CONFIG if finds_spans else "config.json", folder_check)
    config = parse_config(str(parts.file), partial(parts.family.config, parts.encoder))
    if config.causal:
        raise UnsupportedError("encoder_config is a causal network; only encoders are known", file=str(parts.file))
    if finds_spans:
        head, prompt = span_label_head(parts, config)
        prefix, names = SPAN_ENCODER, SPAN_NAMES
        limit = min(2 * (prompt.max_words + MAX_LABELS), 2 * MAX_WORDS)  # tokens; words have one or two
    else:
        head, prompt = text_label_head(parts, config)
        prefix, names, limit = TEXT_ENCODER, TEXT_NAMES, CLASSIFIED_TOKENS
    check_positions(parts, config)
    config = extend_positions(config, limit)
    return Description(
        file=str(parts.file),
        family=parts.family.name,
        config=config,
        head=head,
        entries=parts.entries,
        translate=label_translation(parts.family, prefix, names),
        tokenizer=parts.tokenizer,
        max_tokens=min(input_limit(parts.path, config), limit),
        labels=prompt,
    )


def open_label_folder(folder: Path, name: str, folder_check: FolderCheck) -> LabelFolder:
    """Read the small files and the tensor headers."""
    file = folder / name
    config = read_json(file)
    check_folder(folder)
    encoder = config.get("encoder_config")
    if not isinstance(encoder, dict):
        message = (
            f"encoder_config is {show_value(encoder)}, which should be the configuration of the encoder; the package "
            "that saved the folder writes it when it loads the model and saves it again as safetensors"
        )
        raise CheckpointError(message, file=str(file))
    family = find_family(file, encoder)
    return LabelFolder(
        folder, file, config, encoder, family, list_tensors(folder), load_tokenizer(folder, folder_check)
    )


def check_positions(parts: LabelFolder, config: ModelConfig) -> None:
    """CheckpointError unless the number of positions is one, with which limits are compared."""
    if type(config.max_positions) is not int:
        message = f"max_positions is {show_value(config.max_positions)}, which should be a whole number"
        raise CheckpointError(message, file=str(parts.file))


def extend_positions(config: ModelConfig, limit: int) -> ModelConfig:
    """The network for texts of `limit` tokens, if its positions are distances: all above the farthest are one."""
    if config.position != "distance" or not config.has_log_distances:
        return config
    return replace(config, max_positions=max(config.max_positions, limit))


def label_translation(family: Family, prefix: str, names: Mapping[str, str]) -> Callable[[str, Tensor], NamedPieces]:
    """The function from a tensor of the files to tensors under our names. Heads of the encoder are left out."""
    renames: Renames = ()

    def translate(name: str, tensor: Tensor) -> NamedPieces:
        if name.startswith(prefix):
            pieces = rename_weight(family, renames, name.removeprefix(prefix), tensor)
            return [(ours, piece) for ours, piece in pieces if not ours.startswith(("pooler.", "head."))]
        found = next((known for known in names if name.startswith(known)), None)
        return [(f"head.{names[found]}{name.removeprefix(found)}" if found else name, tensor)]

    return translate


def span_label_head(parts: LabelFolder, config: ModelConfig) -> tuple[HeadDescription, LabelPrompt]:
    """GLiNER's head: spans of words, or single words with span_mode token_level."""
    check_settings(parts, NO_SPAN_SETTINGS)
    mode = parts.config.get("span_mode", "markerV0")
    if mode not in ("markerV0", "token_level"):
        message = f"span_mode {show_value(mode)} is not known; known are markerV0, token_level"
        raise UnsupportedError(message, file=str(parts.file))
    pooling = parts.config.get("subtoken_pooling", "first")
    if pooling not in ("first", "last"):
        message = f"subtoken_pooling {show_value(pooling)} is not known; known are first, last"
        raise UnsupportedError(message, file=str(parts.file))
    width = read_size(parts, "hidden_size", 512, MAX_WIDTH)
    recurrences = read_size(parts, "num_rnn_layers", 1, MAX_RECURRENCES, least=0)
    if recurrences and width % 2:
        raise CheckpointError(f"hidden_size is {width}, which should be even for an LSTM", file=str(parts.file))
    widest, longest = read_size(parts, "max_width", 12, MAX_SPAN_WIDTH), read_size(parts, "max_len", 384, MAX_WORDS)
    if mode == "markerV0" and widest * longest > MAX_SPANS:
        message = f"max_width is {widest}, which should be {MAX_SPANS // longest} at most for texts of {longest} words"
        raise CheckpointError(message, file=str(parts.file))
    rows = longest * (recurrences + (widest if mode == "markerV0" else 0))
    if rows * width**2 > MAX_SPAN_WORK:
        message = f"hidden_size is {width}, which should be {math.isqrt(MAX_SPAN_WORK // rows)} at most for {rows} rows"
        reason = "words of a text times max_width, and times num_rnn_layers"
        raise CheckpointError(f"{message} ({reason})", file=str(parts.file))
    spec = SpanLabelSpec(
        width=width,
        projects=width != config.state_width,
        recurrences=recurrences,
        max_width=widest if mode == "markerV0" else 0,
        label_offset=int(not read_switch(parts, "embed_ent_token", default=True)),
    )
    token = read_text(parts, "ent_token", "<<ENT>>")
    prompt = LabelPrompt(
        label=token,
        separator=read_text(parts, "sep_token", "<<SEP>>"),
        label_id=read_label_id(parts, token),
        max_words=longest,
        max_width=spec.max_width,
        uses_last_piece=pooling == "last",
    )

    def build(network: Transformer) -> nn.Module:
        return SpanLabelHead(network.config, spec)

    return HeadDescription("label_spans", build, width=width), prompt


def text_label_head(parts: LabelFolder, config: ModelConfig) -> tuple[HeadDescription, LabelPrompt]:
    """GLiClass's head: the whole text."""
    check_settings(parts, NO_TEXT_SETTINGS)
    pooling, scorer = parts.config.get("pooling_strategy", "first"), parts.config.get("scorer_type", "simple")
    for field, value, known in (
        ("pooling_strategy", pooling, tuple(TEXT_POOLINGS)),
        ("scorer_type", scorer, tuple(SCORERS)),
        ("class_token_pooling", parts.config.get("class_token_pooling", "first"), ("first", "average")),
    ):
        if value not in known:
            message = f"{field} {show_value(value)} is not known; known are {', '.join(known)}"
            raise UnsupportedError(message, file=str(parts.file))
    recurrent = read_switch(parts, "use_lstm")
    if recurrent and config.state_width % 2:
        message = f"hidden_size is {config.state_width}, which should be even for an LSTM"
        raise CheckpointError(message, file=str(parts.file))
    spec = TextLabelSpec(
        pooling=pooling,
        width=read_size(parts, "hidden_size", config.state_width, MAX_WIDTH),
        activation=parse_config(
            str(parts.file), lambda: activation_name(parts.config.get("projector_hidden_act", "gelu"))
        ),
        scorer=SCORERS[scorer],
        fills_up=read_switch(parts, "extract_text_features"),
        averages=parts.config.get("class_token_pooling") == "average",
        skips_label_token=not read_switch(parts, "embed_class_token", default=True),
        normalises=read_switch(parts, "normalize_features"),
        recurrent=recurrent,
    )
    prompt = LabelPrompt(
        label="<<LABEL>>",
        separator="<<SEP>>",
        label_id=read_label_id(parts, "<<LABEL>>"),
        is_first=read_switch(parts, "prompt_first"),
        starts_at_separator=spec.fills_up,
    )

    def build(network: Transformer) -> nn.Module:
        return TextLabelHead(network.config, spec)

    return HeadDescription("label_texts", build), prompt


def check_settings(parts: LabelFolder, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """UnsupportedError for a setting that asks for another network."""
    for field, values in neutral.items():
        value = parts.config.get(field)
        if value is not None and value not in values:
            expected = " or ".join(map(show_value, (None, *values)))
            message = f"{field} is {show_value(value)}; only {expected} is known"
            raise UnsupportedError(message, file=str(parts.file))


def read_size(parts: LabelFolder, field: str, default: int, most: int, *, least: int = 1) -> int:
    value = default if parts.config.get(field) is None else parts.config[field]
    if type(value) is not int or not least <= value <= most:
        message = f"{field} is {show_value(value)}, which should be a whole number from {least} to {most}"
        raise CheckpointError(message, file=str(parts.file))
    return value


def read_switch(parts: LabelFolder, field: str, *, default: bool = False) -> bool:
    value = default if parts.config.get(field) is None else parts.config[field]
    if not isinstance(value, bool):
        raise CheckpointError(f"{field} is {show_value(value)}, which should be true or false", file=str(parts.file))
    return value


def read_text(parts: LabelFolder, field: str, default: str) -> str:
    """A token that the prompt has, which the vocabulary knows."""
    value = default if parts.config.get(field) is None else parts.config[field]
    if not isinstance(value, str) or parts.tokenizer.token_id(value) is None:
        message = f"{field} is {show_value(value)}, which should be a token of the vocabulary"
        raise CheckpointError(message, file=str(parts.file))
    return value


def read_label_id(parts: LabelFolder, token: str) -> int:
    """The id of the token before labels, which the configuration repeats."""
    found, expected = parts.tokenizer.token_id(token), parts.config.get("class_token_index")
    if found is None or found != expected:
        message = f"class_token_index is {show_value(expected)}, and {token} is token {found} of the vocabulary"
        raise CheckpointError(message, file=str(parts.file))
    return found
