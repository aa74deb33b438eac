"""Families with many small experts: Qwen2-MoE and Qwen3-MoE (arXiv:2505.09388), OLMoE (arXiv:2409.02060) and
FlexOlmo (arXiv:2507.07024), GLM-4.5 (arXiv:2508.06471), Solar Open (arXiv:2601.07022) and dots.llm1
(arXiv:2506.05767)."""

from collections.abc import Callable, Collection
from dataclasses import replace

from ..network.model_config import ExpertConfig, ModelConfig
from . import experts, llama
from .family import CAUSAL_HEADS, Family, Json, layer_numbers, read_limit, read_sizes
from .olmo import INNER_RENAMES
from .prediction_layers import drop_prediction_layers

RENAMES = (*experts.RENAMES, *llama.RENAMES)


def qwen_experts(hf: Json) -> ExpertConfig:
    """Every `decoder_sparse_step`-th layer has experts, but for `mlp_only_layers`."""
    step, plain = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    layers = layer_numbers(hf["num_hidden_layers"])
    return ExpertConfig(
        count=experts.expert_count(hf),
        chosen=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        layers=tuple(layer not in plain and (layer + 1) % step == 0 for layer in layers),
        normalised=bool(hf.get("norm_topk_prob", False)),
        shared_width=hf.get("shared_expert_intermediate_size") or 0,
        shared_gate=bool(hf.get("shared_expert_intermediate_size")),
    )


def qwen2_config(hf: Json) -> ModelConfig:
    shape = replace(llama.qwen2_config(hf), qkv_bias=bool(hf.get("qkv_bias", True)))
    return replace(shape, experts=qwen_experts(hf))


def qwen3_config(hf: Json) -> ModelConfig:
    return replace(llama.qwen3_config(hf), experts=qwen_experts(hf))


def olmoe_config(hf: Json) -> ModelConfig:
    shape = llama.model_config({"rms_norm_eps": 1e-5, **hf, "sliding_window": 0})
    return replace(
        shape,
        query_key_norm="joint",
        qkv_limit=read_limit(hf, "clip_qkv"),
        experts=qwen_experts({**hf, "moe_intermediate_size": hf["intermediate_size"]}),
    )


def flex_olmo_config(hf: Json) -> ModelConfig:
    """As OLMoE, with norms after each part, before the sum."""
    shape = olmoe_config({"rope_theta": 500_000.0, "rms_norm_eps": 1e-6, **hf, "clip_qkv": None})
    return replace(shape, norm_order="inner")


def read_groups(hf: Json) -> tuple[int, int]:
    """The number of groups of experts, and of those from which experts are chosen."""
    groups, chosen = read_sizes(
        {key: 1 if hf.get(key) is None else hf[key] for key in ("n_group", "topk_group")}, "n_group", "topk_group"
    )
    return groups, chosen


def routed_experts(hf: Json) -> ExpertConfig:
    """As DeepSeek-V3 (arXiv:2412.19437): logistic scores with a bias for the choice, and groups of experts."""
    groups, chosen_groups = read_groups(hf)
    return ExpertConfig(
        count=experts.expert_count(hf),
        chosen=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        layers=experts.layers_from(hf, hf.get("first_k_dense_replace") or 0),
        scoring="sigmoid",
        normalised=bool(hf.get("norm_topk_prob", False)),
        normalised_eps=1e-20,
        scale=float(hf.get("routed_scaling_factor", 1.0)),
        groups=groups if groups > 1 else 0,
        chosen_groups=chosen_groups,
        choice_bias=True,
        shared_width=hf["moe_intermediate_size"] * (hf.get("n_shared_experts") or 0),
    )


def glm4_config(hf: Json) -> ModelConfig:
    hf = {"head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, **hf, "sliding_window": 0}
    hf = {"norm_topk_prob": True, "n_shared_experts": 1, "first_k_dense_replace": 1, **hf}
    shape = llama.model_config(hf)
    shape = replace(shape, query_key_norm="shared") if hf.get("use_qk_norm") else shape
    return replace(shape, output_bias=False, experts=routed_experts(hf))


def solar_config(hf: Json) -> ModelConfig:
    """As GLM-4.5, with experts in all layers."""
    hf = {"head_dim": 128, "rope_theta": 1_000_000.0, "norm_topk_prob": True, "n_shared_experts": 1, **hf}
    hf = {"rms_norm_eps": 1e-5, **hf}
    hf |= {"intermediate_size": hf["moe_intermediate_size"], "mlp_bias": False}
    mixture = routed_experts({**hf, "first_k_dense_replace": 0})
    return replace(llama.llama_config(hf), output_bias=False, experts=mixture)


def dots1_config(hf: Json) -> ModelConfig:
    """The layers from `max_window_layers` on have a window, unless `layer_types` lists them."""
    hf = {"sliding_window": 4096, "max_window_layers": 62, **hf}
    by_depth = experts.layers_from(hf, hf["max_window_layers"])
    shape = llama.model_config(hf)
    return replace(shape, windowed=shape.windowed or by_depth, query_key_norm="shared", experts=routed_experts(hf))


def _family(
    model_type: str, name: str, config: Callable[[Json], ModelConfig], others: Collection[str] = tuple(CAUSAL_HEADS)
) -> Family:
    heads = llama.llama_heads(name, others)
    return Family(model_type, "model", config, RENAMES, heads, experts.split_experts, llama.DROP)


QWEN2_MOE = _family("qwen2_moe", "Qwen2Moe", qwen2_config)
QWEN3_MOE = _family("qwen3_moe", "Qwen3Moe", qwen3_config)
OLMOE = _family("olmoe", "Olmoe", olmoe_config, ())
FLEX_OLMO = replace(
    OLMOE,
    name="flex_olmo",
    config=flex_olmo_config,
    renames=(*experts.RENAMES, *INNER_RENAMES),
    heads=llama.llama_heads("FlexOlmo", ()),
)
GLM4_MOE = replace(_family("glm4_moe", "Glm4Moe", glm4_config, ()), variant=drop_prediction_layers, rotates_share=True)
SOLAR_OPEN = replace(_family("solar_open", "SolarOpen", solar_config, ()), rotates_share=True)
DOTS1 = _family("dots1", "Dots1", dots1_config, ())
