"""OLMo, OLMo 2 and OLMo 3: norms without weights in the first; norms after each part, and of queries and keys, in the
others."""

from dataclasses import replace

from ..network.model_config import ModelConfig
from . import llama
from .family import Family, Json, check_required_values, layer_numbers, read_limit, read_rope

WINDOWED = "sliding_attention"
INNER_RENAMES = (
    (r"\.post_attention_layernorm\.", ".attention_norm."),
    (r"\.post_feedforward_layernorm\.", ".mlp_norm."),
    *llama.RENAMES,
)


def olmo_config(hf: Json) -> ModelConfig:
    return replace(
        llama.llama_config(hf),
        norm="layer",
        norm_eps=1e-5,
        norm_weight=False,
        norm_bias=False,
        qkv_limit=read_limit(hf, "clip_qkv"),
    )


def olmo2_config(hf: Json) -> ModelConfig:
    hf = {"rms_norm_eps": 1e-5, **hf}
    return replace(llama.llama_config(hf), norm_order="inner", query_key_norm="joint")


def olmo3_config(hf: Json) -> ModelConfig:
    """OLMo 3: three of four layers have a window, and frequencies that are never scaled."""
    hf = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096, **hf}
    by_depth = tuple(bool((layer + 1) % 4) for layer in layer_numbers(hf["num_hidden_layers"]))
    shape = llama.model_config(hf)
    nested = WINDOWED in (hf.get("rope_parameters") or {})
    local_base, scaling = read_rope(hf, WINDOWED) if nested else (shape.rope_base, None)
    if not nested and "full_attention" in (hf.get("rope_parameters") or {}):
        local_base = 500_000.0
    if nested and scaling is not None:
        check_required_values({f"rope_type of {WINDOWED}": scaling.kind}, {f"rope_type of {WINDOWED}": "default"})
    return replace(
        shape,
        windowed=shape.windowed or by_depth,
        window_rope_base=local_base,
        norm_order="inner",
        query_key_norm="joint",
    )


OLMO = Family(
    name="olmo",
    prefix="model",
    config=olmo_config,
    renames=llama.RENAMES,
    heads=llama.llama_heads("Olmo", llama.TEXT_LABELS),
    drop=llama.DROP,
)
OLMO2 = replace(
    OLMO, name="olmo2", config=olmo2_config, renames=INNER_RENAMES, heads=llama.llama_heads("Olmo2", llama.TEXT_LABELS)
)
OLMO3 = replace(
    OLMO2, name="olmo3", config=olmo3_config, heads=llama.llama_heads("Olmo3", llama.TEXT_LABELS), rope_by_layer=True
)
