"""Cohere 2 with experts: attention and MLP of one normed input, experts chosen by their logits
(https://huggingface.co/CohereLabs)."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ExpertConfig, ModelConfig
from . import cohere, experts, llama
from .family import Family, Json, NamedTensors, layer_numbers, read_head_counts, read_windowed_layers

SHARES = {"sum": 1.0, "average": 0.5}  # of the chosen experts and the shared one, by the way they are put together
SCORINGS = ("softmax", "sigmoid")


def model_config(hf: Json) -> ModelConfig:
    """The first layers may have no experts, and windows of another pattern."""
    hf = {"layer_norm_eps": 1e-5, "sliding_window": 4096, "head_dim": 128, "rope_theta": 10_000.0, **hf}
    plain = hf.get("first_k_dense_replace") or 0
    kinds = hf.get("mlp_layer_types") or [
        "dense" if layer < plain else "sparse" for layer in layer_numbers(hf["num_hidden_layers"])
    ]
    windowed = read_windowed_layers(hf) or windowed_by_pattern(hf, plain)
    always = hf.get("prefix_dense_sliding_window_pattern", 1) == 1
    rotated = tuple(
        is_windowed or (always and kind == "dense") for is_windowed, kind in zip(windowed, kinds, strict=True)
    )
    uses_rms = hf.get("rms_norm_eps") is not None
    shape = cohere.cohere_config({**hf, "use_qk_norm": False})
    return replace(
        shape,
        norm="rms" if uses_rms else "layer",
        norm_eps=hf["rms_norm_eps"] if uses_rms else hf["layer_norm_eps"],
        window=hf["sliding_window"] or 0,
        windowed=windowed,
        rotated=rotated,
        mlp_width=hf.get("prefix_dense_intermediate_size") or hf["intermediate_size"],
        experts=replace(read_experts(hf), layers=tuple(kind == "sparse" for kind in kinds)),
    )


def read_experts(hf: Json) -> ExpertConfig:
    shared, scoring = hf.get("num_shared_experts") or 0, hf.get("expert_selection_fn", "softmax")
    combined = hf.get("shared_expert_combination_strategy", "average")
    if scoring not in SCORINGS:
        raise UnsupportedError(f"expert_selection_fn {show_value(scoring)} is not one of {', '.join(SCORINGS)}")
    if combined not in SHARES:
        name = "shared_expert_combination_strategy"
        raise UnsupportedError(f"{name} {show_value(combined)} is not one of {', '.join(SHARES)}")
    share = SHARES[combined] if shared else 1.0
    return ExpertConfig(
        count=experts.expert_count(hf),
        chosen=hf["num_experts_per_tok"],
        width=hf["intermediate_size"],
        scoring=scoring,
        normalised=scoring == "softmax" or bool(hf.get("norm_topk_prob", True)),
        scale=share,
        shared_width=hf["intermediate_size"] * shared,
        shared_scale=share,
    )


def windowed_by_pattern(hf: Json, plain: int) -> tuple[bool, ...]:
    """Which layers have a window: all but every n-th, counted anew after the first `plain` layers."""
    first, every = hf.get("prefix_dense_sliding_window_pattern", 1), hf.get("sliding_window_pattern", 4)
    depth = len(layer_numbers(hf["num_hidden_layers"]))
    return tuple(
        bool((layer + 1) % first) if layer < plain else bool((layer - plain + 1) % every) for layer in range(depth)
    )


def convert_weight(heads: int, kv_heads: int, name: str, tensor: Tensor) -> NamedTensors:
    """As Cohere's, and the experts' matrices."""
    pieces = experts.split_experts(name, tensor)
    return pieces if len(pieces) > 1 or ".experts." in name else cohere.convert_weight(heads, kv_heads, name, tensor)


def choose_variant(family: Family, hf: Json) -> Family:
    heads, kv_heads = read_head_counts(hf)
    return replace(family, convert=partial(convert_weight, heads, kv_heads))


COHERE2_MOE = Family(
    name="cohere2_moe",
    prefix="model",
    config=model_config,
    renames=(*experts.RENAMES, *llama.RENAMES),
    heads=llama.llama_heads("Cohere2Moe", ()),
    drop=llama.DROP,
    variant=choose_variant,
)
