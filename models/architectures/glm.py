"""GLM-4 (`glm`) and GLM-4-0414 (`glm4`): Llama with half of each head rotated, neighbouring features as a pair; the
second with norms before and after each part."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from ..network.model_config import ModelConfig
from . import llama
from .family import Family, Json, NamedTensors, deinterleave_heads, read_rotary_width, read_sizes
from .phi3 import split_gate

SANDWICH_RENAMES = (
    (r"\.post_self_attn_layernorm\.", ".attention_post_norm."),
    (r"\.post_mlp_layernorm\.", ".mlp_post_norm."),
    *llama.RENAMES,
)
DEFAULTS: Json = {"partial_rotary_factor": 0.5, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}


def glm_config(hf: Json) -> ModelConfig:
    shape = llama.llama_config({"rms_norm_eps": 1.5625e-07, **DEFAULTS, **hf, "mlp_bias": False})
    return replace(shape, output_bias=False)


def glm4_config(hf: Json) -> ModelConfig:
    return replace(glm_config(hf), norm_order="sandwich")


def convert_weight(heads: int, kv_heads: int, rotary_width: int, name: str, tensor: Tensor) -> NamedTensors:
    """Order the rotated features of queries and keys so that pairs lie half of them apart, and split fused
    matrices."""
    for part, count in (("q", heads), ("k", kv_heads)):
        if f".{part}_proj." in name:
            return [(name, deinterleave_heads(tensor, count, rotary_width))]
    return split_gate(name, tensor)


def choose_variant(family: Family, hf: Json) -> Family:
    hf = {**DEFAULTS, **hf}
    hf["num_key_value_heads"] = hf["num_key_value_heads"] or hf["num_attention_heads"]
    hf["head_dim"] = hf["head_dim"] or hf["hidden_size"] // hf["num_attention_heads"]
    heads, kv_heads, head_width = read_sizes(hf, "num_attention_heads", "num_key_value_heads", "head_dim")
    return replace(family, convert=partial(convert_weight, heads, kv_heads, read_rotary_width(hf, head_width)))


GLM = Family(
    name="glm",
    prefix="model",
    config=glm_config,
    renames=llama.RENAMES,
    heads=llama.llama_heads("Glm", llama.LABELS),
    drop=llama.DROP,
    variant=choose_variant,
    rotates_share=True,
)
GLM4 = replace(
    GLM, name="glm4", config=glm4_config, renames=SANDWICH_RENAMES, heads=llama.llama_heads("Glm4", llama.LABELS)
)
