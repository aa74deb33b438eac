"""Persimmon: causal, pre-norm, partial rotation, norms of queries and keys, each head's query, key and value in one
matrix."""

from dataclasses import replace
from functools import partial

from ..network.model_config import ModelConfig
from . import gpt_neox, llama
from .family import LAST_TOKEN_HEAD, SCORE_TAG_HEAD, Family, HeadSpec, Json, activation_name, read_sizes
from .fused_matrices import split_fused

RENAMES = (
    (r"^final_layernorm\.", "final_norm."),
    (r"\.self_attn\.(query|key|value|dense)\.", r".attention.\1."),
    (r"\.self_attn\.q_layernorm\.", ".attention.query_norm."),
    (r"\.self_attn\.k_layernorm\.", ".attention.key_norm."),
    *gpt_neox.RENAMES,
    *llama.RENAMES,
)


def model_config(hf: Json) -> ModelConfig:
    shape = llama.llama_config({"partial_rotary_factor": 0.5, **hf, "hidden_act": "relu"})
    return replace(
        shape,
        norm="layer",
        norm_eps=hf.get("layer_norm_eps", 1e-5),
        query_key_norm="shared" if hf.get("qk_layernorm", True) else "",
        query_key_norm_bias=True,
        activation=activation_name(hf.get("hidden_act", "relu2")),
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def choose_variant(family: Family, hf: Json) -> Family:
    """The fused matrix is split by heads."""
    (heads,) = read_sizes(hf, "num_attention_heads")
    return replace(family, convert=partial(split_fused, "query_key_value", heads, 1))


PERSIMMON = Family(
    name="persimmon",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads={
        "PersimmonForCausalLM": HeadSpec("generate", llama.LANGUAGE_HEAD),
        "PersimmonModel": HeadSpec("embed"),
        "PersimmonForSequenceClassification": LAST_TOKEN_HEAD,
        "PersimmonForTokenClassification": SCORE_TAG_HEAD,
    },
    drop=llama.DROP,
    variant=choose_variant,
    rotates_share=True,
)
