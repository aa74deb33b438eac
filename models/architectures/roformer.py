"""RoFormer: BERT with rotary positions, in pairs side by side (Su et al. 2021, arXiv:2104.09864)."""

import re
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..network.heads import LabelScoring
from ..network.model_config import ModelConfig
from . import bert, electra
from .family import (
    TAG_HEAD,
    Family,
    HeadSpec,
    Json,
    NamedTensors,
    activation_name,
    check_required_values,
    deinterleave_heads,
    read_head_count,
)

DROP = bert.DROP + r"|^encoder\.embed_positions\."


def model_config(hf: Json) -> ModelConfig:
    check_required_values(hf, {"rotary_value": False})
    width = hf.get("embedding_size") or hf["hidden_size"]
    shape = bert.model_config({"max_position_embeddings": 1536, **hf})
    return replace(shape, position="rotary", embedding_width=0 if width == shape.width else width)


def scoring_config(hf: Json) -> LabelScoring:
    return LabelScoring(activation=activation_name(hf.get("hidden_act", "gelu")))


def mask_scoring(hf: Json) -> LabelScoring:
    return replace(bert.mask_scoring(hf), width=hf.get("embedding_size") or hf["hidden_size"])


def choice_scoring(hf: Json) -> LabelScoring:
    """The summary of a text: its first or last state, through a dense layer where the configuration has one."""
    pooling = {"first": "cls", "last": "last", "mean": "mean"}
    kind = hf.get("summary_type", "last")
    check_required_values({"summary_type": kind}, {"summary_type": kind if kind in pooling else "first"})
    check_required_values(hf, {"summary_use_proj": False})
    return LabelScoring(pooling=pooling[kind], activation="none")  # type: ignore[arg-type]


def convert_weight(heads: int, name: str, tensor: Tensor) -> NamedTensors:
    rotated = re.search(r"\.attention\.self\.(query|key)\.", name)
    return [(name, deinterleave_heads(tensor, heads) if rotated else tensor)]


def choose_variant(family: Family, hf: Json) -> Family:
    return replace(family, convert=partial(convert_weight, read_head_count(hf)))


ROFORMER = Family(
    "roformer",
    "roformer",
    model_config,
    electra.RENAMES,
    {
        **bert.bert_heads("RoFormer"),
        "RoFormerForSequenceClassification": HeadSpec("classify", bert.ROBERTA_HEAD, scoring_config),
        "RoFormerForMultipleChoice": HeadSpec("choose", TAG_HEAD.renames, choice_scoring),
        "RoFormerForMaskedLM": HeadSpec("fill", bert.MASK_HEAD, mask_scoring),
    },
    drop=DROP,
    variant=choose_variant,
)
