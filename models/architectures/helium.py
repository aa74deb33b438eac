"""Helium and ERNIE 4.5: Llama with a rotation of neighbouring features."""

from dataclasses import replace

from ..network.model_config import ModelConfig
from . import glm, llama
from .family import Family, Json


def helium_config(hf: Json) -> ModelConfig:
    shape = llama.llama_config({"head_dim": 128, "rope_theta": 100_000.0, "rms_norm_eps": 1e-8, **hf})
    return replace(shape, output_bias=False)


def ernie_config(hf: Json) -> ModelConfig:
    biased = bool(hf.get("use_bias", False))
    hf = {"head_dim": 128, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, **hf}
    return llama.llama_config({**hf, "attention_bias": biased, "mlp_bias": biased})


def choose_variant(family: Family, hf: Json) -> Family:
    """All features of a head are rotated."""
    kv_heads = hf.get("num_key_value_heads") or hf["num_attention_heads"]
    return glm.choose_variant(
        family, {"head_dim": 128, **hf, "num_key_value_heads": kv_heads, "partial_rotary_factor": 1}
    )


HELIUM = Family(
    name="helium",
    prefix="model",
    config=helium_config,
    renames=llama.RENAMES,
    heads=llama.llama_heads("Helium", llama.LABELS),
    drop=llama.DROP,
    variant=choose_variant,
)
ERNIE = replace(HELIUM, name="ernie4_5", config=ernie_config, heads=llama.llama_heads("Ernie4_5", ()))
