"""Command R and Command A (Cohere 1 and 2) and the text part of Cohere Compass: attention and MLP of one normed input,
scaled logits; the first two rotate neighbouring features."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from ..core.errors import UnsupportedError
from ..network.model_config import ModelConfig
from . import llama, text_part
from .family import (
    LAST_TOKEN_HEAD,
    Family,
    HeadSpec,
    Json,
    NamedTensors,
    deinterleave_heads,
    layer_numbers,
    read_head_counts,
    read_positive,
    read_rope,
)
from .phi import share_norm


def cohere_config(hf: Json) -> ModelConfig:
    hf = {"rope_theta": 500_000.0, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, **hf}
    return replace(
        llama.llama_config({**hf, "rms_norm_eps": hf["layer_norm_eps"]}),
        norm="layer",
        norm_bias=False,
        norm_order="parallel",
        query_key_norm="per_head" if hf.get("use_qk_norm") else "",
        logit_scale=read_positive(hf, "logit_scale"),
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
    """Order the features of queries and keys, and name the one norm of a layer twice."""
    return [piece for each in pair_features(heads, kv_heads, name, tensor) for piece in share_norm(*each)]


def compass_config(hf: Json) -> ModelConfig:
    """Features half a head apart are rotated. `rope_parameters` has the rotation of each kind of layers, or none for
    layers without positions; for text alone, the rotation by three coordinates is that by the position."""
    kinds = hf.get("layer_types") or ["full_attention"] * len(layer_numbers(hf["num_hidden_layers"]))
    parameters = hf.get("rope_parameters") or {}
    by_kind = {kind: parameters.get(kind) for kind in dict.fromkeys(kinds)}
    rotations = {
        kind: read_rope({"rope_parameters": {kind: fields}}, kind) for kind, fields in by_kind.items() if fields
    }
    base, scaling = rotations.get("full_attention") or next(iter(rotations.values()), (10_000.0, None))
    local_base, local_scaling = rotations.get("sliding_attention", (base, scaling))
    if local_scaling != scaling or (local_base != base and scaling is not None):
        raise UnsupportedError("rope_parameters: a scaling that differs by the kind of layers is not known here")
    plain = {"sliding_window": 4096, **hf, "rope_parameters": None, "rope_scaling": None, "layer_types": kinds}
    shape = cohere_config({**plain, "use_qk_norm": False, "logit_scale": 1.0})
    windowed = tuple(kind == "sliding_attention" for kind in kinds)
    return replace(
        shape,
        rope_base=base,
        rope_scaling=scaling,
        window=plain["sliding_window"] or 0,
        windowed=windowed,
        window_rope_base=local_base if local_base != base else 0.0,
        rotated=tuple(kind in rotations for kind in kinds),
        logit_scale=1.0 if hf.get("logit_scale") is None else float(hf["logit_scale"]),
    )


def pair_features(heads: int, kv_heads: int, name: str, tensor: Tensor) -> NamedTensors:
    """Order the features of queries and keys, and of their norms, so that pairs lie half a head apart."""
    for part, count in (("q", heads), ("k", kv_heads)):
        if f".{part}_norm." in name:
            return [(name, deinterleave_heads(tensor.flatten(), count).view_as(tensor))]
        if f".{part}_proj." in name:
            return [(name, deinterleave_heads(tensor, count))]
    return [(name, tensor)]


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
COMPASS = Family(
    name="cohere_compass_text",
    prefix="model",
    config=compass_config,
    renames=llama.RENAMES,
    heads={
        "CohereCompassForCausalLM": HeadSpec("generate", llama.LANGUAGE_HEAD),
        "CohereCompassTextModel": HeadSpec("embed"),
        "CohereCompassTextForSequenceClassification": LAST_TOKEN_HEAD,
    },
    convert=share_norm,
    drop=llama.DROP,
    rope_by_layer=True,
)
COMPASS_IMAGES = text_part.wrap_family("cohere_compass", "CohereCompass", (COMPASS,))
