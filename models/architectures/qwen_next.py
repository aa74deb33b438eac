"""Qwen3-Next and Qwen3.5: three of four layers follow the gated delta rule, the others have attention with a gate;
norms are stored as their difference from one (https://huggingface.co/Qwen)."""

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..network.model_config import MixerConfig, MixerName, ModelConfig
from . import delta_net, experts, llama, text_part
from .family import (
    CAUSAL_HEADS,
    Family,
    Json,
    NamedTensors,
    check_required_values,
    layer_numbers,
    read_head_count,
    read_mixers,
    read_sizes,
)
from .qwen_moe import qwen_experts

RENAMES = ((r"\.self_attn\.gate_proj\.", ".attention.gate."), *delta_net.RENAMES, *experts.RENAMES, *llama.RENAMES)
# Of each group of heads: queries, keys, values and gate; rates and decays.
GROUPED = re.compile(r"(.*\.linear_attn)\.in_proj_(qkvz|ba)\.weight$")
DEFAULTS: Json = {
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
}
EXPERT_DEFAULTS: Json = {"norm_topk_prob": True, "shared_expert_intermediate_size": 512}


def dense_config(hf: Json) -> ModelConfig:
    check_required_values(hf, {"hidden_act": "silu", "attention_bias": False})
    hf = {**DEFAULTS, **hf, "mlp_bias": False}
    return replace(
        llama.llama_config(hf),
        query_key_norm="shared",
        attention_gate=True,
        mixers=read_layers(hf),
        recurrent=delta_net.read_recurrent(hf, hf["rms_norm_eps"]),
    )


def next_config(hf: Json) -> ModelConfig:
    """A layer without experts has an MLP of its own width, if there are such layers."""
    hf = {**EXPERT_DEFAULTS, "intermediate_size": 5632, **hf}
    shape = dense_config(hf)
    return shape if experts.expert_count(hf) == 0 else replace(shape, experts=qwen_experts(hf))


def moe_config(hf: Json) -> ModelConfig:
    """All layers have experts."""
    hf = {**EXPERT_DEFAULTS, **hf, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": None}
    hf["intermediate_size"] = hf["moe_intermediate_size"]
    return replace(dense_config(hf), experts=qwen_experts(hf))


def read_layers(hf: Json) -> tuple[MixerName, ...]:
    """What the layers have, from `layer_types`; otherwise the last of every four has attention."""
    if hf.get("layer_types"):
        return read_mixers(hf, delta_net.KINDS)
    [interval] = read_sizes({"full_attention_interval": 4, **hf}, "full_attention_interval")
    layers = layer_numbers(hf["num_hidden_layers"])
    return tuple("delta" if (layer + 1) % interval else "attention" for layer in layers)


def convert_weight(heads: int, sizes: MixerConfig, name: str, tensor: Tensor) -> NamedTensors:
    """Split what is stored together, and add one to norm weights, but for the norm within a recurrent layer."""
    if name.endswith("norm.weight") and ".linear_attn." not in name:
        return [(name, tensor + 1)]
    if name.endswith(".q_proj.weight") and ".self_attn." in name:
        return split_gate(name, tensor, heads)
    if found := GROUPED.match(name):
        return split_groups(sizes, found[1], tensor, has_rates=found[2] == "ba")
    [*pieces] = delta_net.split_joined(sizes, name, tensor)
    return [each for piece in pieces for each in experts.split_experts(*piece)]


def split_gate(name: str, tensor: Tensor, heads: int) -> NamedTensors:
    """Queries and gates out of a matrix [H * 2 * D, W], in which each head has its queries' rows first."""
    by_head = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    parts = zip(("q_proj", "gate_proj"), by_head.unbind(1), strict=True)
    return [(name.replace("q_proj", part), rows.flatten(0, 1)) for part, rows in parts]


def split_groups(sizes: MixerConfig, layer: str, tensor: Tensor, *, has_rates: bool) -> NamedTensors:
    """The parts of a matrix [G * ..., W]. For each head of keys it has the rows of its query, its key, the values and
    the gates of its heads; or the rates and the decays of its heads."""
    by_group = tensor.reshape(sizes.key_heads, -1, *tensor.shape[1:])
    each = sizes.heads // sizes.key_heads
    names, counts = ["in_proj_b", "in_proj_a"], [each, each]
    if not has_rates:
        names = ["q", "k", "v", "in_proj_z"]
        counts = [sizes.key_width, sizes.key_width, each * sizes.head_width, each * sizes.head_width]
    parts = zip(names, torch.split(by_group, counts, dim=1), strict=True)
    return [(f"{layer}.{name}.weight", rows.flatten(0, 1)) for name, rows in parts]


def choose_variant(family: Family, hf: Json) -> Family:
    sizes = delta_net.read_recurrent({**DEFAULTS, **hf}, 0.0)
    return replace(family, convert=partial(convert_weight, read_head_count(hf), sizes))


def _family(name: str, classes: str, config: Callable[[Json], ModelConfig], others: Collection[str] = ()) -> Family:
    return Family(
        name=name,
        prefix="model",
        config=config,
        renames=RENAMES,
        heads=llama.llama_heads(classes, others),
        drop=rf"{llama.DROP}|^mtp\.",  # layers that predict further tokens in training
        variant=choose_variant,
    )


QWEN3_NEXT = replace(_family("qwen3_next", "Qwen3Next", next_config, tuple(CAUSAL_HEADS)), rotates_share=True)
QWEN3_5 = replace(_family("qwen3_5_text", "Qwen3_5", dense_config, llama.LABELS), rotates_share=True)
QWEN3_5_MOE = replace(_family("qwen3_5_moe_text", "Qwen3_5Moe", moe_config), rotates_share=True)
QWEN3_5_IMAGES = text_part.wrap_family("qwen3_5", "Qwen3_5", (QWEN3_5,))
QWEN3_5_MOE_IMAGES = text_part.wrap_family("qwen3_5_moe", "Qwen3_5Moe", (QWEN3_5_MOE,))
