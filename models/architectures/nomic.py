"""NomicBERT (nomic-embed-text): BERT with rotary positions, a gated MLP and few biases."""

from dataclasses import replace
from typing import Any

from ..network.heads import LabelScoring
from ..network.model_config import ModelConfig
from . import bert, rotary_bert
from .family import TAG_HEAD, Family, HeadSpec, Json, activation_name, check_required_values

BASE = 1000.0  # of rotary positions, the default of this family
OUR_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
    "max_position_embeddings": "n_positions",
    "rope_theta": "rotary_emb_base",
}  # fields of transformers, and those of the published code
REQUIRED_VALUES: dict[str, Any] = {
    "prenorm": False,
    "use_rms_norm": False,
    "parallel_block": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "moe_every_n_layers": 0,
}
MASK_HEAD = (
    (r"^cls\.predictions\.transform\.dense\.", "head.dense."),
    (r"^cls\.predictions\.transform\.layer_norm\.", "head.norm."),
    (r"^cls\.predictions\.(decoder\.)?(weight|bias)$", r"head.output.\2"),
)


def read_fields(hf: Json) -> Json:
    """The configuration with the field names of transformers; the published code's have priority."""
    renamed = {ours: hf[theirs] for ours, theirs in OUR_NAMES.items() if hf.get(theirs) is not None}
    gate = {"swiglu": "silu", "geglu": "gelu"}.get(hf.get("activation_function", ""))
    return {"hidden_act": "silu", **hf, **renamed, **({"hidden_act": gate} if gate else {})}


def model_config(hf: Json) -> ModelConfig:
    check_required_values(hf, REQUIRED_VALUES)
    check_required_values({"activation_function": "swiglu", **hf}, {"activation_function": "swiglu"})
    shape = rotary_bert.model_config(read_fields(hf), BASE)
    return replace(shape, gated_mlp=True, qkv_bias=False, output_bias=False, mlp_bias=False)


def mask_scoring(hf: Json) -> LabelScoring:
    return LabelScoring(activation=activation_name(read_fields(hf)["hidden_act"]), norm=True)


MASKED = HeadSpec("fill", MASK_HEAD, mask_scoring)


def choose_variant(family: Family, hf: Json) -> Family:
    """The published code has another name of the base model, and of one class."""
    if "n_embd" not in hf:
        return family
    return replace(family, prefix="bert", heads={**family.heads, "NomicBertForPreTraining": MASKED})


NOMIC_BERT = Family(
    "nomic_bert",
    "nomic_bert",
    model_config,
    rotary_bert.RENAMES,
    {
        "NomicBertModel": HeadSpec("embed"),
        "NomicBertForSequenceClassification": HeadSpec("classify", bert.BERT_HEAD),
        "NomicBertForTokenClassification": TAG_HEAD,
        "NomicBertForMaskedLM": MASKED,
    },
    convert=rotary_bert.convert_weight,
    drop=rotary_bert.DROP,
    variant=choose_variant,
    published_classes=frozenset(("NomicBertForMultipleChoice", "NomicBertForQuestionAnswering")),
)
