"""Trinity of Arcee: a gate on mixed values, norms before and after each part, positions only in layers with a window
(https://huggingface.co/arcee-ai)."""

import math
from dataclasses import replace

from ..network.model_config import ExpertConfig, ModelConfig
from . import experts, llama
from .family import Family, Json, layer_numbers, read_windowed_layers

RENAMES = (
    (r"\.post_attention_layernorm\.", ".attention_post_norm."),
    (r"\.pre_mlp_layernorm\.", ".mlp_norm."),
    (r"\.post_mlp_layernorm\.", ".mlp_post_norm."),
    (r"\.self_attn\.gate_proj\.", ".attention.gate."),
    (r"\.mlp\.router\.gate\.", ".mlp.router."),
    (r"\.mlp\.expert_bias$", ".mlp.choice_bias"),
    *experts.RENAMES,
    *llama.RENAMES,
)


def model_config(hf: Json) -> ModelConfig:
    hf = {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 1024, "num_shared_experts": 2, **hf}
    depth = len(layer_numbers(hf["num_hidden_layers"]))
    every = hf.get("global_attn_every_n_layers") or 4
    windowed = read_windowed_layers(hf) or tuple(bool((layer + 1) % every) for layer in range(depth))
    plain = hf.get("num_dense_layers")
    mixture = ExpertConfig(
        count=experts.expert_count(hf),
        chosen=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        layers=experts.layers_from(hf, 1 if plain is None else plain),
        scoring="sigmoid",
        normalised_eps=1e-20,
        scale=float(hf.get("route_scale", 1.0)),
        choice_bias=True,
        shared_width=hf["moe_intermediate_size"] * (hf["num_shared_experts"] or 0),
    )
    return replace(
        llama.llama_config({**hf, "mlp_bias": False}),
        window=hf["sliding_window"] or 0,
        windowed=windowed,
        rotated=windowed,
        norm_order="sandwich",
        query_key_norm="shared",
        attention_gate=True,
        embedding_scale=math.sqrt(hf["hidden_size"]) if hf.get("mup_enabled") else 1.0,
        experts=mixture,
    )


AFMOE = Family(
    name="afmoe",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("Afmoe", ()),
    convert=experts.split_experts,
    drop=llama.DROP,
)
