"""DeBERTa-v3 and related models: BERT without position embeddings, whose attention also scores vectors of distances."""

from dataclasses import replace
from typing import Any

from ..core.errors import UnsupportedError, show_value
from ..network.heads import LabelScoring
from ..network.model_config import ModelConfig
from . import bert
from .family import Family, HeadSpec, Json, activation_name

RENAMES = (
    (r"^encoder\.rel_embeddings\.", "distances.table."),
    (r"^encoder\.LayerNorm\.", "distances.norm."),
    (r"\.attention\.self\.(query|key|value)_proj\.", r".attention.\1."),
    *bert.RENAMES,
)
REQUIRED_VALUES: dict[str, Any] = {
    "relative_attention": True,
    "share_att_key": True,
    "position_biased_input": False,
    "norm_rel_ebd": "layer_norm",
}
MAX_TERMS = 8  # listed in pos_att_type, repeats included; there are three
TERMS = 3  # of a score: content-content, content-position, position-content


def model_config(hf: Json) -> ModelConfig:
    for key, value in REQUIRED_VALUES.items():
        if hf.get(key) != value:
            raise UnsupportedError(f"{key} is {show_value(hf.get(key))}: only {show_value(value)} is known")
    kinds, terms = hf.get("position_buckets", -1), hf.get("pos_att_type") or ()
    named = terms.split("|") if isinstance(terms, str) else terms
    if len(named) > MAX_TERMS or set(named) != {"c2p", "p2c"}:
        raise UnsupportedError(f"pos_att_type {show_value(terms)}: only c2p and p2c together are known")
    if kinds < 1 or hf.get("conv_kernel_size", 0) > 0:
        raise UnsupportedError("only networks with position_buckets and without conv_kernel_size are known")
    if hf.get("embedding_size", hf["hidden_size"]) != hf["hidden_size"]:
        raise UnsupportedError(f"embedding_size {show_value(hf['embedding_size'])}: only that of hidden_size is known")
    shape = bert.model_config({"type_vocab_size": 0, "layer_norm_eps": 1e-7, **hf})
    farthest = hf.get("max_relative_positions", -1)
    return replace(
        shape,
        position="distance",
        distances=2 * kinds,
        farthest=farthest if farthest > 0 else shape.max_positions,
        score_scale=(TERMS * shape.head_width) ** -0.5,
    )


def scoring_config(hf: Json) -> LabelScoring:
    return LabelScoring(activation=activation_name(hf.get("pooler_hidden_act", "gelu")))


DEBERTA = Family(
    name="deberta-v2",
    prefix="deberta",
    config=model_config,
    renames=RENAMES,
    heads={
        "DebertaV2Model": HeadSpec("embed"),
        "DebertaV2ForSequenceClassification": HeadSpec("classify", bert.BERT_HEAD, scoring_config),
    },
    drop=bert.DROP + r"|^(lm_predictions|mask_predictions|embeddings\.position_embeddings)\.",
)
