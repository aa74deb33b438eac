"""Hunyuan (dense): Llama with queries and keys normed after their rotation."""

from dataclasses import replace

from ..network.model_config import ModelConfig
from . import llama
from .family import Json, rope_parameters, rope_type

RENAMES = ((r"\.self_attn\.(query|key)_layernorm\.", r".attention.\1_norm."), *llama.RENAMES)


def model_config(hf: Json) -> ModelConfig:
    """A fixed `alpha` of the rotation raises its base, as in NTK-aware scaling."""
    hf, parameters = {"rms_norm_eps": 1e-5, **hf, "mlp_bias": False}, rope_parameters(hf)
    shape = replace(llama.llama_config(hf), query_key_norm="shared", norm_after_rotation=True)
    if rope_type(parameters) == "dynamic" and parameters.get("alpha"):
        width = shape.head_width
        base = shape.rope_base * float(parameters["alpha"]) ** (width / (width - 2))
        return replace(shape, rope_base=base)
    return shape


HUNYUAN = replace(
    llama.LLAMA,
    name="hunyuan_v1_dense",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("HunYuanDenseV1", llama.TEXT_LABELS),
)
