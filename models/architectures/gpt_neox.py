"""GPT-NeoX, Pythia and GPT-NeoX Japanese: causal, attention and MLP side by side (one after the other in the Japanese
one), partial rotation, each head's query, key and value in one matrix."""

import re
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..network.model_config import ModelConfig
from . import llama
from .family import LAST_TOKEN_HEAD, SPAN_HEAD, TAG_HEAD, Family, HeadSpec, Json, NamedTensors, read_sizes
from .fused_matrices import split_fused

RENAMES = (
    (r"^embed_in\.", "tokens."),
    (r"^layers\.", "blocks."),
    (r"^final_layer_norm\.", "final_norm."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".mlp_norm."),
    (r"\.attention\.dense\.", ".attention.output."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.up."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.down."),
)


OUTPUT = re.compile(r"^layers\.(\d+)\.attention\.dense\.weight$")


def model_config(hf: Json) -> ModelConfig:
    old = {"rope_theta": hf.get("rotary_emb_base", 10_000.0), "partial_rotary_factor": hf.get("rotary_pct", 0.25)}
    shape = llama.llama_config({"hidden_act": "gelu", **hf, **old})
    biased = bool(hf.get("attention_bias", True))
    return replace(
        shape,
        norm="layer",
        norm_eps=hf.get("layer_norm_eps", 1e-5),
        norm_order="parallel" if hf.get("use_parallel_residual", True) else "pre",
        gated_mlp=False,
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=True,
    )


def choose_variant(family: Family, hf: Json) -> Family:
    """The fused matrix is split by heads."""
    (heads,) = read_sizes(hf, "num_attention_heads")
    return replace(family, convert=partial(split_fused, "query_key_value", heads, 1))


def japanese_config(hf: Json) -> ModelConfig:
    """Only the output of the last layer's attention has a bias."""
    width = int(hf["hidden_size"] * hf.get("intermediate_multiple_size", 4))
    old = {"rotary_pct": 1.0, "use_parallel_residual": False, "attention_bias": False}
    shape = model_config({**old, **hf, "intermediate_size": width})
    return replace(shape, output_bias=True, mlp_bias=False)


def split_japanese(heads: int, depth: int, name: str, tensor: Tensor) -> NamedTensors:
    """Split the fused matrix, and give the other layers a bias of zeros, too."""
    if found := OUTPUT.match(name):
        zeros = [] if int(found[1]) == depth - 1 else [(name.replace("weight", "bias"), tensor.new_zeros(len(tensor)))]
        return [(name, tensor), *zeros]
    return split_fused("query_key_value", heads, 1, name, tensor)


def choose_japanese_variant(family: Family, hf: Json) -> Family:
    heads, depth = read_sizes(hf, "num_attention_heads", "num_hidden_layers")
    return replace(family, convert=partial(split_japanese, heads, depth))


GPT_NEOX = Family(
    name="gpt_neox",
    prefix="gpt_neox",
    config=model_config,
    renames=RENAMES,
    heads={
        "GPTNeoXForCausalLM": HeadSpec("generate", ((r"^(embed_out|lm_head)\.", "head.output."),)),
        "GPTNeoXModel": HeadSpec("embed"),
        "GPTNeoXForSequenceClassification": LAST_TOKEN_HEAD,
        "GPTNeoXForTokenClassification": TAG_HEAD,
        "GPTNeoXForQuestionAnswering": SPAN_HEAD,
    },
    drop=r"^(embed_out|lm_head)\.|\.attention\.(bias|masked_bias)$|rotary_emb\.inv_freq$",
    variant=choose_variant,
    rotates_share=True,
)
GPT_NEOX_JAPANESE = replace(
    GPT_NEOX,
    name="gpt_neox_japanese",
    prefix="gpt_neox_japanese",
    config=japanese_config,
    renames=((r"\.attention\.dense_bias$", ".attention.output.bias"), *RENAMES),
    heads={
        "GPTNeoXJapaneseForCausalLM": GPT_NEOX.heads["GPTNeoXForCausalLM"],
        "GPTNeoXJapaneseModel": HeadSpec("embed"),
    },
    variant=choose_japanese_variant,
)
