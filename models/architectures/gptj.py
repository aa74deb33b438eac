"""GPT-J and CodeGen: causal, attention and MLP of one norm side by side, rotation of neighbouring features."""

import re
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..network.model_config import ModelConfig
from .family import (
    LAST_TOKEN_HEAD,
    SPAN_HEAD,
    Family,
    HeadSpec,
    Json,
    NamedTensors,
    activation_name,
    deinterleave_heads,
    read_sizes,
)
from .gpt2 import RENAMES as GPT2_RENAMES

RENAMES = (
    (r"\.attn\.(q|query)_proj\.", ".attention.query."),
    (r"\.attn\.(k|key)_proj\.", ".attention.key."),
    (r"\.attn\.(v|value)_proj\.", ".attention.value."),
    (r"\.attn\.out_proj\.", ".attention.output."),
    (r"\.mlp\.fc_in\.", ".mlp.up."),
    (r"\.mlp\.fc_out\.", ".mlp.down."),
    *GPT2_RENAMES,
)
LANGUAGE_HEAD = ((r"^lm_head\.", "head.output."),)
DROP = r"^lm_head\.|\.attn\.(bias|masked_bias|causal_mask|embed_positions)$"
CODEGEN_PARTS = 4  # of the fused matrix, as it was trained on four processors: each has queries, values and keys


def model_config(hf: Json) -> ModelConfig:
    width, heads = hf["n_embd"], hf["n_head"]
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=width,
        depth=hf["n_layer"],
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=hf.get("n_inner") or 4 * width,
        max_positions=hf["n_positions"],
        causal=True,
        position="rotary",
        rotary_width=hf.get("rotary_dim", 64),
        norm_order="parallel",
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        activation=activation_name(hf.get("activation_function", "gelu_new")),
        qkv_bias=False,
        output_bias=False,
        logit_bias=True,
    )


def convert_weight(heads: int, rotated: int, name: str, tensor: Tensor) -> NamedTensors:
    """Split CodeGen's fused matrix, reorder the rotated features of queries and keys, and give the one norm of a block
    two names."""
    if re.search(r"\.ln_1\.", name):
        return [(name, tensor), (name.replace(".ln_1.", ".ln_2."), tensor)]
    pieces = [(name, tensor)]
    if ".qkv_proj." in name:
        parts = tensor.reshape(CODEGEN_PARTS, 3, -1, *tensor.shape[1:]).unbind(1)
        names = (name.replace("qkv_proj", part) for part in ("q_proj", "v_proj", "k_proj"))
        pieces = [(part, piece.flatten(0, 1)) for part, piece in zip(names, parts, strict=True)]
    rows = re.compile(r"\.[qk]_proj\.")
    return [(part, deinterleave_heads(piece, heads, rotated) if rows.search(part) else piece) for part, piece in pieces]


def choose_variant(family: Family, hf: Json) -> Family:
    """Features are reordered within those that are rotated."""
    heads, rotated = read_sizes({"rotary_dim": 64, **hf}, "n_head", "rotary_dim")
    return replace(family, convert=partial(convert_weight, heads, rotated))


GPTJ = Family(
    name="gptj",
    prefix="transformer",
    config=model_config,
    renames=RENAMES,
    heads={
        "GPTJForCausalLM": HeadSpec("generate", LANGUAGE_HEAD),
        "GPTJModel": HeadSpec("embed"),
        "GPTJForSequenceClassification": LAST_TOKEN_HEAD,
        "GPTJForQuestionAnswering": SPAN_HEAD,
    },
    drop=DROP,
    variant=choose_variant,
)
CODEGEN = replace(
    GPTJ,
    name="codegen",
    heads={"CodeGenForCausalLM": HeadSpec("generate", LANGUAGE_HEAD), "CodeGenModel": HeadSpec("embed")},
)
