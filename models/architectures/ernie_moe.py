"""ERNIE 4.5 with experts: a softmax over all of them with a bias for the choice, shared experts, rotation of
neighbouring features (https://huggingface.co/baidu)."""

import re
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..network.model_config import ExpertConfig, ModelConfig
from . import experts, llama
from .family import Family, Json, NamedTensors, deinterleave_heads, layer_numbers, read_head_counts

RENAMES = (
    (r"\.mlp\.(gate\.)?moe_statics\.e_score_correction_bias$", ".mlp.choice_bias"),
    *experts.RENAMES,
    *llama.RENAMES,
)
HEAD_ROWS = re.compile(r"\.self_attn\.([qk])_proj\.")


def model_config(hf: Json) -> ModelConfig:
    has_bias, depth = bool(hf.get("use_bias")), len(layer_numbers(hf["num_hidden_layers"]))
    every, first, last = (hf.get(f"moe_layer_{name}") for name in ("interval", "start_index", "end_index"))
    last = depth - 1 if last in (None, -1) else last
    first = 1 if first is None else first
    layers = (first <= layer <= last and (layer + 1) % (every or 1) == 0 for layer in range(depth))
    shared = hf.get("moe_num_shared_experts", 2) or 0
    mixture = ExpertConfig(
        count=hf.get("moe_num_experts", 64),
        chosen=hf.get("moe_k", 6),
        width=hf["moe_intermediate_size"],
        layers=tuple(layers),
        choice_bias=True,
        shared_width=hf["moe_intermediate_size"] * shared,
        bias=False,
    )
    shape = llama.llama_config({"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, **hf})
    return replace(
        shape, qkv_bias=has_bias, output_bias=has_bias, mlp_bias=has_bias, logit_bias=has_bias, experts=mixture
    )


def convert_weight(heads: int, kv_heads: int, name: str, tensor: Tensor) -> NamedTensors:
    """Rows of queries and keys with the features of a pair half a head apart; the bias of the choice without its first
    dimension; the experts' matrices."""
    if found := HEAD_ROWS.search(name):
        return [(name, deinterleave_heads(tensor, heads if found[1] == "q" else kv_heads))]
    if name.endswith("e_score_correction_bias"):
        return [(name, tensor.flatten())]
    return experts.split_experts(name, tensor)


def choose_variant(family: Family, hf: Json) -> Family:
    heads, kv_heads = read_head_counts(hf)
    return replace(family, convert=partial(convert_weight, heads, kv_heads))


ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("Ernie4_5_Moe", ()),
    drop=rf"{llama.DROP}|^mtp_",  # layers that predict further tokens in training
    variant=choose_variant,
)
