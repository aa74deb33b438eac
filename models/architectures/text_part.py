"""The text part of networks that also read images: a family behind `text_config`. Images are not read."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from logging import getLogger

from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ModelConfig
from .family import Family, HeadSpec, Json, NamedTensors

LANGUAGE_HEAD = ((r"^(language_model\.)?lm_head\.", "head.output."),)
DROP = (
    r"^(language_model\.)?lm_head\.|^(visual|vision_tower|vision_model|multi_modal_projector)\.|rotary_emb\.inv_freq$"
    r"|^(embed_vision|vision_embedder|audio_tower|embed_audio)\."
)
TEXT_PREFIX = r"^language_model\.(model\.)?"  # in front of names in newer and in older checkpoints
Heads = Mapping[str, HeadSpec]
NO_DEFAULTS: Json = {}
NO_HEADS: Heads = {}
log = getLogger(__name__)


def wrap_family(
    name: str, classes: str, texts: tuple[Family, ...], defaults: Json = NO_DEFAULTS, others: Heads = NO_HEADS
) -> Family:
    """The family of checkpoints whose text part is of one of the families `texts`. `classes` is the prefix of the class
    names, `defaults` are fields that its configurations leave out. `others` are heads by the end of the class name."""
    return Family(
        name=name,
        prefix="model",
        config=partial(read_text_config, texts, defaults),
        renames=texts[0].renames,
        heads={
            f"{classes}ForConditionalGeneration": HeadSpec("generate", LANGUAGE_HEAD),
            f"{classes}Model": HeadSpec("embed"),
            **{f"{classes}{other}": spec for other, spec in others.items()},
        },
        drop=DROP,
        variant=partial(choose_variant, texts, defaults),
    )


def read_text_config(texts: tuple[Family, ...], defaults: Json, hf: Json) -> ModelConfig:
    text, fields = find_text(texts, defaults, hf)
    return text.config(fields)


def choose_variant(texts: tuple[Family, ...], defaults: Json, family: Family, hf: Json) -> Family:
    log.info("model_type %s: its text part is loaded; tensors for images and sound are not read", family.name)
    found, fields = find_text(texts, defaults, hf)
    text = found.variant(found, fields)
    drop = f"{family.drop}|{text.drop}"
    return replace(
        family,
        renames=text.renames,
        convert=partial(convert_text_weight, text),
        drop=drop,
        rotates_share=text.rotates_share,
        rope_by_layer=text.rope_by_layer,
    )


def find_text(texts: tuple[Family, ...], defaults: Json, hf: Json) -> tuple[Family, Json]:
    """The family of the text part, and its fields, which the first published configurations have at the top."""
    fields = {**defaults, **(hf.get("text_config") or hf)}
    name = fields.get("model_type") if len(texts) > 1 else texts[0].name
    for text in texts:
        if text.name == name:
            return text, fields
    known = ", ".join(text.name for text in texts)
    raise UnsupportedError(f"model_type {show_value(name)} of text_config is not known; known are {known}")


def convert_text_weight(text: Family, name: str, tensor: Tensor) -> NamedTensors:
    return text.convert(re.sub(TEXT_PREFIX, "", name), tensor)
