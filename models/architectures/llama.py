"""Llama, Mistral, Qwen2 and Qwen3: causal, pre-norm with RMS norm, rotary positions, gated MLP, grouped-query
attention."""

from collections.abc import Callable, Collection
from dataclasses import replace

from ..network.model_config import ModelConfig
from .family import (
    CAUSAL_HEADS,
    Family,
    HeadSpec,
    Json,
    activation_name,
    context_length,
    layer_numbers,
    read_rope,
    read_rotary_width,
    read_windowed_layers,
)

RENAMES = (
    (r"^embed_tokens\.", "tokens."),
    (r"^layers\.", "blocks."),
    (r"^norm\.", "final_norm."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".mlp_norm."),
    (r"\.self_attn\.q_proj\.", ".attention.query."),
    (r"\.self_attn\.k_proj\.", ".attention.key."),
    (r"\.self_attn\.v_proj\.", ".attention.value."),
    (r"\.self_attn\.o_proj\.", ".attention.output."),
    (r"\.self_attn\.q_norm\.", ".attention.query_norm."),
    (r"\.self_attn\.k_norm\.", ".attention.key_norm."),
    (r"\.mlp\.(up|gate|down)_proj\.", r".mlp.\1."),
)
TEXT_LABELS = ("ForSequenceClassification",)
LABELS = ("ForSequenceClassification", "ForTokenClassification")
LANGUAGE_HEAD = ((r"^lm_head\.", "head.output."),)
DROP = r"^lm_head\.|rotary_emb\.inv_freq$"


def model_config(hf: Json) -> ModelConfig:
    """Llama's configuration; the other families change a few fields."""
    heads = hf["num_attention_heads"]
    head_width = hf.get("head_dim") or hf["hidden_size"] // heads
    base, scaling = read_rope(hf)
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=hf["hidden_size"],
        depth=hf["num_hidden_layers"],
        heads=heads,
        kv_heads=hf.get("num_key_value_heads") or heads,
        head_width=head_width,
        mlp_width=hf["intermediate_size"],
        max_positions=context_length(hf),
        causal=True,
        position="rotary",
        rope_base=base,
        rope_scaling=scaling,
        rotary_width=read_rotary_width(hf, head_width),
        window=hf.get("sliding_window") or 0,
        windowed=read_windowed_layers(hf),
        norm="rms",
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        activation=activation_name(hf.get("hidden_act", "silu")),
        gated_mlp=True,
        qkv_bias=bool(hf.get("attention_bias", False)),
        output_bias=bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
    )


def llama_config(hf: Json) -> ModelConfig:
    """Llama has no sliding window, even if its configuration has the field."""
    return replace(model_config(hf), window=0, windowed=())


def mistral_config(hf: Json) -> ModelConfig:
    """Either all layers have the sliding window or none."""
    return replace(model_config({"sliding_window": 4096, **hf}), windowed=())


def qwen2_config(hf: Json) -> ModelConfig:
    return replace(_qwen_window(hf), qkv_bias=True, output_bias=False)


def qwen3_config(hf: Json) -> ModelConfig:
    return replace(_qwen_window(hf), query_key_norm="shared")


def _qwen_window(hf: Json) -> ModelConfig:
    """Qwen writes a window even where `use_sliding_window` is false; where it is true, the upper layers use it."""
    if not hf.get("use_sliding_window"):
        return replace(model_config(hf), window=0, windowed=())
    hf = {"sliding_window": 4096, "max_window_layers": 28, **hf}
    by_depth = tuple(layer >= hf["max_window_layers"] for layer in layer_numbers(hf["num_hidden_layers"]))
    return replace(model_config(hf), windowed=read_windowed_layers(hf) or by_depth)


def llama_heads(name: str, others: Collection[str] = tuple(CAUSAL_HEADS)) -> dict[str, HeadSpec]:
    """The heads such a network is saved with; `name` is the prefix of the class names, `others` are those beside the
    language head that transformers has."""
    return {
        f"{name}ForCausalLM": HeadSpec("generate", LANGUAGE_HEAD),
        f"{name}Model": HeadSpec("embed"),
        **{f"{name}{other}": CAUSAL_HEADS[other] for other in others},
    }


def _family(name: str, read_config: Callable[[Json], ModelConfig]) -> Family:
    return Family(name.lower(), "model", read_config, RENAMES, llama_heads(name), drop=DROP)


LLAMA = _family("Llama", llama_config)
MISTRAL = _family("Mistral", mistral_config)
QWEN2 = _family("Qwen2", qwen2_config)
QWEN3 = _family("Qwen3", qwen3_config)
