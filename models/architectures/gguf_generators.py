"""How the metadata of GGUF files becomes the configuration of a generator with rotary positions, with Hugging Face's
names of fields. `fields` are keys without the architecture's name; a missing field has llama.cpp's default.
"""

from collections.abc import Mapping
from typing import Any

from ..core.errors import UnsupportedError, show_value

Json = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
LOCAL_BASE = 10_000.0  # of Gemma 3's windowed layers; older files do not store it
GEMMA2_27B_LAYERS = 46  # layers of the one Gemma 2 whose scores are scaled by width / heads instead of the head width
GEMMA_27B_LAYERS = 62  # the same of Gemma 3
YARN_KEYS = {
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
OTHER_MAGNITUDES = ("rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor")


def read_llama(fields: Json, shapes: Shapes) -> Json:
    """The configuration of Llama and related families, with Hugging Face's field names."""
    heads, width = fields["attention.head_count"], fields["embedding_length"]
    head_width = fields.get("attention.key_length", width // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if fields.get(key, head_width) != head_width:
            raise UnsupportedError(
                f"{key} {show_value(fields[key])} differs from the head width {show_value(head_width)}"
            )
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": width,
        "num_hidden_layers": fields["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", heads),
        "head_dim": head_width,
        "intermediate_size": fields["feed_forward_length"],
        "max_position_embeddings": fields["context_length"],
        "rms_norm_eps": fields["attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_theta": fields.get("rope.freq_base", 10_000.0), **read_rope_scaling(fields)},
        "attention_bias": "blk.0.attn_output.bias" in shapes,
    }


def read_rope_scaling(fields: Json) -> Json:
    """The scaling of rotary frequencies. Those of Llama 3 and of LongRoPE are in tensors, not in the metadata."""
    factor = float(fields.get("rope.scaling.factor") or fields.get("rope.scale_linear") or 1.0)
    kind = fields.get("rope.scaling.type", "linear")
    if kind not in ("linear", "none", "yarn", "longrope"):
        known = "none, linear, yarn and longrope"
        raise UnsupportedError(f"rope.scaling.type {show_value(kind)} is not known; known are {known}")
    if kind == "longrope" or kind == "none" or factor in (0.0, 1.0):
        return {}
    return read_yarn(fields, float(factor or 0.0)) if kind == "yarn" else {"rope_type": "linear", "factor": factor}


def read_yarn(fields: Json, factor: float) -> Json:
    """YaRN with the magnitude that follows from the factor; files that store another are refused."""
    for key in OTHER_MAGNITUDES:
        if fields.get(key, 1.0) not in (0.0, 1.0):
            raise UnsupportedError(f"{key} {show_value(fields[key])} is not known here; known is 1 with yarn")
    stored = {name: fields[key] for name, key in YARN_KEYS.items() if key in fields}
    return {"rope_type": "yarn", "factor": factor, **stored}


def read_gemma3(fields: Json, shapes: Shapes) -> Json:
    """The configuration of Gemma 3. The converter does not write that one layer in six has full attention; it is the
    family's default."""
    shape = read_llama(fields, shapes)
    window = fields.get("attention.sliding_window", 0)
    scores = shape["hidden_size"] // shape["num_attention_heads"]
    return shape | {
        "sliding_window": window,
        "rope_local_base_freq": fields.get("rope.freq_base_swa", LOCAL_BASE),
        "query_pre_attn_scalar": scores if fields["block_count"] == GEMMA_27B_LAYERS else shape["head_dim"],
    }


def read_gemma4(fields: Json, shapes: Shapes) -> Json:
    """The configuration of Gemma 4. Numbers of key heads and of inner features may be lists of those of the layers;
    heads of layers with a window have widths of their own."""
    depth, full_width = fields["block_count"], fields["attention.key_length"]
    pattern, width = fields["attention.sliding_window_pattern"], fields["attention.key_length_swa"]
    for suffix, own in (("", full_width), ("_swa", width)):
        for key in (f"rope.dimension_count{suffix}", f"attention.value_length{suffix}"):
            if fields.get(key, own) != own:
                raise UnsupportedError(f"{key} {show_value(fields[key])} differs from the head width {show_value(own)}")
    counts = {"num_key_value_heads": "attention.head_count_kv", "intermediate_size": "feed_forward_length"}
    listed = {
        name: fields[key] if isinstance(fields[key], list) else [fields[key]] * len(pattern)
        for name, key in counts.items()
    }
    for name, values in (("attention.sliding_window_pattern", pattern), *listed.items()):
        if len(values) != depth:
            raise UnsupportedError(f"{counts.get(name, name)} has {len(values)} values, which should be {depth}")
    layers = [
        {"head_dim": width if windowed else full_width, **{name: values[layer] for name, values in listed.items()}}
        for layer, windowed in enumerate(pattern)
    ]
    without_values = [layer for layer in range(depth) if f"blk.{layer}.attn_v.weight" not in shapes]
    shared = fields.get("attention.shared_kv_layers", 0)
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": fields["embedding_length"],
        "num_hidden_layers": depth,
        "num_attention_heads": fields["attention.head_count"],
        "num_key_value_heads": layers[0]["num_key_value_heads"],
        "intermediate_size": layers[0]["intermediate_size"],
        "head_dim": width,
        "global_head_dim": full_width,
        "per_layer_config": {str(layer): sizes for layer, sizes in enumerate(layers)},
        "max_position_embeddings": fields["context_length"],
        "rms_norm_eps": fields["attention.layer_norm_rms_epsilon"],
        "sliding_window": fields["attention.sliding_window"],
        "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in pattern],
        "rope_parameters": {
            "full_attention": {"rope_theta": fields.get("rope.freq_base", 1_000_000.0), **read_rope_scaling(fields)},
            "sliding_attention": {"rope_theta": fields.get("rope.freq_base_swa", LOCAL_BASE)},
        },
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": any(layer < depth - shared for layer in without_values),
        "hidden_size_per_layer_input": fields.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": shapes.get("per_layer_token_embd.weight", shapes["token_embd.weight"])[0],
        "final_logit_softcapping": fields.get("final_logit_softcapping"),
        "enable_moe_block": bool(fields.get("expert_count")),
        "num_experts": fields.get("expert_count"),
        "top_k_experts": fields.get("expert_used_count"),
        "moe_intermediate_size": fields.get("expert_feed_forward_length"),
    }


