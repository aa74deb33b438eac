"""Hunyuan with experts (Hunyuan-A13B): an expert that all tokens use, queries and keys normed after their rotation
(https://huggingface.co/tencent/Hunyuan-A13B-Instruct)."""

from dataclasses import replace
from typing import Any

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ExpertConfig, ModelConfig
from . import experts, hunyuan, llama
from .family import Family, Json, check_required_values

RENAMES = (
    (r"\.mlp\.gate\.wg\.", ".mlp.router."),
    (r"\.mlp\.shared_mlp\.(up|gate|down)_proj\.", r".mlp.shared.\1."),
    *experts.RENAMES,
    *hunyuan.RENAMES,
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
