"""Falcon: causal, multi-query or grouped attention, rotary positions or linear biases, attention and MLP side by side
or one after the other."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from ..core.errors import UnsupportedError
from ..network.model_config import ModelConfig
from . import bloom
from .family import (
    LAST_TOKEN_HEAD,
    SPAN_HEAD,
    TAG_HEAD,
    Family,
    HeadSpec,
    Json,
    NamedTensors,
    activation_name,
    context_length,
    read_rope,
    read_sizes,
)
from .fused_matrices import split_fused

RENAMES = ((r"\.ln_attn\.", ".attention_norm."), (r"\.ln_mlp\.", ".mlp_norm."), *bloom.RENAMES)


def model_config(hf: Json) -> ModelConfig:
    """Scores and linear biases are scaled together."""
    hf = {"max_position_embeddings": 2048, **hf}
    width, heads, biased = bloom.read_width(hf), hf["num_attention_heads"], bool(hf.get("bias", False))
    base, scaling = read_rope(hf)
    has_linear_bias = bool(hf.get("alibi", False))
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=width,
        depth=hf["num_hidden_layers"],
        heads=heads,
        kv_heads=read_key_heads(hf),
        head_width=width // heads,
        mlp_width=hf.get("ffn_hidden_size") or 4 * width,
        max_positions=context_length(hf),
        causal=True,
        position="alibi" if has_linear_bias else "rotary",
        distance_scale=(width // heads) ** -0.5 if has_linear_bias else 1.0,
        rope_base=base,
        rope_scaling=None if has_linear_bias else scaling,
        norm_order="parallel" if is_parallel(hf) else "pre",
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        activation=activation_name(hf.get("activation", "gelu")),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
    )


def is_parallel(hf: Json) -> bool:
    """Whether attention and MLP are side by side. UnsupportedError for the newer form without it."""
    parallel = bool(hf.get("parallel_attn", True))
    if hf.get("new_decoder_architecture") and not parallel:
        raise UnsupportedError("parallel_attn false with new_decoder_architecture is not known")
    return parallel


def read_key_heads(hf: Json) -> int:
    heads, groups = read_sizes({"num_kv_heads": hf["num_attention_heads"], **hf}, "num_attention_heads", "num_kv_heads")
    if hf.get("new_decoder_architecture"):
        return groups
    return 1 if hf.get("multi_query", True) else heads


def has_one_norm(hf: Json) -> bool:
    """Whether attention and MLP of a block read the output of one norm."""
    if not is_parallel(hf):
        return False
    return not hf.get("new_decoder_architecture") or hf.get("num_ln_in_parallel_attn") == 1


def convert_weight(groups: int, queries: int, name: str, tensor: Tensor) -> NamedTensors:
    """Split the fused matrix, and give the one norm of a block two names."""
    if ".input_layernorm." in name:
        return [(name, tensor), (name.replace("input", "post_attention"), tensor)]
    return split_fused("query_key_value", groups, queries, name, tensor)


def choose_variant(family: Family, hf: Json) -> Family:
    """The fused matrix is split by the heads that share a key."""
    groups = read_key_heads(hf)
    convert = convert_weight if has_one_norm(hf) else partial(split_fused, "query_key_value")
    return replace(family, convert=partial(convert, groups, hf["num_attention_heads"] // groups))


FALCON = Family(
    name="falcon",
    prefix="transformer",
    config=model_config,
    renames=RENAMES,
    heads={
        "FalconForCausalLM": HeadSpec("generate", ((r"^lm_head\.", "head.output."),)),
        "FalconModel": HeadSpec("embed"),
        "FalconForSequenceClassification": LAST_TOKEN_HEAD,
        "FalconForTokenClassification": TAG_HEAD,
        "FalconForQuestionAnswering": SPAN_HEAD,
    },
    drop=r"^lm_head\.|rotary_emb\.inv_freq$",
    variant=choose_variant,
)
