"""Mixtures of experts with windows in most layers: Mellum 2, Flint and Kolibri 1. Flint and Kolibri encode no positions
in layers without a window."""

from collections.abc import Callable
from dataclasses import replace

from ..core.errors import UnsupportedError
from ..network.model_config import ExpertConfig, ModelConfig
from . import experts, glm, llama
from .family import (
    Family,
    Json,
    Renames,
    layer_numbers,
    read_rope,
    read_rotary_width,
    read_windowed_layers,
    rope_parameters,
)

FLINT_RENAMES = (
    (r"\.self_attn\.(sinks|softmax_offset)$", ".attention.sinks"),
    *experts.RENAMES,
    *llama.RENAMES,
)
KOLIBRI_RENAMES = (
    (r"\.(moe\.router\.expert_bias|mlp\.gate\.e_score_correction_bias)$", ".mlp.choice_bias"),
    (r"\.post_attn_norm\.", ".attention_post_norm."),
    (r"\.post_ffn_norm\.", ".mlp_post_norm."),
    *experts.RENAMES,
    *glm.SANDWICH_RENAMES,
)


def mellum_config(hf: Json) -> ModelConfig:
    """Normed queries and keys; layers with a window have a rotary base of their own."""
    hf = {"head_dim": 128, "sliding_window": 1024, **hf}
    shape = llama.model_config({"rope_theta": 500_000.0, **hf, "mlp_bias": False})
    depth = len(layer_numbers(hf["num_hidden_layers"]))
    kinds = hf.get("mlp_layer_types") or ["sparse"] * depth
    mixture = ExpertConfig(
        count=experts.expert_count(hf),
        chosen=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        layers=tuple(kind == "sparse" for kind in kinds),
        normalised=bool(hf.get("norm_topk_prob", True)),
    )
    shape = replace(shape, query_key_norm="shared", experts=mixture)
    if not any(shape.windowed):
        return replace(shape, window=0, windowed=())
    local_base, scaling = read_rope({"rope_theta": 10_000.0, **hf}, "sliding_attention")
    local = read_rotary_width({"rope_parameters": rope_parameters(hf, "sliding_attention")}, shape.head_width)
    if scaling is not None or local != shape.rotary_width:
        message = "a scaling or a share of features of sliding_attention alone is not known here"
        raise UnsupportedError(f"rope_parameters: {message}")
    return replace(shape, window_rope_base=local_base)


def flint_config(hf: Json) -> ModelConfig:
    """Sinks, logistic scores, and an expert that all tokens use, without a gate."""
    hf = {"head_dim": 128, "sliding_window": 513, "shared_expert_intermediate_size": 1024, **hf}
    layers = layer_numbers(hf["num_hidden_layers"])
    plain = hf.get("mlp_only_layers")
    plain, step = (0, 1) if plain is None else plain, hf.get("decoder_sparse_step") or 1
    full = [layer < 2 or layer % 4 == 1 or layer == len(layers) - 1 for layer in layers]
    mixture = ExpertConfig(
        count=experts.expert_count(hf),
        chosen=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        layers=tuple(layer not in plain and (layer + 1) % step == 0 for layer in layers),
        scoring="sigmoid",
        normalised=bool(hf.get("norm_topk_prob", True)),
        shared_width=hf["shared_expert_intermediate_size"] or 0,
    )
    shape = rotate_windows(hf, tuple(not each for each in full))
    return replace(shape, query_key_norm="shared", sinks=True, experts=mixture)


def kolibri_config(hf: Json) -> ModelConfig:
    """Norms before and after each part; experts are chosen by their logits and a bias, and weighted by the logistic
    function of the logits."""
    hf = {"head_dim": 128, "sliding_window": 513, "shared_expert_intermediate_size": 512, **hf}
    mixture = ExpertConfig(
        count=experts.expert_count(hf),
        chosen=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        scoring="sigmoid",
        normalised=bool(hf.get("norm_topk_prob", False)),
        choice_bias=True,
        chosen_by_logits=True,
        shared_width=hf["shared_expert_intermediate_size"] or 0,
    )
    hf |= {"intermediate_size": hf["moe_intermediate_size"], "attention_bias": False}
    by_depth = tuple(bool((layer + 1) % 5) for layer in layer_numbers(hf["num_hidden_layers"]))
    shape = rotate_windows(hf, by_depth)
    return replace(shape, norm_order="sandwich", query_key_norm="shared", experts=mixture)


def rotate_windows(hf: Json, by_depth: tuple[bool, ...]) -> ModelConfig:
    """Llama's configuration with windows in the layers that `layer_types` lists, or else in those of `by_depth`; only
    these encode positions."""
    windowed = read_windowed_layers(hf) or by_depth
    return replace(llama.model_config({**hf, "mlp_bias": False}), windowed=windowed, rotated=windowed)


def _family(model_type: str, name: str, config: Callable[[Json], ModelConfig], renames: Renames) -> Family:
    heads = llama.llama_heads(name, ())
    return Family(model_type, "model", config, renames, heads, experts.split_experts, rf"{llama.DROP}|^mtp\.")


MELLUM = replace(
    _family("mellum", "Mellum", mellum_config, (*experts.RENAMES, *llama.RENAMES)),
    rotates_share=True,
    rope_by_layer=True,
)
FLINT = _family("flint", "Flint", flint_config, FLINT_RENAMES)
KOLIBRI1 = _family("kolibri1", "Kolibri1", kolibri_config, KOLIBRI_RENAMES)
