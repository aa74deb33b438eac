"""The text part of Llama 4 (https://huggingface.co/meta-llama): experts whose inputs are weighted, queries and keys
normed after their rotation, without positions in every fourth layer."""

import re
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..network.model_config import ExpertConfig, ModelConfig
from . import cohere, experts, llama, text_part
from .family import Family, HeadSpec, Json, NamedTensors, layer_numbers, read_head_counts

RENAMES = (
    (r"\.feed_forward\.", ".mlp."),
    (r"\.mlp\.(experts\.\d+|shared)\.(up|gate|down)_proj\.", r".mlp.\1.\2."),
    (r"\.mlp\.shared_expert\.(up|gate|down)_proj\.", r".mlp.shared.\1."),
    *llama.RENAMES,
)
FUSED = re.compile(r"(.*)\.feed_forward\.experts\.(gate_up_proj|down_proj)$")


def model_config(hf: Json) -> ModelConfig:
    """Contexts end where the first chunk of attention does, and before queries of layers without positions are scaled:
    up to there both are plain attention."""
    hf = {"head_dim": 128, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "floor_scale": 8192, **hf}
    layers = layer_numbers(hf["num_hidden_layers"])
    every, step = hf.get("no_rope_layer_interval") or 4, hf.get("interleave_moe_layer_step") or 1
    listed = hf.get("no_rope_layers") or [(layer + 1) % every for layer in layers]  # 1 for a layer that is rotated
    rotated, chosen = tuple(map(bool, listed)), hf.get("moe_layers")
    chosen = range(step - 1, len(layers), step) if chosen is None else chosen
    shape = llama.llama_config({**hf, "intermediate_size": hf.get("intermediate_size_mlp", 16_384), "mlp_bias": False})
    mixture = ExpertConfig(
        count=experts.expert_count(hf),
        chosen=hf.get("num_experts_per_tok", 1),
        width=hf["intermediate_size"],
        layers=tuple(layer in chosen for layer in layers),
        scoring="sigmoid",
        normalised=False,
        weighs_input=True,
        shared_width=hf["intermediate_size"],
    )
    limits = [shape.max_positions]
    if (chunk := hf.get("attention_chunk_size", 8192)) is not None:
        limits.append(chunk)
    if hf.get("attn_temperature_tuning", True):
        limits.append(hf["floor_scale"] - 1)
    return replace(
        shape,
        max_positions=min(limits),
        rotated=rotated,
        query_key_norm="shared" if hf.get("use_qk_norm", True) else "",
        query_key_norm_weight=False,
        query_key_norm_layers=rotated,
        norm_after_rotation=True,
        experts=mixture,
    )


def convert_weight(heads: int, kv_heads: int, name: str, tensor: Tensor) -> NamedTensors:
    """Order the features of queries and keys so that pairs lie half a head apart, and split the experts' matrices,
    which are stored transposed: [E, W, 2 I] and [E, I, W]."""
    found = FUSED.match(name)
    if found is None:
        return cohere.pair_features(heads, kv_heads, name, tensor)
    parts = ("gate", "up") if found[2] == "gate_up_proj" else ("down",)
    return [
        (f"{found[1]}.feed_forward.experts.{number}.{part}_proj.weight", piece)
        for number, matrix in enumerate(experts.list_experts(tensor))
        for part, piece in zip(parts, matrix.t().chunk(len(parts)), strict=True)
    ]


def choose_variant(family: Family, hf: Json) -> Family:
    heads, kv_heads = read_head_counts(hf)
    return replace(family, convert=partial(convert_weight, heads, kv_heads))


LLAMA4 = Family(
    name="llama4_text",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads={
        "Llama4ForCausalLM": HeadSpec("generate", llama.LANGUAGE_HEAD),
        "Llama4TextModel": HeadSpec("embed"),
    },
    drop=llama.DROP,
    variant=choose_variant,
)
LLAMA4_IMAGES = replace(
    text_part.wrap_family("llama4", "Llama4", (LLAMA4,)),
    heads={"Llama4ForConditionalGeneration": HeadSpec("generate", text_part.LANGUAGE_HEAD)},
)
