"""Latent attention in other mixtures than DeepSeek's: Mistral 4, A.X K1, and without experts Youtu-LLM
(https://huggingface.co/tencent/Youtu-LLM-2B)."""

from dataclasses import replace

from ..network.model_config import ExpertConfig, ModelConfig
from . import deepseek, experts, llama, mistral
from .family import ORIGINAL, Family, Json, check_required_values, rope_parameters
from .prediction_layers import drop_prediction_layers
from .qwen_moe import routed_experts

AXK1_RENAMES = ((r"\.(mlp\.)?post_mlp_layernorm\.", ".mlp.output_norm."), *deepseek.RENAMES)
YARN: Json = {**mistral.YARN, "rope_theta": 10_000.0, "factor": 128.0, ORIGINAL: 8192}  # unless Mistral 4 has its own


def mistral4_config(hf: Json) -> ModelConfig:
    """Scores of experts are a softmax over all of them. Queries from the original context on are scaled."""
    check_required_values(hf, {"n_group": 1, "topk_group": 1})
    hf = {"norm_topk_prob": True, **hf, "rope_parameters": rope_parameters(hf) or YARN}
    mixture = ExpertConfig(
        count=experts.expert_count(hf),
        chosen=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        layers=experts.layers_from(hf, hf.get("first_k_dense_replace") or 0),
        normalised=bool(hf["norm_topk_prob"]),
        normalised_eps=1e-20,
        scale=float(1.0 if hf.get("routed_scaling_factor") is None else hf["routed_scaling_factor"]),
        shared_width=hf["moe_intermediate_size"] * (hf.get("n_shared_experts") or 0),
    )
    return mistral.limit_positions(replace(deepseek.latent_config(hf), experts=mixture), hf)


def youtu_config(hf: Json) -> ModelConfig:
    return deepseek.latent_config(hf)


def axk1_config(hf: Json) -> ModelConfig:
    """As DeepSeek-V3, with a norm of each mixture's output."""
    check_required_values(hf, {**deepseek.KNOWN_V3, "moe_layer_freq": 1})
    hf = {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "n_group": 8, **hf}
    kinds = hf.get("mlp_layer_types")
    mixture = replace(routed_experts({"topk_group": 4, **hf}), output_norm=True)
    if kinds:
        mixture = replace(mixture, layers=tuple(kind == "sparse" for kind in kinds))
    return replace(deepseek.latent_config(hf), experts=mixture)


def choose_axk1_variant(family: Family, hf: Json) -> Family:
    """Published files have the norm in layers without experts, too, where it is not used."""
    mixture = axk1_config(hf).experts
    assert mixture is not None
    plain = "|".join(str(layer) for layer, has_experts in enumerate(mixture.layers) if not has_experts)
    drop = rf"{family.drop}|^layers\.({plain})\.(mlp\.)?post_mlp_layernorm\." if plain else family.drop
    return deepseek.DEEPSEEK_V3.variant(drop_prediction_layers(replace(family, drop=drop), hf), hf)


MISTRAL4 = replace(
    deepseek.DEEPSEEK_V3,
    name="mistral4",
    config=mistral4_config,
    heads=llama.llama_heads("Mistral4", llama.LABELS),
)
YOUTU = replace(deepseek.DEEPSEEK_V3, name="youtu", config=youtu_config, heads=llama.llama_heads("Youtu", ()))
AXK1 = replace(
    deepseek.DEEPSEEK_V3,
    name="axk1",
    config=axk1_config,
    renames=AXK1_RENAMES,
    heads=llama.llama_heads("AXK1", llama.LABELS),
    variant=choose_axk1_variant,
)
