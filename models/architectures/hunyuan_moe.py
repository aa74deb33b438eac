"""Hunyuan with experts. A13B: an expert that all tokens use, queries and keys normed after their rotation
(https://huggingface.co/tencent/Hunyuan-A13B-Instruct); Hy3: logistic scores with a bias for the choice, queries and
keys normed before their rotation (https://huggingface.co/tencent/Hy3-preview)."""

from dataclasses import replace
from typing import Any

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ExpertConfig, ModelConfig
from . import experts, hunyuan, llama
from .family import Family, Json, check_required_values, read_sizes

RENAMES = (
    (r"\.mlp\.gate\.wg\.", ".mlp.router."),
    (r"\.mlp\.shared_mlp\.(up|gate|down)_proj\.", r".mlp.shared.\1."),
    *experts.RENAMES,
    *hunyuan.RENAMES,
)
HY3_RENAMES = (
    (r"\.mlp\.router\.gate\.", ".mlp.router."),
    (r"\.mlp\.(expert_bias|e_score_correction_bias)$", ".mlp.choice_bias"),
    (r"\.mlp\.shared_mlp\.(up|gate|down)_proj\.", r".mlp.shared.\1."),
    *experts.RENAMES,
    *llama.RENAMES,
)
KNOWN = {"use_cla": False, "use_mla": False, "moe_layer_num_skipped": 0, "moe_drop_tokens": False}


def model_config(hf: Json) -> ModelConfig:
    """All layers have the same experts. Published configurations list their numbers for each layer."""
    check_required_values(hf, KNOWN)
    width = read_layer_value(hf, "moe_intermediate_size", hf["intermediate_size"])
    shared = read_layer_value(hf, "num_shared_expert", 1)
    if width != hf["intermediate_size"] or shared != 1:
        message = f"its experts have {show_value(width)} features, and {show_value(shared)} are shared"
        raise UnsupportedError(f"{message}; one of {hf['intermediate_size']}, as intermediate_size says, is known")
    mixture = ExpertConfig(
        count=read_layer_value(hf, "num_experts", 1),
        chosen=read_layer_value(hf, "moe_topk", 1),
        width=width,
        shared_width=hf["intermediate_size"],
    )
    return replace(hunyuan.model_config(hf), experts=mixture)


def hy3_config(hf: Json) -> ModelConfig:
    """The first layer has no experts, unless `mlp_layer_types` says so."""
    hf = {"head_dim": 128, "rope_theta": 11_158_840.0, "rms_norm_eps": 1e-5, "router_scaling_factor": 2.826, **hf}
    shared = hf.get("num_shared_experts")
    kinds = hf.get("mlp_layer_types")
    mixture = ExpertConfig(
        count=experts.expert_count(hf),
        chosen=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        layers=tuple(kind == "sparse" for kind in kinds) if kinds else experts.layers_from(hf, 1),
        scoring="sigmoid",
        normalised_eps=1e-20,
        scale=float(hf["router_scaling_factor"]),
        choice_bias=True,
        shared_width=hf["moe_intermediate_size"] * (1 if shared is None else shared),
    )
    return replace(llama.llama_config(hf), query_key_norm="shared", experts=mixture)


def drop_further_layers(family: Family, hf: Json) -> Family:
    """Without the one layer after the last, which predicts a further token and which no field counts."""
    [depth] = read_sizes(hf, "num_hidden_layers")
    return replace(family, drop=rf"{family.drop}|^layers\.{depth}\.")


def read_layer_value(hf: Json, name: str, default: int) -> int:
    """A number that a configuration has for all layers, or in a list for each. UnsupportedError if they differ."""
    value: Any = default if hf.get(name) is None else hf[name]
    listed = value if isinstance(value, list) and value else [value]
    if any(each != listed[0] for each in listed):
        raise UnsupportedError(f"{name} differs from layer to layer, which is not known here")
    number: int = listed[0]
    return number


HUNYUAN_MOE = Family(
    name="hunyuan_v1_moe",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("HunYuanMoEV1", llama.TEXT_LABELS),
    convert=experts.split_experts,
    drop=llama.DROP,
)
HY3 = Family(
    name="hy_v3",
    prefix="model",
    config=hy3_config,
    renames=HY3_RENAMES,
    heads=llama.llama_heads("HYV3", ()),
    convert=experts.split_experts,
    drop=llama.DROP,
    variant=drop_further_layers,
)
