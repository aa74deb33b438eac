"""StableLM: Llama with biased layer norms and partial rotation; in a larger one attention and MLP have one input."""

from dataclasses import replace

from ..network.model_config import ModelConfig
from . import llama
from .family import Family, Json, check_required_values
from .phi import share_norm


def model_config(hf: Json) -> ModelConfig:
    hf = {"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5, **hf}
    hf |= {"rms_norm_eps": hf["layer_norm_eps"], "attention_bias": False, "mlp_bias": False}
    return replace(
        llama.llama_config(hf),
        norm="layer",
        norm_order="parallel" if hf.get("use_parallel_residual") else "pre",
        query_key_norm="per_head" if hf.get("qk_layernorm") else "",
        qkv_bias=bool(hf.get("use_qkv_bias", False)),
    )


def choose_variant(family: Family, hf: Json) -> Family:
    """In folders the norms of queries and keys have a tensor for each head, which are not joined; GGUF files have one
    tensor."""
    check_required_values(hf, {"qk_layernorm": False})
    return replace(family, convert=share_norm) if hf.get("use_parallel_residual") else family


STABLELM = Family(
    name="stablelm",
    prefix="model",
    config=model_config,
    renames=llama.RENAMES,
    heads=llama.llama_heads("StableLm", llama.LABELS),
    drop=llama.DROP,
    variant=choose_variant,
    published_classes=frozenset(("StableLMEpochForCausalLM",)),
    rotates_share=True,
)
