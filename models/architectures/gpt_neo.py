"""GPT-Neo: GPT-2 with separate projections, scores without a scale, and a window in every other layer."""

from typing import Any

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ModelConfig
from .family import (
    LAST_TOKEN_HEAD,
    SPAN_HEAD,
    TAG_HEAD,
    Family,
    HeadSpec,
    Json,
    activation_name,
    layer_numbers,
    read_sizes,
)
from .gptj import DROP, LANGUAGE_HEAD
from .gptj import RENAMES as GPTJ_RENAMES

RENAMES = ((r"\.attn\.attention\.", ".attn."), *GPTJ_RENAMES)


def model_config(hf: Json) -> ModelConfig:
    width, heads, depth = hf["hidden_size"], hf["num_heads"], hf["num_layers"]
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=width,
        depth=depth,
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=hf.get("intermediate_size") or 4 * width,
        max_positions=hf["max_position_embeddings"],
        causal=True,
        window=read_sizes({"window_size": 256, **hf}, "window_size")[0],
        windowed=read_local_layers(read_pattern(hf), depth),
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        score_scale=1.0,
        activation=activation_name(hf.get("activation_function", "gelu_new")),
        qkv_bias=False,
    )


def read_pattern(hf: Json) -> Any:
    """The kinds of layers as a list of [kinds, repetitions]; the kind of each layer goes before such a list."""
    if (kinds := hf.get("attention_layers")) is not None:
        return [[kinds, 1]]
    return hf.get("attention_types") or [[["global", "local"], 12]]


def read_local_layers(pattern: Any, depth: int) -> tuple[bool, ...]:
    """Which layers have a window, from a list of [kinds of layers, repetitions]. UnsupportedError unless it is one for
    each layer."""
    kinds: list[Any] = []
    for kind, count in pattern:
        if len(kind) * count > len(layer_numbers(depth)):
            raise UnsupportedError(f"attention_types {show_value(pattern)} has more than {depth} layers")
        kinds += list(kind) * count
    if len(kinds) != depth or not all(kind in ("global", "local") for kind in kinds):
        raise UnsupportedError(f"attention_types {show_value(pattern)} is not one of global and local for each layer")
    return tuple(kind == "local" for kind in kinds)


GPT_NEO = Family(
    name="gpt_neo",
    prefix="transformer",
    config=model_config,
    renames=RENAMES,
    heads={
        "GPTNeoForCausalLM": HeadSpec("generate", LANGUAGE_HEAD),
        "GPTNeoModel": HeadSpec("embed"),
        "GPTNeoForSequenceClassification": LAST_TOKEN_HEAD,
        "GPTNeoForTokenClassification": TAG_HEAD,
        "GPTNeoForQuestionAnswering": SPAN_HEAD,
    },
    drop=DROP + r"|\.attention\.(bias|masked_bias)$",
)
