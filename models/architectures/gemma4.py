"""Gemma 4 (text): Gemma 3 with other head counts and widths in layers without a window, keys that are values, keys that
several layers read, embeddings of tokens for each layer, and a scale for each layer (https://huggingface.co/google).
Some have routed experts beside the MLP of each layer. Gemma 4 Unified (12B) is a variant without experts or embeddings
for each layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ExpertConfig, LayerShape, ModelConfig
from . import experts, gemma, llama, text_part
from .family import (
    Family,
    HeadSpec,
    Json,
    NamedTensors,
    check_required_values,
    layer_numbers,
    read_limit,
    read_rope,
    read_sizes,
)

LOCAL, FULL = "sliding_attention", "full_attention"
RENAMES = (
    (r"^embed_tokens_per_layer\.", "layer_embedding.table."),
    (r"^per_layer_model_projection\.", "layer_embedding.projection."),
    (r"^per_layer_projection_norm\.", "layer_embedding.norm."),
    (r"\.per_layer_input_gate\.", ".input_gate."),
    (r"\.per_layer_projection\.", ".input_up."),
    (r"\.post_per_layer_input_norm\.", ".input_norm."),
    (r"\.layer_scalar$", ".scale"),
    *gemma.RENAMES,
)
# Of networks with experts, in which the MLP is the expert that all tokens use.
MIXTURE_RENAMES = (
    (r"\.pre_feedforward_layernorm\.weight$", ".mlp.shared_input"),
    (r"\.pre_feedforward_layernorm_2\.weight$", ".mlp.chosen_input"),
    (r"\.post_feedforward_layernorm_1\.", ".mlp.shared_norm."),
    (r"\.post_feedforward_layernorm_2\.", ".mlp.chosen_norm."),
    (r"\.router\.proj\.", ".mlp.router."),
    (r"\.router\.scale$", ".mlp.router_input"),
    (r"\.router\.per_expert_scale$", ".mlp.output_scales"),
    (r"\.mlp\.(up|gate|down)_proj\.", r".mlp.shared.\1."),
    *experts.RENAMES,
    *RENAMES,
)
ROTATION: Json = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
}  # unless the configuration has its own
DEFAULTS: Json = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": ROTATION,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
}
UNIFIED: Json = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
UNIFIED_DEFAULTS: Json = {"sliding_window": 1024, "max_position_embeddings": 262_144}


def fill_defaults(hf: Json) -> dict[str, Any]:
    """The configuration with what it leaves out; the last layer has no window."""
    hf = {**DEFAULTS, **{key: value for key, value in hf.items() if value is not None}}
    layers = layer_numbers(hf["num_hidden_layers"])
    kinds = [*(hf.get("layer_types") or (LOCAL if (layer + 1) % 6 else FULL for layer in layers))]
    if len(kinds) != len(layers):
        raise UnsupportedError(f"layer_types has {len(kinds)} layers, and num_hidden_layers is {len(layers)}")
    return {**hf, "layer_types": [*kinds[:-1], FULL], "hidden_act": hf["hidden_activation"]}


def key_layers(hf: Json) -> tuple[int, ...]:
    """The layer whose keys and values each layer reads: the last `num_kv_shared_layers` read those of the last layer of
    their kind before them."""
    kinds, depth = hf["layer_types"], len(hf["layer_types"])
    first = depth - hf["num_kv_shared_layers"]
    own = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    if not first <= depth or not own.keys() >= {*kinds}:
        known = "layers of each kind have keys of their own"
        raise UnsupportedError(f"num_kv_shared_layers is {show_value(depth - first)}: only fewer, so that {known}")
    return tuple(layer if layer < first else own[kind] for layer, kind in enumerate(kinds))


def layer_shapes(hf: Json, reads: tuple[int, ...]) -> tuple[LayerShape, ...]:
    """The sizes of each layer, from `per_layer_config` or the older fields of layers without a window."""
    full = {"head_dim": hf["global_head_dim"]}
    if hf.get("attention_k_eq_v") and "num_global_key_value_heads" in hf:
        full["num_key_value_heads"] = hf["num_global_key_value_heads"]
    listed = hf.get("per_layer_config") or {n: full for n, kind in enumerate(hf["layer_types"]) if kind == FULL}
    if not isinstance(listed, Mapping) or not all(isinstance(sizes, Mapping) for sizes in listed.values()):
        raise UnsupportedError(f"per_layer_config is {show_value(listed)}, which should be an object of objects")
    found, keys = [], ("num_key_value_heads", "head_dim", "intermediate_size")
    for layer, source in enumerate(reads):
        own = listed.get(str(layer), listed.get(layer, {}))
        kv_heads, width, inner = read_sizes({key: own.get(key, hf[key]) for key in keys}, *keys)
        doubled = 2 if hf.get("use_double_wide_mlp") and source < layer else 1
        found.append(LayerShape(kv_heads=kv_heads, head_width=width, mlp_width=inner * doubled))
    return tuple(found)


def model_config(hf: Json) -> ModelConfig:
    hf = fill_defaults(hf)
    if hf.get("use_bidirectional_attention") != "vision":  # of the tokens of pictures, which are not read
        gemma.check_causal(hf)
    narrow = hf["hidden_size_per_layer_input"]
    check_required_values(hf, {"vocab_size_per_layer_input": hf["vocab_size"]} if narrow else {})
    local_base, scaling = read_rope(hf, LOCAL)
    if scaling is not None:
        raise UnsupportedError(f"rope_parameters: a scaling of {LOCAL} is not known here")
    if not isinstance(has_experts := hf.get("enable_moe_block", False), bool):
        raise UnsupportedError(f"enable_moe_block is {show_value(has_experts)}, which should be true or false")
    reads = key_layers(hf)
    shapes = layer_shapes(hf, reads)
    return replace(
        llama.model_config(hf),
        kv_heads=max(shape.kv_heads for shape in shapes),
        head_width=max(shape.head_width for shape in shapes),
        mlp_width=max(shape.mlp_width for shape in shapes),
        layer_shapes=shapes,
        key_layers=reads if hf["num_kv_shared_layers"] else (),
        tied_values=tuple(kind == FULL and bool(hf.get("attention_k_eq_v")) for kind in hf["layer_types"]),
        value_norm=True,
        rotary_width=0,
        window_rope_base=local_base,
        norm_order="sandwich",
        embedding_scale=hf["hidden_size"] ** 0.5,
        query_key_norm="shared",
        score_scale=1.0,
        logit_cap=read_limit(hf, "final_logit_softcapping"),
        layer_embedding=narrow,
        layer_scale=True,
        experts=read_mixture(hf, shapes) if has_experts else None,
    )


def read_mixture(hf: Json, shapes: tuple[LayerShape, ...]) -> ExpertConfig:
    """The experts of all layers, and beside them the MLP, which is as wide in all."""
    counts = "num_experts", "top_k_experts", "moe_intermediate_size"
    count, chosen, width = read_sizes({**dict.fromkeys(counts), **hf}, *counts)
    widths = {shape.mlp_width for shape in shapes}
    if len(widths) > 1:
        listed = ", ".join(map(str, sorted(widths)))
        raise UnsupportedError(
            f"enable_moe_block: MLPs beside experts have {listed} inner features; known are equal ones"
        )
    return ExpertConfig(
        count=count, chosen=chosen, width=width, shared_width=widths.pop(), own_norms=True, output_scales=True
    )


def unified_config(hf: Json) -> ModelConfig:
    check_required_values(hf, UNIFIED)
    return model_config({**UNIFIED_DEFAULTS, **hf, **UNIFIED})


def convert_weight(name: str, tensor: Tensor) -> NamedTensors:
    """Files have the experts beside the MLP."""
    return experts.split_experts(name.replace(".experts.", ".mlp.experts."), tensor)


def choose_variant(family: Family, hf: Json) -> Family:
    """Files may have keys and values of layers that read those of another layer."""
    reads = key_layers(fill_defaults(hf))
    unused = "|".join(str(layer) for layer, source in enumerate(reads) if source < layer) or "none"
    family = replace(family, drop=rf"{family.drop}|(^|\.)layers\.({unused})\.self_attn\.(k_proj|v_proj|k_norm)\.")
    return replace(family, renames=MIXTURE_RENAMES, convert=convert_weight) if hf.get("enable_moe_block") else family


GEMMA4 = Family(
    name="gemma4_text",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads={
        "Gemma4ForCausalLM": HeadSpec("generate", llama.LANGUAGE_HEAD),
        "Gemma4TextModel": HeadSpec("embed"),
    },
    drop=llama.DROP,
    variant=choose_variant,
    rope_by_layer=True,
)
GEMMA4_IMAGES = text_part.wrap_family("gemma4", "Gemma4", (GEMMA4,))
GEMMA4_UNIFIED = replace(
    GEMMA4,
    name="gemma4_unified_text",
    config=unified_config,
    heads={
        "Gemma4UnifiedForCausalLM": HeadSpec("generate", llama.LANGUAGE_HEAD),
        "Gemma4UnifiedTextModel": HeadSpec("embed"),
    },
)
GEMMA4_UNIFIED_IMAGES = text_part.wrap_family("gemma4_unified", "Gemma4Unified", (GEMMA4_UNIFIED,))
