"""GTE (gte-multilingual, gte-en-v1.5): BERT with rotary positions and a gated MLP whose last layer has a bias.

`gte` is the form of transformers, `new` that of the published code.
"""

from dataclasses import replace
from typing import Any

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ModelConfig, RopeScaling
from . import bert, rotary_bert
from .family import TAG_HEAD, Family, HeadSpec, Json, check_required_values

BASE = 160_000.0  # of rotary positions, the default of transformers
PUBLISHED_BASE = 10_000.0
REQUIRED_VALUES: dict[str, Any] = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "pack_qkv": True,
}
MASK_HEAD = (
    (r"^lm_head\.dense\.", "head.dense."),
    (r"^lm_head\.(layer_)?norm\.", "head.norm."),
    (r"^lm_head\.decoder\.", "head.output."),
)


def model_config(hf: Json) -> ModelConfig:
    return replace(rotary_bert.model_config(hf, BASE), gated_mlp=True)


def published_config(hf: Json) -> ModelConfig:
    """The fixed NTK scaling multiplies the base by the factor, and divides each frequency by its root."""
    check_required_values(hf, REQUIRED_VALUES)
    scaling, base = hf.get("rope_scaling") or {}, float(hf.get("rope_theta", PUBLISHED_BASE))
    plain = {key: value for key, value in hf.items() if key != "rope_scaling"}
    shape = replace(rotary_bert.model_config(plain, PUBLISHED_BASE), gated_mlp=True)
    if not scaling:
        return shape
    check_required_values(scaling, {"mixed_b": None})
    if scaling.get("type") != "ntk":
        raise UnsupportedError(f"rope_scaling type {show_value(scaling.get('type'))}: only ntk is known")
    factor = float(scaling["factor"])
    root = RopeScaling(kind="linear", factor=factor ** (2 / shape.head_width))
    return replace(shape, rope_base=base * factor, rope_scaling=root)


def gte_heads(name: str) -> dict[str, HeadSpec]:
    return {
        f"{name}Model": HeadSpec("embed"),
        f"{name}ForSequenceClassification": HeadSpec("classify", bert.BERT_HEAD),
        f"{name}ForTokenClassification": TAG_HEAD,
        f"{name}ForMaskedLM": HeadSpec("fill", MASK_HEAD, bert.gelu_mask_scoring),
    }


GTE, GTE_PUBLISHED = (
    Family(
        model_type,
        model_type,
        read_config,
        rotary_bert.RENAMES,
        gte_heads(name),
        published_classes=frozenset((f"{name}ForMultipleChoice", f"{name}ForQuestionAnswering")),
        convert=rotary_bert.convert_with_bias,
        drop=rotary_bert.DROP,
    )
    for model_type, name, read_config in (("gte", "Gte", model_config), ("new", "New", published_config))
)