def read_decoder(fields: Json, shapes: Shapes) -> Json:
    """As `read_llama`, for heads that are rotated in part and for layer norms. The share of rotated features is rounded
    up, so that their number is the file's after it was multiplied and cut to a whole number."""
    head_width = fields.get("attention.key_length", fields["embedding_length"] // fields["attention.head_count"])
    eps = fields.get("attention.layer_norm_rms_epsilon", fields.get("attention.layer_norm_epsilon"))
    whole = {**fields, "rope.dimension_count": head_width, "attention.layer_norm_rms_epsilon": eps}
    shape, rotated = read_llama(whole, shapes), fields.get("rope.dimension_count", head_width)
    share = 1.0 if rotated == head_width else (rotated + 0.25) / head_width
    shape["rope_parameters"]["partial_rotary_factor"] = share
    biased, biased_mlp = "blk.0.attn_q.bias" in shapes, "blk.0.ffn_up.bias" in shapes
    return shape | {
        "layer_norm_eps": eps,
        "norm_eps": eps,
        "attention_bias": biased or "blk.0.attn_qkv.bias" in shapes,
        "mlp_bias": biased_mlp,
        "use_bias": biased,
    }


def read_windowed(fields: Json, shapes: Shapes) -> Json:
    """With the window of all layers, or of those that a list of booleans names."""
    layers = fields.get("attention.sliding_window_pattern")
    kinds = {True: "sliding_attention", False: "full_attention"}
    named = {"layer_types": [kinds[bool(each)] for each in layers]} if isinstance(layers, list) else {}
    return read_decoder(fields, shapes) | {"sliding_window": fields.get("attention.sliding_window") or None, **named}


def read_gemma2(fields: Json, shapes: Shapes) -> Json:
    shape = read_llama(fields, shapes)
    scores = shape["hidden_size"] // shape["num_attention_heads"]
    return shape | {
        "sliding_window": fields.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": fields.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": scores if fields["block_count"] == GEMMA2_27B_LAYERS else shape["head_dim"],
    }


def read_granite(fields: Json, shapes: Shapes) -> Json:
    shape = read_llama(fields, shapes)
    scale = fields.get("attention.scale", 0.0)
    return shape | {
        "attention_multiplier": scale or shape["head_dim"] ** -0.5,
        "embedding_multiplier": fields.get("embedding_scale", 1.0),
        "residual_multiplier": fields.get("residual_scale", 1.0),
        "logits_scaling": fields.get("logit_scale", 1.0),
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
    }


def read_minicpm(fields: Json, shapes: Shapes) -> Json:
    """The three scales are stored by newer converters; llama.cpp's defaults for older files are not known here."""
    return read_llama(fields, shapes) | {
        "scale_emb": fields["embedding_scale"],
        "scale_depth": fields["residual_scale"] * fields["block_count"] ** 0.5,
        "dim_model_base": fields["embedding_length"] / fields["logit_scale"],
    }


def read_olmo2(fields: Json, shapes: Shapes) -> Json:
    """The configuration of OLMo 2 and 3; the second has a window."""
    return read_windowed(fields, shapes) | {"sliding_window": fields.get("attention.sliding_window", 0)}


def read_cohere(fields: Json, shapes: Shapes) -> Json:
    return read_decoder(fields, shapes) | {
        "logit_scale": fields["logit_scale"],
        "sliding_window": fields.get("attention.sliding_window", 0),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
    }


def read_stablelm(fields: Json, shapes: Shapes) -> Json:
    return read_decoder(fields, shapes) | {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in shapes,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in shapes,
        "use_qkv_bias": "blk.0.attn_q.bias" in shapes,
    }


def read_seed_oss(fields: Json, shapes: Shapes) -> Json:
    shape = read_decoder(fields, shapes)
    return shape | {"attention_out_bias": "blk.0.attn_output.bias" in shapes}
