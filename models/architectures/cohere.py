"""Command R and Command A (Cohere 1 and 2): attention and MLP of one normed input, rotation of neighbouring features,
scaled logits."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from ..network.model_config import ModelConfig
from . import llama
from .family import (
    Family,
    Json,
    NamedTensors,
    deinterleave_heads,
    layer_numbers,
    read_head_counts,
)
from .phi import share_norm


def cohere_config(hf: Json) -> ModelConfig:
    hf = {"rope_theta": 500_000.0, "layer_norm_eps": 1e-5, **hf}
    return replace(
        llama.llama_config({**hf, "rms_norm_eps": hf["layer_norm_eps"]}),
        norm="layer",
        norm_bias=False,
        norm_order="parallel",
        query_key_norm="per_head" if hf.get("use_qk_norm") else "",
        logit_scale=float(hf.get("logit_scale") or 0.0625),
    )


def cohere2_config(hf: Json) -> ModelConfig:
    """Cohere 2: three of four layers have a window, and only these are rotated."""
    hf = {"sliding_window": 4096, "rope_theta": 10_000.0, **hf}
    every = hf.get("sliding_window_pattern") or 4
    by_depth = tuple(bool((layer + 1) % every) for layer in layer_numbers(hf["num_hidden_layers"]))
    windowed = llama.model_config(hf).windowed or by_depth
    shape = cohere_config({**hf, "use_qk_norm": False})
    return replace(shape, window=hf["sliding_window"], windowed=windowed, rotated=windowed)


def convert_weight(heads: int, kv_heads: int, name: str, tensor: Tensor) -> NamedTensors:
    """Order the features of queries and keys, and of their norms, so that pairs lie half a head apart."""
    for part, count in (("q", heads), ("k", kv_heads)):
        if f".{part}_norm." in name:
            return [(name, deinterleave_heads(tensor.flatten(), count).view_as(tensor))]
        if f".{part}_proj." in name:
            return [(name, deinterleave_heads(tensor, count))]
    return share_norm(name, tensor)


def choose_variant(family: Family, hf: Json) -> Family:
    heads, kv_heads = read_head_counts(hf)
    return replace(family, convert=partial(convert_weight, heads, kv_heads))


COHERE = Family(
    name="cohere",
    prefix="model",
    config=cohere_config,
    renames=llama.RENAMES,
    heads=llama.llama_heads("Cohere", ()),
    drop=llama.DROP,
    variant=choose_variant,
)
COHERE2 = replace(COHERE, name="cohere2", config=cohere2_config, heads=llama.llama_heads("Cohere2", ()))
