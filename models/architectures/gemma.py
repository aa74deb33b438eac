"""Gemma 1, 2 and 3 (text) and VaultGemma: Llama with scaled embeddings and norms stored as their difference from one;
Gemma 2 and 3 with norms before and after each part and sliding windows in many layers."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ModelConfig
from . import llama, text_part
from .family import (
    LAST_TOKEN_HEAD,
    Family,
    HeadSpec,
    Json,
    NamedTensors,
    check_required_values,
    layer_numbers,
    read_limit,
    read_rope,
)

RENAMES = (
    (r"\.post_attention_layernorm\.", ".attention_post_norm."),
    (r"\.pre_feedforward_layernorm\.", ".mlp_norm."),
    (r"\.post_feedforward_layernorm\.", ".mlp_post_norm."),
    *llama.RENAMES,
)
VAULT_RENAMES = ((r"\.pre_feedforward_layernorm\.", ".mlp_norm."), *llama.RENAMES)
# What the first published configurations of the wrapper leave out of `text_config`.
TEXT_DEFAULTS: Json = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}


def convert_weight(name: str, tensor: Tensor) -> NamedTensors:
    """Add one to norm weights, which are stored as their difference from one."""
    return [(name, tensor + 1)] if name.endswith("norm.weight") else [(name, tensor)]


def gemma_config(hf: Json) -> ModelConfig:
    """Gemma 1. Its first configurations say "gelu" and mean the approximation by tanh."""
    check_causal(hf)
    activation = hf.get("hidden_activation") or hf.get("hidden_act") or "gelu_pytorch_tanh"
    hf = {"head_dim": 256, **hf, "hidden_act": "gelu_pytorch_tanh" if activation == "gelu" else activation}
    return replace(llama.model_config(hf), window=0, windowed=(), embedding_scale=hf["hidden_size"] ** 0.5)


def gemma2_config(hf: Json) -> ModelConfig:
    """Gemma 2: every other layer has a window, scores and logits have a cap."""
    check_causal(hf)
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return _windowed_config({**caps, **hf}, 2)


def vault_config(hf: Json) -> ModelConfig:
    """VaultGemma: Gemma 2 without the norms after each part (arXiv:2510.15001)."""
    return replace(gemma2_config(hf), norm_order="pre")


def gemma3_config(hf: Json) -> ModelConfig:
    """Gemma 3: five of six layers have a window and a rotary base of their own. Scores have no cap, whatever the
    configuration says."""
    bidirectional = hf.get("use_bidirectional_attention", False)
    if not isinstance(bidirectional, bool):
        raise UnsupportedError(
            f"use_bidirectional_attention is {show_value(bidirectional)}, which should be true or false"
        )
    hf = {"rope_theta": 1_000_000.0, **hf, "attn_logit_softcapping": None}
    local_base, scaling = read_rope({**hf, "rope_theta": 10_000.0}, "sliding_attention")
    if "sliding_attention" not in (hf.get("rope_parameters") or {}):
        local_base, scaling = float(hf.get("rope_local_base_freq", 10_000.0)), None
    if scaling is not None:
        raise UnsupportedError("rope_parameters: a scaling of sliding_attention is not known here")
    shape = _windowed_config(hf, hf.get("sliding_window_pattern") or 6)
    return replace(
        shape,
        causal=not bidirectional,
        # Of a bidirectional network half of the window lies on each side of a row.
        window=shape.window // 2 + 1 if bidirectional else shape.window,
        window_rope_base=local_base,
        query_key_norm="shared",
    )


def images_config(hf: Json) -> ModelConfig:
    """The text part of networks that read images, whose logits have no cap, whatever the configuration says."""
    check_required_values(hf, {"final_logit_softcapping": None})
    return gemma3_config(hf)


def check_causal(hf: Json) -> None:
    if hf.get("use_bidirectional_attention"):
        raise UnsupportedError("use_bidirectional_attention is not known here")


def _windowed_config(hf: Json, every: int) -> ModelConfig:
    """The common part of Gemma 2 and 3; one layer in `every` has full attention unless `layer_types` lists them."""
    hf = {"head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256, **hf}
    hf["hidden_act"] = hf.get("hidden_activation", "gelu_pytorch_tanh")
    shape, layers = llama.model_config(hf), layer_numbers(hf["num_hidden_layers"])
    return replace(
        shape,
        windowed=shape.windowed or tuple(bool((layer + 1) % every) for layer in layers),
        norm_order="sandwich",
        embedding_scale=hf["hidden_size"] ** 0.5,
        score_scale=float(hf["query_pre_attn_scalar"]) ** -0.5,
        score_cap=read_limit(hf, "attn_logit_softcapping"),
        logit_cap=read_limit(hf, "final_logit_softcapping"),
    )


def _family(name: str, read_config: Callable[[Json], ModelConfig], heads: dict[str, HeadSpec]) -> Family:
    renames = llama.RENAMES if name == "gemma" else RENAMES
    return Family(name, "model", read_config, renames, heads, convert_weight, llama.DROP)


GEMMA = _family("gemma", gemma_config, llama.llama_heads("Gemma", llama.LABELS))
GEMMA2 = _family("gemma2", gemma2_config, llama.llama_heads("Gemma2", llama.LABELS))
VAULT_GEMMA = replace(
    GEMMA2,
    name="vaultgemma",
    config=vault_config,
    renames=VAULT_RENAMES,
    heads=llama.llama_heads("VaultGemma", ()),
)
GEMMA3 = replace(
    _family(
        "gemma3_text",
        gemma3_config,
        {
            "Gemma3ForCausalLM": HeadSpec("generate", llama.LANGUAGE_HEAD),
            "Gemma3TextModel": HeadSpec("embed"),
            "Gemma3TextForSequenceClassification": LAST_TOKEN_HEAD,
        },
    ),
    rope_by_layer=True,
)
GEMMA3_IMAGES = text_part.wrap_family(
    "gemma3",
    "Gemma3",
    (replace(GEMMA3, config=images_config),),
    TEXT_DEFAULTS,
    {"ForSequenceClassification": LAST_TOKEN_HEAD},
)
