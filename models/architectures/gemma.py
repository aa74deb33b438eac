"""Gemma 3 (text): Llama with norms before and after each part, normed queries and keys, and sliding windows in most
layers."""

from dataclasses import replace

from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ModelConfig
from . import llama
from .family import LAST_TOKEN_HEAD, Family, HeadSpec, Json, NamedTensors, activation_name, layer_numbers, read_rope

RENAMES = (
    (r"\.post_attention_layernorm\.", ".attention_post_norm."),
    (r"\.pre_feedforward_layernorm\.", ".mlp_norm."),
    (r"\.post_feedforward_layernorm\.", ".mlp_post_norm."),
    *llama.RENAMES,
)


def convert_weight(name: str, tensor: Tensor) -> NamedTensors:
    """Add one to norm weights, which are stored as their difference from one."""
    return [(name, tensor + 1)] if name.endswith("norm.weight") else [(name, tensor)]


def model_config(hf: Json) -> ModelConfig:
    for cap in ("final_logit_softcapping", "attn_logit_softcapping"):
        if hf.get(cap):
            raise UnsupportedError(
                f"{cap} {show_value(hf[cap])} is not known here: only checkpoints without it are loaded"
            )
    bidirectional = hf.get("use_bidirectional_attention", False)
    if not isinstance(bidirectional, bool):
        raise UnsupportedError(
            f"use_bidirectional_attention is {show_value(bidirectional)}, which should be true or false"
        )
    hf = {"head_dim": 256, "rope_theta": 1_000_000.0, "sliding_window": 4096, **hf}
    depth, every = hf["num_hidden_layers"], hf.get("sliding_window_pattern") or 6
    local_base, _ = read_rope(hf, "sliding_attention")
    if "rope_parameters" not in hf or "sliding_attention" not in hf["rope_parameters"]:
        local_base = float(hf.get("rope_local_base_freq", 10_000.0))
    shape = llama.model_config({**hf, "hidden_act": hf.get("hidden_activation", "gelu_pytorch_tanh")})
    return replace(
        shape,
        causal=not bidirectional,
        # Of a bidirectional network half of the window lies on each side of a row.
        window=shape.window // 2 + 1 if bidirectional else shape.window,
        windowed=shape.windowed or tuple(bool((layer + 1) % every) for layer in layer_numbers(depth)),
        window_rope_base=local_base,
        norm_order="sandwich",
        embedding_scale=hf["hidden_size"] ** 0.5,
        query_key_norm="shared",
        score_scale=float(hf.get("query_pre_attn_scalar", 256)) ** -0.5,
        activation=activation_name(hf.get("hidden_activation", "gelu_pytorch_tanh")),
    )


GEMMA3 = Family(
    name="gemma3_text",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads={
        "Gemma3ForCausalLM": HeadSpec("generate", llama.LANGUAGE_HEAD),
        "Gemma3TextModel": HeadSpec("embed"),
        "Gemma3TextForSequenceClassification": LAST_TOKEN_HEAD,
    },
    convert=convert_weight,
    drop=llama.DROP,
)
